"""Runs that don't come to their end: what was sampled is kept, and `ended` says why."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import pytest
from langchain.agents import create_agent
from langgraph.graph import START, MessagesState, StateGraph

from art_core.errors import RolloutFailure
from art_core.trajectories import Trajectory, TrajectoryGroup
from art_langgraph import ChatArt, rollout
from tests.langgraph.proofs.evidence import histories, origins
from tests.langgraph.proofs.house import House, Talk, look, uses


def forever(talk: Talk) -> str:
    return uses("look", q=str(talk.count("tool")))


def first(count: int) -> list[str]:
    return [uses("look", q=str(i)) for i in range(count)]


async def test_the_recursion_limit_keeps_all_calls_and_the_last_state() -> None:
    """Limit 7: model and tools in turn make four model calls, the last one's tool is not run."""
    with House(forever) as house:
        trajectory = await house.play(
            create_agent(ChatArt(), [look]), config={"recursion_limit": 7}
        )
    assert (trajectory.ended, trajectory.reward) == ("recursion_limit", 0.0)
    assert histories(trajectory) == [first(4)]
    assert origins(trajectory, "graph_step") == [(1,), (3,), (5,), (7,)]
    assert trajectory.state["messages"][-1].tool_calls[0]["args"] == {"q": "3"}


@pytest.mark.parametrize("count", [1, 3])
async def test_an_exception_after_some_calls(count: int) -> None:
    def breaks(q: str) -> str:
        """Look something up."""
        if int(q) == count - 1:
            raise LookupError(q)
        return f"seen {q}"

    breaks.__name__ = "look"
    with House(forever) as house:
        trajectory = await house.play(create_agent(ChatArt(), [breaks]))
    assert (trajectory.ended, trajectory.reward) == ("error", 0.0)
    assert histories(trajectory) == [first(count)]
    assert isinstance(trajectory.exception, LookupError)
    assert trajectory.metadata["graph"]["tools"][-1]["error"] == f"LookupError: {count - 1}"


async def test_a_branch_that_fails_while_another_one_is_being_answered() -> None:
    """The call beside it is cut by LangGraph; its record says so on both sides."""
    asked = asyncio.Event()

    async def slow(state: Any) -> Any:
        asyncio.get_running_loop().call_later(0.2, asked.set)
        return {"messages": [await ChatArt().ainvoke("slow")]}

    async def fails(state: Any) -> Any:
        await ChatArt().ainvoke("quick")
        await asked.wait()
        raise ValueError("no")

    graph: Any = StateGraph(MessagesState)
    for node in (slow, fails):
        graph.add_node(node)
        graph.add_edge(START, node.__name__)
    with House(lambda talk: "x" * 800 if talk.user == "slow" else "ok", delay=0.01) as house:
        trajectory = await rollout(graph, {"messages": []}, model=house.target())
        await house.idle()
        records = house.records.of_rollout(str(trajectory.rollout_id))
    assert (trajectory.ended, trajectory.reward) == ("error", 0.0)
    whole = {call.origin.node: call.error is None for call in trajectory.calls}
    assert whole == {"slow": False, "fails": True}
    assert sorted(record.complete for record in records) == [False, True]
    assert histories(trajectory) == [["ok"]]


async def test_a_cancel_in_the_middle_of_an_answer_stops_the_engine() -> None:
    """Two calls answered, the third cut: the cancel travels on, the server keeps all three."""

    third = threading.Event()

    def says(talk: Talk) -> str:
        if talk.count("tool") < 2:
            return forever(talk)
        third.set()
        return "x" * 4000

    agent = create_agent(ChatArt(), [look])
    with House(says, delay=0.005) as house:
        playing = asyncio.create_task(house.play(agent, rollout_id="cut"))
        assert await asyncio.to_thread(third.wait, 20)
        playing.cancel()
        with pytest.raises(asyncio.CancelledError):
            await playing
        await house.idle()
        records = house.records.of_rollout("cut")
    assert [record.complete for record in records] == [True, True, False]
    assert house.engine.cancelled == 1


async def test_a_cancel_from_inside_is_a_failure_with_the_calls() -> None:
    async def node(state: Any) -> Any:
        await ChatArt().ainvoke("one")
        raise asyncio.CancelledError

    graph: Any = StateGraph(MessagesState)
    graph.add_node(node)
    graph.add_edge(START, "node")
    with House(lambda _: "ok") as house:
        with pytest.raises(RolloutFailure) as failure:
            await rollout(graph, {"messages": []}, model=house.target())
        house.prove(failure.value.trajectory)
    assert failure.value.trajectory.ended == "cancelled"
    assert histories(failure.value.trajectory) == [["ok"]]


async def test_out_of_time_in_the_middle_of_an_answer() -> None:
    def says(talk: Talk) -> str:
        return forever(talk) if talk.count("tool") < 1 else "x" * 40_000

    with House(says, delay=0.005) as house:
        trajectory = await house.play(create_agent(ChatArt(), [look]), timeout=2.0)
        await house.idle()
    assert (trajectory.ended, trajectory.reward) == ("timeout", 0.0)
    assert histories(trajectory) == [first(1)]
    assert [c.error is None for c in trajectory.calls] == [True, False]
    assert trajectory.state["messages"][-1].content == "seen 0"


async def test_a_context_that_grows_too_long_ends_the_run() -> None:
    def reads(q: str) -> str:
        """Look something up."""
        return "x" * 2000 * int(q)

    reads.__name__ = "look"
    with House(forever, context_length=2000) as house:
        trajectory = await house.play(create_agent(ChatArt(), [reads]))
    assert (trajectory.ended, trajectory.reward) == ("context_overflow", 0.0)
    assert [c.error is None for c in trajectory.calls] == [True, True, False]
    assert histories(trajectory) == [first(2)]


async def test_answers_that_were_cut_by_their_limit_are_samples() -> None:
    agent = create_agent(ChatArt(max_tokens=8), [])
    with House(lambda _: "much too long") as house:
        trajectory = await house.play(agent)
    assert [c.finish_reason for c in trajectory.calls] == ["length"]
    assert histories(trajectory) == [["much too"]]
    assert trajectory.completion_tokens == 8


async def test_failures_in_a_group_lose_no_call() -> None:
    """Of four rollouts one meets a broken endpoint: three trajectories, one failure, 7 calls."""

    async def node(state: Any) -> Any:
        said = await ChatArt(max_retries=0).ainvoke("a")
        if state["messages"][0].content == "r2":
            house.faults.append(500)
        return {"messages": [said, await ChatArt(max_retries=0).ainvoke("b")]}

    graph: Any = StateGraph(MessagesState)
    graph.add_node(node)
    graph.add_edge(START, "node")
    group = TrajectoryGroup([])
    with House(lambda talk: f"re {talk.last}") as house:
        for number in range(4):
            ask: Any = {"messages": [("user", f"r{number}")]}
            try:
                group.add(await rollout(graph, ask, model=house.target()))
            except RolloutFailure as failure:
                group.add(failure)
        for trajectory in (*group.trajectories, *failed(group)):
            house.prove(trajectory)
    assert [len(t.calls) for t in group] == [2, 2, 2]
    assert [c.error is None for c in group.failed_calls()] == [True, False]


def failed(group: TrajectoryGroup) -> list[Trajectory]:
    return [e.trajectory for e in group.exceptions if isinstance(e, RolloutFailure)]
