"""Who asked: calls of fan-outs, subgraphs, threads and loops keep their identity.

Cases are those collected from public bug reports; their numbers name where an input comes from.
"""

from __future__ import annotations

import asyncio
import operator
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Annotated, Any, TypedDict

import pytest
from langchain_core.messages import AIMessage, ToolMessage
from langchain_core.runnables import RunnableConfig
from langchain_core.runnables.config import ContextThreadPoolExecutor
from langgraph.graph import START, MessagesState, StateGraph
from langgraph.types import Send

from art_core.capture import ContextExecutor
from art_core.errors import CaptureError
from art_core.trajectories import Trajectory
from art_langgraph import ChatArt, TrajectoryCallbackHandler, capture, rollout
from tests.stub_endpoint import Asked, call, completion, endpoint


class Votes(TypedDict):
    votes: Annotated[list[str], operator.add]


def sampled(trajectory: Trajectory) -> list[Any]:
    return [None if c.sampled_ids is None else c.sampled_ids.tolist() for c in trajectory.calls]


async def test_equal_answers_to_equal_prompts_are_calls_of_their_own() -> None:
    """Case 024: self-consistency voting. 3 samples, 5 trainable tokens, none merged or chained."""

    async def vote(state: Any) -> Any:
        return {"votes": [(await ChatArt().ainvoke("q")).content]}

    graph: Any = StateGraph(Votes)
    graph.add_node("vote", vote)
    graph.add_conditional_edges(START, lambda _: [Send("vote", {})] * 3, ["vote"])
    answers = [completion("yes", [5, 6]), completion("yes", [5, 6]), completion("no", [7])]
    with endpoint(answers) as stub:
        trajectory = await rollout(graph, {"votes": []}, model=stub.target())
    assert sorted(trajectory.state["votes"]) == ["no", "yes", "yes"]
    assert sorted(sampled(trajectory)) == [[5, 6], [5, 6], [7]]
    assert trajectory.completion_tokens == 5
    origins = [c.origin for c in trajectory.calls]
    assert {o.node for o in origins} == {"vote"}
    assert {o.attempt for o in origins} == {1}
    for identity in ("namespace", "task_path", "run_id"):
        assert len({getattr(o, identity) for o in origins}) == 3
    assert len({c.key for c in trajectory.calls}) == 3


async def test_nodes_of_one_name_in_two_graphs_are_told_apart() -> None:
    """Case 025: both levels say node "agent"; only the namespace (outer|inner) differs."""

    def ask(state: Any) -> Any:
        return {"messages": [ChatArt().invoke(state["messages"])]}

    inner: Any = StateGraph(MessagesState)
    inner.add_node("agent", ask)
    inner.add_edge(START, "agent")
    outer: Any = StateGraph(MessagesState)
    outer.add_node("agent", ask)
    outer.add_node("helper", inner.compile())
    outer.add_edge(START, "agent")
    outer.add_edge("agent", "helper")
    with endpoint([completion("a", [1]), completion("b", [2])]) as stub:
        trajectory = await rollout(outer, {"messages": [("user", "q")]}, model=stub.target())
    assert [c.origin.node for c in trajectory.calls] == ["agent", "agent"]
    above, below = (str(c.origin.namespace) for c in trajectory.calls)
    assert above.startswith("agent:")
    assert below.startswith("helper:")
    assert "|agent:" in below


async def test_constant_ids_of_tool_calls_lose_nothing() -> None:
    """Case 028: some servers number every call call_0. 3 calls, results ra then rb, in order."""

    def agent(state: Any) -> Any:
        return {"messages": [ChatArt().invoke(state["messages"])]}

    def tools(state: Any) -> Any:
        (asked,) = state["messages"][-1].tool_calls
        said = f"r{asked['args']['q']}"
        return {"messages": [ToolMessage(said, tool_call_id=asked["id"])]}

    def after(state: Any) -> str:
        return "tools" if state["messages"][-1].tool_calls else "__end__"

    graph: Any = StateGraph(MessagesState)
    graph.add_node("agent", agent)
    graph.add_node("tools", tools)
    graph.add_edge(START, "agent")
    graph.add_conditional_edges("agent", after, ["tools", "__end__"])
    graph.add_edge("tools", "agent")
    answers = [
        completion(None, [1], tool_calls=[call("look", '{"q": "a"}', "call_0")]),
        completion(None, [2], tool_calls=[call("look", '{"q": "b"}', "call_0")]),
        completion("ok", [3]),
    ]
    with endpoint(answers) as stub:
        trajectory = await rollout(graph, {"messages": [("user", "q")]}, model=stub.target())
    assert sampled(trajectory) == [[1], [2], [3]]
    results = [m["content"] for m in trajectory.calls[-1].messages if m["role"] == "tool"]
    assert results == ["ra", "rb"]
    assert len({c.key for c in trajectory.calls}) == 3


# --- threads


def echo(asked: Asked) -> dict[str, Any]:
    said = asked.body["messages"][0]["content"]
    return completion(said, [int(said[1:])])


