"""A plain StateGraph: loops, batches, streams, edges and handlers that ask, time limits."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from langchain_core.messages import AIMessage, HumanMessage
from langgraph.errors import NodeTimeoutError
from langgraph.graph import END, START, MessagesState, StateGraph
from langgraph.types import RetryPolicy

from art_langgraph import ChatArt
from tests.langgraph.proofs.evidence import histories, origins, said
from tests.langgraph.proofs.house import House, Talk


def chain(*nodes: Any, state: Any = MessagesState) -> Any:
    """Nodes one after the other, named after their functions."""
    graph: Any = StateGraph(state)
    graph.add_sequence(nodes)
    graph.add_edge(START, nodes[0].__name__)
    return graph


def echo(talk: Talk) -> str:
    return f"re {talk.last}"


async def test_a_loop_is_one_history_and_every_round_a_step() -> None:
    async def think(state: Any) -> Any:
        return {"messages": [await ChatArt().ainvoke(state["messages"])]}

    def more(state: Any) -> Any:
        return {"messages": [HumanMessage("go on")]}

    def after(state: Any) -> str:
        return END if len(state["messages"]) > 5 else "more"

    graph: Any = StateGraph(MessagesState)
    graph.add_node(think)
    graph.add_node(more)
    graph.add_edge(START, "think")
    graph.add_conditional_edges("think", after, ["more", END])
    graph.add_edge("more", "think")
    with House(lambda talk: f"thought {talk.count('assistant')}") as house:
        trajectory = await house.play(graph)
    assert histories(trajectory) == [["thought 0", "thought 1", "thought 2"]]
    assert origins(trajectory, "node", "graph_step", "attempt") == [
        ("think", 1, 1),
        ("think", 3, 1),
        ("think", 5, 1),
    ]


async def test_a_batch_in_a_node_is_as_many_calls() -> None:
    asked: list[Any] = [[("user", f"q{i}")] for i in range(6)]

    def sync(state: Any) -> Any:
        return {"messages": ChatArt().batch(asked)}

    async def async_(state: Any) -> Any:
        return {"messages": await ChatArt().abatch(asked, config={"max_concurrency": 2})}

    async def completed(state: Any) -> Any:
        done = [m async for _, m in ChatArt().abatch_as_completed(asked)]
        return {"messages": done}

    with House(echo) as house:
        trajectory = await house.play(chain(sync, async_, completed))
    assert histories(trajectory) == sorted([[f"re q{i}"] for i in range(6)] * 3)
    nodes = [o[0] for o in origins(trajectory, "node")]
    assert sorted(nodes) == sorted(["sync", "async_", "completed"] * 6)
    assert len({c.origin.run_id for c in trajectory.calls}) == 18


async def test_batched_calls_that_fail_are_kept_beside_those_that_do_not() -> None:
    async def node(state: Any) -> Any:
        asked: list[Any] = [[("user", f"q{i}")] for i in range(4)]
        found: list[Any] = await ChatArt(max_retries=0).abatch(asked, return_exceptions=True)
        return {"messages": [m for m in found if isinstance(m, AIMessage)]}

    with House(echo) as house:
        house.faults.extend([503])
        trajectory = await house.play(chain(node))
    assert sum(c.error is None for c in trajectory.calls) == 3
    assert len(trajectory.calls) == 4
    assert len(trajectory.state["messages"]) == 4


@pytest.mark.parametrize("sync", [True, False])
async def test_a_stream_that_a_node_leaves_is_kept_and_not_trained(sync: bool) -> None:
    """Its ids are not whole; the call after it is a sample of its own."""

    def leaves(state: Any) -> Any:
        first = next(iter(ChatArt().stream("long")))
        return {"messages": [AIMessage(str(first.content))]}

    async def aleaves(state: Any) -> Any:
        async for chunk in ChatArt().astream("long"):
            if chunk.content:
                break
        return {"messages": []}

    async def asks(state: Any) -> Any:
        return {"messages": [await ChatArt().ainvoke("short")]}

    def says(talk: Talk) -> str:
        return "x" * 400 if talk.user == "long" else "ok"

    with House(says, delay=0.005) as house:
        trajectory = await house.play(chain(leaves if sync else aleaves, asks))
        await house.idle()
        assert house.engine.cancelled == 1
    left, whole = trajectory.calls
    assert "closed the response" in str(left.error)
    assert left.origin.node == ("leaves" if sync else "aleaves")
    assert said(whole) == "ok"
    assert trajectory.completion_tokens == 3


async def test_an_edge_that_asks_a_model_where_to_go() -> None:
    """The call belongs to the node that the edge leaves."""

    async def start(state: Any) -> Any:
        return {"messages": [await ChatArt().ainvoke("begin")]}

    async def route(state: Any) -> str:
        return str((await ChatArt(role="router").ainvoke("where?")).content)

    def left(state: Any) -> Any:
        return {"messages": [ChatArt().invoke("go left")]}

    graph: Any = StateGraph(MessagesState)
    graph.add_node(start)
    graph.add_node(left)
    graph.add_edge(START, "start")
    graph.add_conditional_edges("start", route, ["left", END])
    with House(lambda talk: "left" if talk.last == "where?" else f"re {talk.last}") as house:
        trajectory = await house.play(graph)
    assert origins(trajectory, "node", "role", "graph_step") == [
        ("start", None, 1),
        ("start", "router", 1),
        ("left", None, 2),
    ]


async def test_the_handler_of_a_nodes_error_may_ask_as_well() -> None:
    async def fails(state: Any) -> Any:
        await ChatArt().ainvoke("try")
        raise ValueError("no")

    async def mends(state: Any) -> Any:
        return {"messages": [await ChatArt().ainvoke("mend")]}

    graph: Any = StateGraph(MessagesState)
    graph.add_node("node", fails, error_handler=mends, metadata={"mine": 1})
    graph.add_edge(START, "node")
    with House(echo) as house:
        trajectory = await house.play(graph)
    assert trajectory.ended == "completed"
    assert histories(trajectory) == [["re mend"], ["re try"]]


async def test_a_node_that_runs_out_of_time_is_tried_again() -> None:
    """The first answer is cut by the node's own limit; the second try's is whole."""
    slow = iter([True, False])

    async def node(state: Any) -> Any:
        long = next(slow)
        return {"messages": [await ChatArt().ainvoke("long" if long else "short")]}

    graph: Any = StateGraph(MessagesState)
    again = RetryPolicy(max_attempts=2, initial_interval=0.01, retry_on=NodeTimeoutError)
    graph.add_node("node", node, timeout=1.5, retry_policy=again)
    graph.add_edge(START, "node")
    with House(lambda talk: "x" * 40_000 if talk.user == "long" else "ok", delay=0.005) as house:
        trajectory = await house.play(graph)
        await house.idle()
        assert house.engine.cancelled == 1
    assert [c.error is None for c in trajectory.calls] == [False, True]
    assert origins(trajectory, "attempt") == [(1,), (2,)]
    assert trajectory.ended == "completed"


async def test_a_call_that_no_node_waits_for_is_kept_if_it_ends_soon() -> None:
    left: list[Any] = []

    async def node(state: Any) -> Any:
        left.append(asyncio.create_task(ChatArt().ainvoke("aside")))
        return {"messages": [await ChatArt().ainvoke("main")]}

    with House(echo) as house:
        trajectory = await house.play(chain(node))
        await left[0]
    assert histories(trajectory) == [["re aside"], ["re main"]]
    assert origins(trajectory, "node") == [("node",), ("node",)]
