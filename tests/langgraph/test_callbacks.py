"""`TrajectoryCallbackHandler`: tools, nodes, and the calls of other chat models."""

from __future__ import annotations

from contextlib import suppress
from typing import Any
from uuid import uuid4

import openai
import pytest
from langchain.agents import create_agent
from langchain_core.language_models import GenericFakeChatModel
from langchain_core.messages import AIMessage
from langchain_core.outputs import ChatGeneration, LLMResult
from langchain_core.tools import StructuredTool
from langchain_openai import ChatOpenAI
from langgraph.graph import START, MessagesState, StateGraph

from art_core.capture import open_scope
from art_core.trajectories import Trajectory
from art_langgraph import ChatArt, NoModelCalls, TrajectoryCallbackHandler, capture, rollout
from tests.stub_endpoint import call, completion, endpoint, recording, refusal, streamed

ASK: Any = {"messages": [("user", "hi")]}


def explode() -> str:
    """Fail."""
    raise ValueError("boom")


def graph_of(node: Any) -> Any:
    graph: Any = StateGraph(MessagesState)
    graph.add_node("node", node)
    graph.add_edge(START, "node")
    return graph


async def test_a_tool_that_raises_is_told_with_its_error() -> None:
    agent = create_agent(ChatArt(), [explode])
    answers = [completion(None, [5], tool_calls=[call("explode")])]
    with endpoint(answers) as stub:
        trajectory = await rollout(agent, ASK, model=stub.target())
    assert (trajectory.ended, trajectory.reward) == ("error", 0.0)
    (told,) = trajectory.metadata["graph"]["tools"]
    assert (told["name"], told["node"], told["error"]) == ("explode", "tools", "ValueError: boom")
    assert told["seconds"] >= 0.0
    assert trajectory.logs == ["tool explode raised ValueError: boom"]


def stock(stub: Any, **settings: Any) -> ChatOpenAI:
    """Another provider's model, in its own class."""
    return ChatOpenAI(
        base_url=stub.base_url, api_key="k", model="gpt-4o", max_retries=0, **settings
    )


@pytest.mark.parametrize("streaming", [False, True])
async def test_calls_of_other_models_are_context(streaming: bool) -> None:
    """Kept with their messages and origin; without ids, so never trained."""
    with endpoint([completion("a", [1])]) as stub:
        answer = streamed("judged") if streaming else completion("judged", [9])
        with endpoint([answer]) as hosted:
            other = stock(hosted, streaming=streaming)

            def node(state: Any) -> Any:
                said = ChatArt().invoke(state["messages"])
                return {"messages": [said, other.invoke([("user", "judge"), said])]}

            trajectory = await rollout(graph_of(node), ASK, model=stub.target())
    mine, theirs = trajectory.calls
    assert mine.trainable
    assert not theirs.trainable
    assert (theirs.model, theirs.step) == ("gpt-4o", None)
    assert theirs.message["content"] == "judged"
    assert theirs.finish_reason == "stop"
    assert theirs.request["messages"] == [
        {"role": "user", "content": "judge"},
        {"role": "assistant", "content": "a"},
    ]
    assert (theirs.origin.node, theirs.error) == ("node", None)
    assert "return_token_ids" not in hosted.bodies[0]


async def test_a_failed_call_of_another_model_is_kept_with_its_error() -> None:
    with endpoint([completion("a", [1])]) as stub, endpoint([refusal(400, "no")]) as hosted:
        other = stock(hosted)

        def node(state: Any) -> Any:
            said = ChatArt().invoke(state["messages"])
            try:
                other.invoke("judge")
            except Exception:  # noqa: BLE001  # the graph goes on without its judge
                return {"messages": [said]}
            return {}

        trajectory = await rollout(graph_of(node), ASK, model=stub.target())
    assert trajectory.ended == "completed"
    assert [c.error is None for c in trajectory.calls] == [True, False]
    assert "no" in str(trajectory.calls[1].error)


async def test_a_graph_of_other_models_only_is_told() -> None:
    other = GenericFakeChatModel(messages=iter([AIMessage("hi")]))
    graph = graph_of(lambda state: {"messages": [other.invoke(state["messages"])]})
    with endpoint([]) as stub, pytest.warns(NoModelCalls, match="other models were called"):
        trajectory = await rollout(graph, ASK, model=stub.target())
    assert [c.message["content"] for c in trajectory.calls] == ["hi"]