def threaded(pool: Any, *, pass_config: bool) -> Any:
    """Case 013's graph: a node that asks twice from a pool, then one that uses the loop's."""
    llm = ChatArt()

    def node(state: Any, config: RunnableConfig) -> Any:
        given = config if pass_config else None
        with pool() as executor:
            said = list(executor.map(lambda q: llm.invoke(q, given), ["q0", "q1"]))
        return {"messages": said[:1]}

    async def node2(state: Any, config: RunnableConfig) -> Any:
        given = config if pass_config else None
        loop = asyncio.get_running_loop()
        said = await loop.run_in_executor(None, lambda: llm.invoke("q2", given))
        return {"messages": [said]}

    graph: Any = StateGraph(MessagesState)
    graph.add_node("node", node)
    graph.add_node("node2", node2)
    graph.add_edge(START, "node")
    graph.add_edge("node", "node2")
    return graph


@pytest.mark.parametrize(
    ("pool", "pass_config"),
    [(ContextThreadPoolExecutor, False), (ThreadPoolExecutor, True)],
    ids=["context pool", "config passed"],
)
async def test_threads_in_nodes_belong_to_their_rollout(pool: Any, pass_config: bool) -> None:
    """Case 013: 3 calls in one trajectory, each with its node.

    The loop's own pool keeps the context where `gather` has set it; a bare one needs the config.
    """
    with ContextExecutor(4) as executor, endpoint(echo) as stub:
        loop = asyncio.get_running_loop()
        loop.set_default_executor(ThreadPoolExecutor(4) if pass_config else executor)
        graph = threaded(pool, pass_config=pass_config)
        trajectory = await rollout(graph, {"messages": []}, model=stub.target())
    assert sorted(sampled(trajectory)) == [[0], [1], [2]]
    assert sorted(str(c.origin.node) for c in trajectory.calls) == ["node", "node", "node2"]
    assert "incomplete" not in trajectory.metadata


async def test_a_bare_thread_makes_the_record_incomplete_and_says_so() -> None:
    """Case 013, fallback: even where the node swallows the error."""

    def node(state: Any) -> Any:
        with ThreadPoolExecutor() as executor:
            error = executor.submit(ChatArt().invoke, "q0").exception()
        said = ChatArt().invoke("q1")
        return {"messages": [said, AIMessage(str(error))]}

    graph: Any = StateGraph(MessagesState)
    graph.add_node("node", node)
    graph.add_edge(START, "node")
    with endpoint(echo) as stub:
        trajectory = await rollout(graph, {"messages": []}, model=stub.target())
    assert sampled(trajectory) == [[1]]
    assert "ContextThreadPoolExecutor" in trajectory.state["messages"][-1].content
    assert len(trajectory.metadata["incomplete"]) == 1
    assert not trajectory.completeness.is_whole


async def test_a_thread_that_outlives_its_rollout_is_no_loss_of_the_others() -> None:
    """A time limit ends a rollout, not the thread of its node; what that asks later is nobody's."""
    over, asked = threading.Event(), threading.Event()
    errors: list[Exception] = []

    def late(state: Any) -> Any:
        over.wait(30)
        try:
            ChatArt().invoke("q0")
        except CaptureError as error:
            errors.append(error)
        asked.set()
        return {}

    async def steady(state: Any) -> Any:
        said = await ChatArt().ainvoke("q1")
        over.set()
        await asyncio.to_thread(asked.wait, 30)
        return {"messages": [said]}

    def one(node: Any) -> Any:
        graph: Any = StateGraph(MessagesState)
        graph.add_node("node", node)
        return graph.add_edge(START, "node")

    nothing: Any = {"messages": []}
    with endpoint(echo) as stub:
        short = await rollout(one(late), nothing, model=stub.target(), timeout=0.05)
        other = await rollout(one(steady), nothing, model=stub.target())
    assert short.ended == "timeout"
    assert sampled(other) == [[1]]
    assert "incomplete" not in other.metadata
    assert "has ended" in str(errors[0])


async def test_async_nodes_that_take_no_config_are_recorded() -> None:
    """Case 015: two calls at once in a coroutine; both recorded, with their node."""

    async def node(state: Any) -> Any:
        a, _ = await asyncio.gather(ChatArt().ainvoke("q0"), ChatArt().ainvoke("q1"))
        return {"messages": [a]}

    graph: Any = StateGraph(MessagesState)
    graph.add_node("node", node)
    graph.add_edge(START, "node")
    with endpoint(echo) as stub:
        played = await rollout(graph, {"messages": []}, model=stub.target())
        async with capture(stub.target()) as captured:
            handler = TrajectoryCallbackHandler()
            await graph.compile().ainvoke({"messages": []}, config={"callbacks": [handler]})
    for trajectory in (played, captured):
        assert sorted(sampled(trajectory)) == [[0], [1]]
        assert [c.origin.node for c in trajectory.calls] == ["node", "node"]
    assert all(c.origin.parent_run_id for c in played.calls)
    assert handler.nodes == ["node"]


# --- loops


@pytest.mark.filterwarnings("error")
def test_one_model_in_two_event_loops() -> None:
    """Case 017: training scripts and notebooks call `asyncio.run` once a step."""
    llm = ChatArt()
    found = []

    async def play(target: Any) -> None:
        async with capture(target) as trajectory:
            await llm.ainvoke("q1")
        found.append(trajectory)

    with endpoint(echo) as stub:
        asyncio.run(play(stub.target()))
        asyncio.run(play(stub.target()))
    assert [sampled(t) for t in found] == [[[1]], [[1]]]
