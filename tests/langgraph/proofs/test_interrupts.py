"""`interrupt()` and resume: what is asked before, beside and after a pause."""

from __future__ import annotations

from typing import Any

import pytest
from langchain_core.messages import HumanMessage
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.func import entrypoint
from langgraph.graph import START, MessagesState, StateGraph
from langgraph.types import Command, interrupt

from art_langgraph import ChatArt, capture
from tests.langgraph.proofs.evidence import histories, origins
from tests.langgraph.proofs.house import House

THREAD: Any = {"configurable": {"thread_id": "t"}}
ASK: Any = {"messages": [("user", "go")]}


def graph_of(**nodes: Any) -> Any:
    """Nodes that all run in the first step."""
    graph: Any = StateGraph(MessagesState)
    for name, node in nodes.items():
        graph.add_node(name, node)
        graph.add_edge(START, name)
    return graph.compile(checkpointer=InMemorySaver())


def echo(talk: Any) -> str:
    return f"re {talk.last}"


async def asks_then_waits(state: Any) -> Any:
    before = await ChatArt().ainvoke("before")
    answer = interrupt(before.content)
    return {"messages": [before, await ChatArt().ainvoke(f"after {answer}")]}


async def test_a_node_that_pauses_is_run_again_from_its_beginning() -> None:
    """LangGraph's rule: the call before the pause is made twice, so it is sampled twice."""
    graph = graph_of(node=asks_then_waits)
    with House(echo) as house:
        async with capture(house.target()) as trajectory:
            await graph.ainvoke(ASK, THREAD)
            await graph.ainvoke(Command(resume="yes"), THREAD)
        house.prove(trajectory)
    assert [c.message["content"] for c in trajectory.calls] == [
        "re before",
        "re before",
        "re after yes",
    ]
    assert origins(trajectory, "node", "attempt", "graph_step") == [("node", 1, 1)] * 3
    assert len({c.origin.run_id for c in trajectory.calls}) == 3


async def test_what_ran_beside_a_pause_is_not_asked_again() -> None:
    async def beside(state: Any) -> Any:
        return {"messages": [await ChatArt().ainvoke("beside")]}

    graph = graph_of(waits=asks_then_waits, beside=beside)
    with House(echo) as house:
        async with capture(house.target()) as trajectory:
            await graph.ainvoke(ASK, THREAD)
            await graph.ainvoke(Command(resume="yes"), THREAD)
        house.prove(trajectory)
    assert histories(trajectory) == sorted(
        [["re before"], ["re before"], ["re beside"], ["re after yes"]]
    )
    assert sorted(o[0] for o in origins(trajectory, "node")) == ["beside", *["waits"] * 3]


async def test_several_questions_are_answered_at_once() -> None:
    graph = graph_of(one=asks_then_waits, two=asks_then_waits)
    with House(echo) as house:
        first = await house.play(graph)
        assert first.ended == "interrupted"
        told = first.metadata["graph"]
        thread = {"configurable": {"thread_id": told["thread_id"]}}
        answers: Any = Command(resume={i["id"]: "ok" for i in told["interrupts"]})
        second = await house.play(graph, answers, config=thread)
    assert len(told["interrupts"]) == 2
    assert second.ended == "completed"
    assert (len(first.calls), len(second.calls)) == (2, 4)
    assert second.state["messages"][-1].content == "re after ok"


async def test_a_pause_inside_a_subgraph_and_a_static_one() -> None:
    """The pause of a subgraph reaches the rollout; `interrupt_before` stops without a question."""
    inner: Any = StateGraph(MessagesState)
    inner.add_node("waits", asks_then_waits)
    inner.add_edge(START, "waits")
    graph = graph_of(sub=inner.compile())
    stops = graph_of(node=asks_then_waits)
    with House(echo) as house:
        paused = await house.play(graph)
        async with capture(house.target()) as trajectory:
            await stops.ainvoke(ASK, THREAD, interrupt_before=["node"])
            await stops.aupdate_state(THREAD, {"messages": [HumanMessage("more")]})
            await stops.ainvoke(None, THREAD)
        house.prove(trajectory)
    assert paused.ended == "interrupted"
    assert [i["value"] for i in paused.metadata["graph"]["interrupts"]] == ["'re before'"]
    assert histories(trajectory) == [["re before"]]


async def test_a_pause_beside_a_node_that_ends_later_is_still_told() -> None:
    """Its state comes after the question, and without it."""

    async def waits(state: Any) -> Any:
        return {"messages": [HumanMessage(interrupt("well?"))]}

    async def beside(state: Any) -> Any:
        return {"messages": [await ChatArt().ainvoke("beside")]}

    with House(echo) as house:
        trajectory = await house.play(graph_of(waits=waits, beside=beside))
    assert trajectory.ended == "interrupted"
    assert [i["value"] for i in trajectory.metadata["graph"]["interrupts"]] == ["'well?'"]
    assert trajectory.state["messages"][-1].content == "re beside"


@pytest.mark.parametrize("when", ["before", "after"])
async def test_a_stop_that_was_compiled_in_is_no_end_and_can_be_gone_on_from(when: Any) -> None:
    async def first(state: Any) -> Any:
        return {"messages": [await ChatArt().ainvoke("first")]}

    async def second(state: Any) -> Any:
        return {"messages": [await ChatArt().ainvoke("second")]}

    graph: Any = StateGraph(MessagesState)
    graph.add_sequence([first, second])
    graph.add_edge(START, "first")
    where = {"interrupt_before": ["second"]} if when == "before" else {"interrupt_after": ["first"]}
    stops = graph.compile(checkpointer=InMemorySaver(), **where)
    with House(echo) as house:
        trajectory = await house.play(stops)
        assert (trajectory.ended, len(trajectory.calls)) == ("interrupted", 1)
        assert "stop before second" in trajectory.logs[-1]
        whole = await house.play(stops, None, continue_=trajectory)
    assert whole.ended == "completed"
    assert histories(whole) == [["re first"], ["re second"]]


async def test_a_pause_of_a_graph_inside_another_runnable_is_told() -> None:
    graph = graph_of(node=asks_then_waits)
    with House(echo) as house:
        played = [await house.play(runnable) for runnable in (graph.bind(), graph.with_retry())]
    assert [t.ended for t in played] == ["interrupted"] * 2
    assert [t.metadata["graph"]["interrupts"][0]["value"] for t in played] == ["'re before'"] * 2


async def test_an_entrypoint_that_has_returned_nothing_yet_is_gone_on_with() -> None:
    """Its thread is known, though there is no value in it."""

    @entrypoint(checkpointer=InMemorySaver())
    async def talk(question: str) -> str:
        said = await ChatArt().ainvoke(question)
        return f"{said.content} {interrupt('well?')}"

    with House(echo) as house:
        trajectory = await house.play(talk, ["q"])
        assert trajectory.ended == "interrupted"
        whole = await house.play(talk, Command(resume="yes"), continue_=trajectory)
    assert (whole.ended, whole.state) == ("completed", "re q yes")
    assert histories(whole) == [["re q"], ["re q"]]