async def test_a_stand_in_is_another_model() -> None:
    """`otherwise` answers where no model is found: its call is context, and is kept."""
    llm = ChatArt(otherwise=GenericFakeChatModel(messages=iter([AIMessage("hi")])))
    graph = graph_of(lambda state: {"messages": [llm.invoke(state["messages"])]})
    with pytest.warns(NoModelCalls):
        trajectory: Trajectory = await rollout(graph, ASK)
    assert [c.trainable for c in trajectory.calls] == [False]
    (asked,) = trajectory.calls[0].messages
    assert (asked["role"], asked["content"]) == ("user", "hi")


def test_a_call_that_both_paths_see_is_kept_once() -> None:
    handler = TrajectoryCallbackHandler()
    config: Any = {"callbacks": [handler]}
    answers: list[Any] = [completion("a", [1]), streamed("b", [2]), refusal(400)]
    with recording(answers) as (_, scope):
        llm = ChatArt()
        llm.invoke("hi", config=config)
        list(llm.stream("hi", config=config))
        with pytest.raises(Exception, match="no"):
            llm.invoke("hi", config=config)
    assert [c.trainable for c in scope.calls] == [True, True, False]


async def test_two_handlers_tell_of_a_call_once() -> None:
    """One of the user's own, in the graph's config, beside that of `rollout`."""
    with endpoint([completion("a", [1])]) as stub, endpoint([completion("b", [2])]) as hosted:
        other = stock(hosted)

        def node(state: Any) -> Any:
            return {"messages": [ChatArt().invoke("hi"), other.invoke("hi")]}

        config: Any = {"callbacks": [TrajectoryCallbackHandler()]}
        trajectory = await rollout(graph_of(node), ASK, model=stub.target(), config=config)
    assert [c.message["content"] for c in trajectory.calls] == ["a", "b"]
    assert [c.left_out for c in trajectory.calls] == [None, "other model"]


@pytest.mark.parametrize("answer", [completion("a", [1]), refusal(400)])
async def test_a_scope_inside_a_node_records_a_call_once(answer: Any) -> None:
    """The rollout's handler hears of a call that went through the scope inside."""

    async def node(state: Any) -> Any:
        async with capture():
            with suppress(openai.BadRequestError):
                await ChatArt().ainvoke("hi")
        return {}

    with endpoint([answer]) as stub:
        trajectory = await rollout(graph_of(node), ASK, model=stub.target())
    assert len(trajectory.calls) == 1


def test_a_stream_left_early_is_kept_once() -> None:
    """LangChain tells handlers of it before the response is closed."""
    handler = TrajectoryCallbackHandler()
    with recording([streamed("abc", [2])]) as (_, scope):
        for _chunk in ChatArt().stream("hi", config={"callbacks": [handler]}):
            break
    assert len(scope.calls) == 1


def test_outside_a_scope_a_handler_records_nothing() -> None:
    model = GenericFakeChatModel(messages=iter([AIMessage("hi")]))
    handler = TrajectoryCallbackHandler()
    assert model.invoke("hi", config={"callbacks": [handler]}).content == "hi"


def test_a_handler_that_outlives_its_runs_does_not_grow() -> None:
    """One handler at the top of an application; 1000 of each kind are remembered."""
    handler = TrajectoryCallbackHandler()
    for number in range(2200):
        tool_run, run = uuid4(), uuid4()
        handler.on_chain_start({}, {}, metadata={"langgraph_node": f"node {number}"})
        handler.on_tool_start({"name": "look"}, "{}", run_id=tool_run, parent_run_id=uuid4())
        with open_scope():
            handler.on_chat_model_start({}, [[]], run_id=run, parent_run_id=uuid4())
            if number % 2:  # the others were cancelled, of which LangChain does not tell
                said = AIMessage("", response_metadata={"system_fingerprint": str(number)})
                result = LLMResult(generations=[[ChatGeneration(message=said)]])
                handler.on_llm_end(result, run_id=run)
                handler.on_tool_end("", run_id=tool_run)
    sizes = {name: len(kept) for name, kept in vars(handler).items() if hasattr(kept, "__len__")}
    assert max(sizes.values()) == 1000
    assert sizes["tools"] == 1000
    assert handler.tools[-1].seconds is not None


async def test_the_handler_of_a_rollout_forgets_nothing() -> None:
    look = StructuredTool.from_function(lambda: "x", name="look", description="Look.")

    def node(state: Any) -> Any:
        for _ in range(1001):
            look.invoke({})
        return {"messages": [ChatArt().invoke("hi")]}

    with endpoint([completion("a", [1])]) as stub:
        trajectory = await rollout(graph_of(node), ASK, model=stub.target())
    assert len(trajectory.metadata["graph"]["tools"]) == 1001
