"""`rollout`: real graphs against a real endpoint; what is recorded, and how each run ends."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import openai
import pytest
from langchain.agents import create_agent
from langchain.agents.structured_output import ProviderStrategy, ToolStrategy
from langchain_core.messages import AIMessage, HumanMessage
from langchain_core.prompts import ChatPromptTemplate
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.errors import GraphRecursionError
from langgraph.func import entrypoint
from langgraph.graph import END, START, MessagesState, StateGraph
from langgraph.types import Command, RetryPolicy, interrupt
from pydantic import BaseModel

from art_core.capture import open_scope
from art_core.config import SamplingConfig
from art_core.errors import CaptureError, ConfigError, RolloutFailure
from art_core.trajectories import Trajectory
from art_langgraph import (
    ChatArt,
    NoModelCalls,
    TrajectoryCallbackHandler,
    capture,
    init_chat_model,
    rollout,
    wrap_rollout,
)
from tests.stub_endpoint import (
    Answer,
    Asked,
    call,
    completion,
    endpoint,
    recording,
    refusal,
    streamed,
)

ASK: Any = {"messages": [("user", "1+2?")]}


def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


def uses_add() -> list[dict[str, Any]]:
    """The answers of an agent that calls `add` and then says what it returned."""
    calls = [call("add", '{"a": 1, "b": 2}')]
    return [completion(None, [5, 6], tool_calls=calls), completion("3", [7])]


def one_node(node: Any, **settings: Any) -> StateGraph[Any]:
    graph: StateGraph[Any] = StateGraph(MessagesState)
    graph.add_node("node", node, **settings)
    graph.add_edge(START, "node")
    return graph


def ask_model(llm: Any = None) -> Any:
    model = llm or ChatArt(max_retries=0)

    def node(state: Any) -> Any:
        return {"messages": [model.invoke(state["messages"])]}

    return node


def sampled(trajectory: Trajectory) -> list[list[int] | None]:
    return [None if c.sampled_ids is None else c.sampled_ids.tolist() for c in trajectory.calls]


# --- what is recorded


async def test_an_agent_with_tools_is_recorded_whole() -> None:
    agent = create_agent(ChatArt(), [add])
    with endpoint(uses_add()) as stub:
        trajectory = await rollout(agent, ASK, model=stub.target(), metadata={"scenario": "s1"})
    assert sampled(trajectory) == [[5, 6], [7]]
    assert all(c.trainable for c in trajectory.calls)
    assert trajectory.ended == "completed"
    assert trajectory.reward is None
    assert trajectory.state["messages"][-1].content == "3"
    assert [m["role"] for m in trajectory.messages()] == ["user", "assistant", "tool", "assistant"]
    assert trajectory.tools is not None
    assert trajectory.tools[0]["function"]["name"] == "add"
    origins = [c.origin for c in trajectory.calls]
    assert [(o.node, o.graph_step, o.attempt) for o in origins] == [
        ("model", 1, 1),
        ("model", 3, 1),
    ]
    assert origins[0].namespace != origins[1].namespace
    told = trajectory.metadata["graph"]
    assert told["nodes"] == ["model", "tools"]
    assert [(t["name"], t["node"], t["error"]) for t in told["tools"]] == [("add", "tools", None)]
    assert trajectory.metadata["scenario"] == "s1"
    assert {a.headers["x-art-rollout"] for a in stub.requests} == {trajectory.rollout_id}


async def test_one_agent_is_played_again_and_again() -> None:
    agent = create_agent(ChatArt(), [add])
    with endpoint(uses_add() * 2) as stub:
        played = [await rollout(agent, ASK, model=stub.target()) for _ in range(2)]
    assert [sampled(t) for t in played] == [[[5, 6], [7]]] * 2


async def test_many_rollouts_of_one_object_do_not_mix() -> None:
    def echo(asked: Asked) -> dict[str, Any]:
        said = asked.body["messages"]
        number = int(said[0]["content"])
        if len(said) == 1:
            return completion(None, [number], tool_calls=[call("add", '{"a": 1, "b": 2}')])
        return completion(str(number), [number])

    agent = create_agent(ChatArt(), [add])
    with endpoint(echo) as stub:
        target = stub.target()
        played = await asyncio.gather(
            *(rollout(agent, {"messages": [("user", str(i))]}, model=target) for i in range(64))
        )
    assert [sampled(t) for t in played] == [[[i], [i]] for i in range(64)]
    assert [t.state["messages"][-1].content for t in played] == [str(i) for i in range(64)]


@pytest.mark.parametrize(
    "messages",
    [
        [("user", "hi")],
        [{"role": "user", "content": "hi"}],
        [HumanMessage("hi")],
        HumanMessage("hi"),
        "hi",
    ],
    ids=["tuple", "dict", "message", "one message", "string"],
)
async def test_every_form_of_message_is_recorded(messages: Any) -> None:
    with endpoint([completion("yo", [5])]) as stub:
        trajectory = await rollout(
            create_agent(ChatArt(), []), {"messages": messages}, model=stub.target()
        )
    assert trajectory.messages() == [
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": "yo"},
    ]


class Ans(BaseModel):
    x: int


@pytest.mark.parametrize("strategy", [ToolStrategy, ProviderStrategy])
async def test_structured_agents_are_recorded(strategy: Any) -> None:
    tool = completion(None, [5], tool_calls=[call("Ans", '{"x": 1}')])
    text = completion('{"x": 1}', [5])
    agent = create_agent(ChatArt(), [add], response_format=strategy(Ans))
    with endpoint([tool if strategy is ToolStrategy else text]) as stub:
        trajectory = await rollout(agent, ASK, model=stub.target())
    assert trajectory.state["structured_response"] == Ans(x=1)
    assert sampled(trajectory) == [[5]]


async def test_a_node_that_passes_its_own_callbacks_is_recorded() -> None:
    def node(state: Any) -> Any:
        config: Any = {"callbacks": [], "metadata": {"mine": 1}}
        return {"messages": [ChatArt().invoke(state["messages"], config=config)]}

    with endpoint([completion("yo", [5])]) as stub:
        trajectory = await rollout(one_node(node), ASK, model=stub.target())
    assert sampled(trajectory) == [[5]]


@pytest.mark.parametrize("is_async", [True, False])
async def test_a_node_that_streams_is_recorded_with_its_origin(is_async: bool) -> None:
    async def streams(state: Any) -> Any:
        chunks = [chunk async for chunk in ChatArt().astream(state["messages"])]
        return {"messages": [AIMessage("".join(str(c.content) for c in chunks))]}

    def streams_sync(state: Any) -> Any:
        chunks = ChatArt().stream(state["messages"])
        return {"messages": [AIMessage("".join(str(c.content) for c in chunks))]}

    with endpoint([streamed("yo", [5, 6])]) as stub:
        graph = one_node(streams if is_async else streams_sync)
        trajectory = await rollout(graph, ASK, model=stub.target())
    assert sampled(trajectory) == [[5, 6]]
    assert trajectory.calls[0].origin.node == "node"
    assert trajectory.calls[0].origin.run_id is not None


@pytest.mark.parametrize("version", ["v1", "v2"])
async def test_a_graph_streamed_to_a_user_is_recorded(version: Any) -> None:
    graph = one_node(ask_model()).compile()
    with endpoint([streamed("yo", [5, 6])]) as stub:
        async with capture(stub.target()) as trajectory:
            parts = [p async for p in graph.astream(ASK, stream_mode="messages", version=version)]
    assert len(parts) >= 2
    assert sampled(trajectory) == [[5, 6]]
    assert trajectory.calls[0].origin.node == "node"


async def test_a_retried_node_is_two_calls_with_their_attempts() -> None:
    tries: list[int] = []

    def node(state: Any) -> Any:
        said = ChatArt().invoke(state["messages"])
        tries.append(1)
        if len(tries) == 1:
            raise ValueError("not good enough")
        return {"messages": [said]}

    policy = RetryPolicy(max_attempts=2, initial_interval=0.01, retry_on=ValueError)
    with endpoint([completion("a", [1]), completion("b", [2])]) as stub:
        trajectory = await rollout(one_node(node, retry_policy=policy), ASK, model=stub.target())
    assert sampled(trajectory) == [[1], [2]]
    assert [c.origin.attempt for c in trajectory.calls] == [1, 2]


async def test_roles_have_their_own_models() -> None:
    def node(state: Any) -> Any:
        plan = ChatArt(role="planner").invoke(state["messages"])
        return {"messages": [plan, ChatArt(role="writer").invoke([plan])]}

    answers = [completion("plan", [1]), completion("text", [2])]
    with endpoint(answers) as stub:
        trajectory = await rollout(
            one_node(node),
            ASK,
            model=stub.target(model_name="writer@1"),
            models={"planner": stub.target(model_name="planner@9")},
        )
    assert [(c.model, c.step, c.origin.role) for c in trajectory.calls] == [
        ("planner", 9, "planner"),
        ("writer", 1, "writer"),
    ]


@pytest.mark.parametrize(("evaluation", "temperature"), [(False, 1.0), (True, 0.2)])
@pytest.mark.filterwarnings("ignore::art_langgraph.SamplingOverridden")
async def test_evaluation_keeps_what_the_nodes_ask_for(
    evaluation: bool, temperature: float
) -> None:
    graph = one_node(ask_model(ChatArt(temperature=0.2)))
    with endpoint([completion()]) as stub:
        model = stub.target(sampling=SamplingConfig(), trains=True)
        await rollout(graph, ASK, model=model, evaluation=evaluation)
    assert stub.bodies[0]["temperature"] == temperature


# --- sources


@pytest.mark.parametrize(
    "kind", ["compiled", "graph", "factory", "coroutine", "context", "async context"]
)
async def test_sources_of_graphs(kind: str) -> None:
    graph = one_node(ask_model())
    left: list[str] = []

    async def coroutine() -> Any:
        return graph.compile()

    @asynccontextmanager
    async def async_context() -> AsyncIterator[Any]:
        yield graph
        left.append(kind)

    class Context:
        def __enter__(self) -> Any:
            return graph

        def __exit__(self, *_: object) -> None:
            left.append(kind)

    sources: dict[str, Any] = {
        "compiled": graph.compile(),
        "graph": graph,
        "factory": lambda: graph,
        "coroutine": coroutine,
        "context": Context,
        "async context": async_context,
    }
    with endpoint([completion("yo", [5])]) as stub:
        trajectory = await rollout(sources[kind], ASK, model=stub.target())
    assert sampled(trajectory) == [[5]]
    assert left == ([kind] if "context" in kind else [])


async def test_a_chain_and_a_functional_graph_are_played_too() -> None:
    @entrypoint()
    async def workflow(text: str) -> str:
        return str((await ChatArt().ainvoke(text)).content)

    chain = ChatPromptTemplate.from_messages([("user", "{q}")]) | ChatArt()
    with endpoint([completion("a", [1]), completion("b", [2])]) as stub:
        first = await rollout(workflow, "hi", model=stub.target())
        second = await rollout(chain, {"q": "hi"}, model=stub.target())
    assert (first.state, sampled(first)) == ("a", [[1]])
    assert (second.state.content, sampled(second)) == ("b", [[2]])


async def test_what_can_not_be_played_is_said() -> None:
    with pytest.raises(RolloutFailure) as raised:
        await rollout(lambda: 3, ASK)
    assert isinstance(raised.value.__cause__, ConfigError)
    assert "got 3" in str(raised.value)


async def test_the_graphs_config_and_context_are_kept() -> None:
    class Context(BaseModel):
        name: str

    seen: list[Any] = []

    def node(state: Any, runtime: Any, config: Any) -> Any:
        seen.append((runtime.context.name, config["configurable"]["mine"], config["tags"]))
        return ask_model()(state)

    node.__annotations__ = {"runtime": __import__("langgraph.runtime").runtime.Runtime[Context]}
    graph: Any = StateGraph(MessagesState, context_schema=Context)
    graph.add_node("node", node)
    graph.add_edge(START, "node")
    config: Any = {"configurable": {"mine": 1}, "tags": ["t"]}
    with endpoint([completion()]) as stub:
        await rollout(graph, ASK, model=stub.target(), config=config, context=Context(name="n"))
    assert seen == [("n", 1, ["t"])]


# --- threads and state


async def test_rollouts_share_no_state_though_the_graph_has_a_memory() -> None:
    agent = create_agent(ChatArt(), [], checkpointer=InMemorySaver())
    config: Any = {"configurable": {"thread_id": "shared"}}
    with endpoint([completion("a"), completion("b")]) as stub:
        played = [await rollout(agent, ASK, model=stub.target(), config=config) for _ in "ab"]
    assert [len(t.state["messages"]) for t in played] == [2, 2]
    assert len({t.metadata["graph"]["thread_id"] for t in played} | {"shared"}) == 3


async def test_an_interrupt_keeps_state_and_question_and_can_be_answered() -> None:
    def node(state: Any) -> Any:
        said = ChatArt().invoke(state["messages"])
        return {"messages": [said, AIMessage(str(interrupt({"ask": "sure?"})))]}

    graph = one_node(node).compile(checkpointer=InMemorySaver())
    with endpoint([completion("a", [1]), completion("a", [1])]) as stub:
        first = await rollout(graph, ASK, model=stub.target())
        thread = first.metadata["graph"]["thread_id"]
        second = await rollout(
            graph,
            Command(resume="yes"),
            model=stub.target(),
            config={"configurable": {"thread_id": thread}},
        )
    assert first.ended == "interrupted"
    assert first.reward is None
    assert first.state["__interrupt__"][0].value == {"ask": "sure?"}
    assert first.metadata["graph"]["interrupts"][0]["value"] == "{'ask': 'sure?'}"
    assert second.ended == "completed"
    assert second.state["messages"][-1].content == "yes"


# --- endings


async def test_the_recursion_limit_is_the_policys_fault() -> None:
    def loops(asked: Asked) -> dict[str, Any]:
        return completion(None, [5], tool_calls=[call("add", '{"a": 1, "b": 2}')])

    with endpoint(loops) as stub:
        trajectory = await rollout(
            create_agent(ChatArt(), [add]), ASK, model=stub.target(), config={"recursion_limit": 6}
        )
    assert trajectory.ended == "recursion_limit"
    assert isinstance(trajectory.exception, GraphRecursionError)
    assert trajectory.reward == 0.0
    assert sampled(trajectory) == [[5]] * len(stub.requests)
    assert len(trajectory.state["messages"]) > 4


async def test_a_context_overflow_is_the_policys_fault() -> None:
    answers: list[Any] = [uses_add()[0], refusal(400, "too long", "context_length_exceeded")]
    with endpoint(answers) as stub:
        trajectory = await rollout(
            create_agent(ChatArt(), [add]), ASK, model=stub.target(), failure_reward=-1.0
        )
    assert (trajectory.ended, trajectory.reward) == ("context_overflow", -1.0)
    assert sampled(trajectory) == [[5, 6], None]
    assert len(trajectory.state["messages"]) == 3


@pytest.mark.parametrize("failure_reward", [0.0, None])
async def test_an_exception_on_the_models_output_is_the_policys_fault(
    failure_reward: float | None,
) -> None:
    def node(state: Any) -> Any:
        return {"messages": [int(str(ChatArt().invoke(state["messages"]).content))]}

    with endpoint([completion("three", [5])]) as stub:
        trajectory = await rollout(
            one_node(node), ASK, model=stub.target(), failure_reward=failure_reward
        )
    assert (trajectory.ended, trajectory.reward) == ("error", failure_reward)
    assert isinstance(trajectory.exception, ValueError)
    assert sampled(trajectory) == [[5]]
    assert len(trajectory.state["messages"]) == 1


async def test_an_exception_before_the_model_spoke_is_not() -> None:
    def node(state: Any) -> Any:
        raise KeyError("typo")

    with endpoint([]) as stub, pytest.raises(RolloutFailure) as raised:
        await rollout(one_node(node), ASK, model=stub.target())
    assert isinstance(raised.value.__cause__, KeyError)


@pytest.mark.parametrize(
    ("second", "said"),
    [
        (refusal(503, "busy"), "busy"),
        (refusal(401, "key"), "key"),
        (Answer(completion(), cut=True), "Connection"),
        (Answer(b"<html>ok</html>"), ""),
    ],
    ids=["busy", "key", "cut", "garbled"],
)
async def test_a_fault_of_the_endpoint_is_a_failure_with_the_calls_inside(
    second: Any, said: str
) -> None:
    agent = create_agent(ChatArt(max_retries=0), [add])
    with endpoint([uses_add()[0], second]) as stub, pytest.raises(RolloutFailure) as raised:
        await rollout(agent, ASK, model=stub.target())
    trajectory = raised.value.trajectory
    assert sampled(trajectory) == [[5, 6], None]
    assert trajectory.ended == "error"
    assert trajectory.reward is None
    assert len(trajectory.state["messages"]) == 3
    assert raised.value.__cause__ is trajectory.exception
    assert said in str(raised.value)


@pytest.mark.parametrize("data", [b"[1]", b"3", b'"x"', b"null", b" true", b"oops"], ids=str)
async def test_an_event_that_is_no_object_is_the_endpoints_fault(data: bytes) -> None:
    """LangChain would fail on it by an AttributeError; the call is kept and says what came."""
    first, *others = streamed("ok").events or ()
    stream = Answer(events=[first, b"data: " + data + b"\n\n", *others])
    agent = one_node(ask_model(ChatArt(streaming=True, max_retries=0)))
    with endpoint([stream]) as stub, pytest.raises(RolloutFailure) as raised:
        await rollout(agent, ASK, model=stub.target())
    error = raised.value.__cause__
    assert isinstance(error, openai.APIError)
    assert "an event of the stream is no JSON object" in str(error)
    (call,) = raised.value.trajectory.calls
    assert call.error == f"an event of the stream is no JSON object: {data.decode()!r}"
    assert data in call.response


async def test_no_endpoint_at_all_is_a_failure() -> None:
    with endpoint([]) as stub:
        target = stub.target()
    with pytest.raises(RolloutFailure, match="Connection"):
        await rollout(one_node(ask_model()), ASK, model=target)


async def test_out_of_time_returns_what_was_reached() -> None:
    until = threading.Event()
    answers: list[Any] = [uses_add()[0], Answer(completion(), until=until)]
    agent = create_agent(ChatArt(), [add])
    with endpoint(answers) as stub:
        trajectory = await rollout(agent, ASK, model=stub.target(), timeout=0.3)
        until.set()
    assert (trajectory.ended, trajectory.reward) == ("timeout", 0.0)
    assert sampled(trajectory) == [[5, 6], None]
    assert trajectory.calls[1].error == "CancelledError"
    assert len(trajectory.state["messages"]) == 3


async def test_a_cancelled_rollout_lets_the_cancel_travel_and_its_calls_stay_around() -> None:
    until = threading.Event()

    async def node(state: Any) -> Any:
        return {"messages": [await ChatArt().ainvoke(state["messages"])]}

    with endpoint([Answer(completion(), until=until)]) as stub, open_scope() as around:
        task = asyncio.create_task(rollout(one_node(node), ASK, model=stub.target()))
        await asyncio.to_thread(stub.came.wait, 5)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        until.set()
    assert [c.error for c in around.calls] == ["CancelledError"]


async def test_a_cancel_inside_is_a_failure() -> None:
    async def node(state: Any) -> Any:
        await ChatArt().ainvoke(state["messages"])
        raise asyncio.CancelledError

    with endpoint([completion("a", [1])]) as stub, pytest.raises(RolloutFailure) as raised:
        await rollout(one_node(node), ASK, model=stub.target())
    assert raised.value.trajectory.ended == "cancelled"
    assert sampled(raised.value.trajectory) == [[1]]


async def test_a_graph_that_asks_no_model_is_told_by_its_nodes() -> None:
    with pytest.warns(NoModelCalls, match="nodes that ran: node"), endpoint([]) as stub:
        trajectory = await rollout(one_node(lambda state: {}), ASK, model=stub.target())
    assert trajectory.calls == []
    assert trajectory.metadata["graph"]["nodes"] == ["node"]


async def test_without_a_model_the_error_says_so() -> None:
    with pytest.raises(RolloutFailure) as raised:
        await rollout(one_node(ask_model()), ASK)
    assert isinstance(raised.value.__cause__, CaptureError)


# --- repeatable ids


async def test_rollouts_in_a_named_scope_have_ids_that_repeat() -> None:
    async def play() -> list[str | None]:
        with endpoint([completion()] * 2) as stub, open_scope("step3.s1"):
            graph = one_node(ask_model())
            return [(await rollout(graph, ASK, model=stub.target())).rollout_id for _ in "ab"]

    assert await play() == await play() == ["step3.s1.0", "step3.s1.1"]


# --- free code


async def test_capture_keeps_the_calls_of_code_that_raises() -> None:
    async def fails() -> None:
        async with capture(stub.target(), metadata={"k": 1}) as trajectory:
            kept.append(trajectory)
            await ChatArt().ainvoke("hi")
            raise KeyError

    kept: list[Trajectory] = []
    with endpoint([completion("a", [1])]) as stub, pytest.raises(KeyError):
        await fails()
    (trajectory,) = kept
    assert sampled(trajectory) == [[1]]
    assert trajectory.metadata == {"k": 1}
    assert trajectory.rollout_id is not None


async def test_wrap_rollout_gives_a_function_its_model_and_its_trajectory_the_calls() -> None:
    async def play(question: str) -> Trajectory:
        answer = await init_chat_model("gpt-4o", model_provider="openai").ainvoke(question)
        return Trajectory(reward=float(str(answer.content)))

    with endpoint([completion("1.5", [1])] * 2) as stub:
        wrapped = wrap_rollout(stub.target(), play)
        played = [await wrapped("q"), await wrapped(question="q")]
    assert [(t.reward, sampled(t)) for t in played] == [(1.5, [[1]])] * 2


async def test_wrap_rollout_ends_as_rollout_does() -> None:
    async def fails(error: Exception) -> Trajectory:
        await ChatArt().ainvoke("hi")
        raise error

    async def forgets() -> Any:
        return 3

    with endpoint([completion("a", [1])] * 2) as stub:
        wrapped = wrap_rollout(stub.target(), fails)
        assert (await wrapped(ValueError("bad answer"))).reward == 0.0
        with pytest.raises(RolloutFailure) as raised:
            await wrapped(ConnectionError("database"))
        with pytest.raises(TypeError, match="got 3"):
            await wrap_rollout(stub.target(), forgets)()
    assert sampled(raised.value.trajectory) == [[1]]


def test_init_chat_model_refuses_what_it_would_ignore() -> None:
    assert init_chat_model(temperature=0.3).temperature == 0.3
    with pytest.raises(ConfigError, match="configurable"):
        init_chat_model("gpt-4o", configurable_fields="any")


def test_a_handler_of_ones_own_records_into_the_scope_around() -> None:
    graph = one_node(ask_model()).compile()
    handler = TrajectoryCallbackHandler()
    with recording([completion("a", [1])]) as (_, scope):
        graph.invoke(ASK, config={"callbacks": [handler]})
    assert len(scope.calls) == 1
    assert handler.nodes == ["node"]
    assert END not in handler.nodes
