"""Graphs inside graphs: as nodes, called in nodes, in parallel, through Send and Command."""

from __future__ import annotations

import asyncio
import operator
from typing import Annotated, Any, TypedDict

import pytest
from langchain_core.messages import HumanMessage
from langgraph.graph import END, START, MessagesState, StateGraph
from langgraph.types import Command, Send

from art_langgraph import ChatArt
from tests.langgraph.proofs.evidence import histories, levels, origins
from tests.langgraph.proofs.house import House, Talk


def asks(role: str | None = None) -> Any:
    async def agent(state: Any) -> Any:
        return {"messages": [await ChatArt(role=role).ainvoke(state["messages"])]}

    return agent


def graph_of(node: Any, name: str = "agent") -> Any:
    graph: Any = StateGraph(MessagesState)
    graph.add_node(name, node)
    graph.add_edge(START, name)
    return graph


def numbered(talk: Talk) -> str:
    return f"turn {talk.count('assistant')}"


async def test_three_levels_of_graphs_share_a_history() -> None:
    """The state is handed down and up, so that each call goes on from the one before."""
    inner = graph_of(asks()).compile()
    middle = graph_of(asks())
    middle.add_node("inner", inner)
    middle.add_edge("agent", "inner")
    outer = graph_of(asks())
    outer.add_node("middle", middle.compile())
    outer.add_edge("agent", "middle")
    with House(numbered) as house:
        trajectory = await house.play(outer)
    assert histories(trajectory) == [["turn 0", "turn 1", "turn 2"]]
    assert [levels(c) for c in trajectory.calls] == [
        ["agent"],
        ["middle", "agent"],
        ["middle", "inner", "agent"],
    ]
    assert origins(trajectory, "node", "graph_step") == [("agent", 1), ("agent", 1), ("agent", 1)]


@pytest.mark.parametrize("is_async", [True, False])
async def test_a_graph_called_inside_a_node_has_a_history_of_its_own(is_async: bool) -> None:
    inner = graph_of(asks(), "worker").compile()

    def sync_inner(state: Any) -> Any:
        return {"messages": [ChatArt().invoke(state["messages"])]}

    inner_sync = graph_of(sync_inner, "worker").compile()

    async def calls(state: Any) -> Any:
        made = await inner.ainvoke({"messages": [HumanMessage("sub")]})
        return {"messages": [HumanMessage(made["messages"][-1].content)]}

    def calls_sync(state: Any) -> Any:
        made = inner_sync.invoke({"messages": [HumanMessage("sub")]})
        return {"messages": [HumanMessage(made["messages"][-1].content)]}

    outer = graph_of(calls if is_async else calls_sync, "boss")
    outer.add_node("end", asks())
    outer.add_edge("boss", "end")
    with House(lambda talk: f"re {talk.last}") as house:
        trajectory = await house.play(outer)
    assert histories(trajectory) == [["re re sub"], ["re sub"]]
    assert [levels(c) for c in trajectory.calls] == [["boss", "worker"], ["end"]]


async def test_graphs_called_side_by_side_in_a_node_are_told_apart() -> None:
    inner = graph_of(asks(), "worker").compile()

    async def fans(state: Any) -> Any:
        asked = [inner.ainvoke({"messages": [HumanMessage(f"s{i}")]}) for i in range(4)]
        made = await asyncio.gather(*asked)
        return {"messages": [HumanMessage(" ".join(m["messages"][-1].content for m in made))]}

    with House(lambda talk: f"re {talk.last}") as house:
        trajectory = await house.play(graph_of(fans, "boss"))
    assert histories(trajectory) == [[f"re s{i}"] for i in range(4)]
    assert trajectory.state["messages"][-1].content == "re s0 re s1 re s2 re s3"
    assert {tuple(levels(c)) for c in trajectory.calls} == {("boss", "worker")}
    assert len({c.origin.namespace for c in trajectory.calls}) == 4


class Work(TypedDict):
    topics: list[str]
    found: Annotated[list[str], operator.add]


async def test_tasks_that_are_sent_out_are_known_by_their_paths() -> None:
    """Five equal prompts and two rounds: ten calls, ten histories, ten task identities."""

    async def work(state: Any) -> Any:
        first = await ChatArt().ainvoke("same")
        second = await ChatArt().ainvoke([HumanMessage("same"), first, HumanMessage("more")])
        return {"found": [second.content]}

    def out(state: Any) -> Any:
        return [Send("work", {"topic": topic}) for topic in state["topics"]]

    graph: Any = StateGraph(Work)
    graph.add_node("work", work)
    graph.add_conditional_edges(START, out, ["work"])
    with House(numbered) as house:
        topics: Any = {"topics": list("abcde"), "found": []}
        trajectory = await house.play(graph, topics)
    assert trajectory.state["found"] == ["turn 1"] * 5
    assert len(trajectory.calls) == 10
    by_task: dict[Any, list[str]] = {}
    for call in trajectory.calls:
        key = (call.origin.task_path, call.origin.namespace)
        by_task.setdefault(key, []).append(str(call.message["content"]))
    assert list(by_task.values()) == [["turn 0", "turn 1"]] * 5
    assert len({path for path, _ in by_task}) == 5


async def test_graphs_that_are_sent_out() -> None:
    """Map-reduce: each Send starts a whole subgraph; the reducer reads all of them."""
    inner = graph_of(asks(), "worker").compile()

    def out(state: Any) -> Any:
        return [Send("sub", {"messages": [HumanMessage(f"s{i}")]}) for i in range(3)]

    graph: Any = StateGraph(MessagesState)
    graph.add_node("sub", inner)
    graph.add_node("reduce", asks())
    graph.add_conditional_edges(START, out, ["sub"])
    graph.add_edge("sub", "reduce")
    with House(lambda talk: f"re {talk.last}") as house:
        trajectory = await house.play(graph)
    assert len(trajectory.calls) == 4
    assert [levels(c) for c in trajectory.calls] == [["sub", "worker"]] * 3 + [["reduce"]]
    assert len({c.origin.namespace for c in trajectory.calls}) == 4


async def test_commands_hand_over_inside_and_to_the_graph_above() -> None:
    async def first(state: Any) -> Any:
        said = await ChatArt().ainvoke(state["messages"])
        return Command(goto="second", update={"messages": [said]})

    async def up(state: Any) -> Any:
        said = await ChatArt().ainvoke(state["messages"])
        return Command(goto="last", update={"messages": [said]}, graph=Command.PARENT)

    inner = graph_of(up, "up").compile()
    graph: Any = StateGraph(MessagesState)
    graph.add_node("first", first, destinations=("second",))
    graph.add_node("second", inner, destinations=("last",))
    graph.add_node("last", asks())
    graph.add_edge(START, "first")
    graph.add_edge("last", END)
    with House(numbered) as house:
        trajectory = await house.play(graph)
    assert histories(trajectory) == [["turn 0", "turn 1", "turn 2"]]
    assert [levels(c) for c in trajectory.calls] == [["first"], ["second", "up"], ["last"]]
    assert origins(trajectory, "node") == [("first",), ("up",), ("last",)]
