"""Event loops: one per step, two at once in threads, and none at all."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

from langchain.agents import create_agent
from langgraph.graph import START, MessagesState, StateGraph

from art_core.trajectories import Trajectory
from art_langgraph import ChatArt
from tests.langgraph.proofs.evidence import histories
from tests.langgraph.proofs.house import House, Talk, uses


def look(q: str) -> str:
    """Look something up."""
    return q


def says(talk: Talk) -> str:
    return uses("look", q="x") if talk.role == "user" else f"done {talk.user}"


def whole(name: str) -> list[list[str]]:
    return [[uses("look", q="x"), f"done {name}"]]


def test_a_loop_for_every_step() -> None:
    agent = create_agent(ChatArt(), [look])
    with House(says) as house:
        played = [asyncio.run(house.play(agent, f"s{i}")) for i in range(3)]
    assert [histories(t) for t in played] == [whole(f"s{i}") for i in range(3)]


def test_loops_in_two_threads_at_once() -> None:
    """One agent and one ChatArt; the threads take turns only where the server makes them."""
    agent = create_agent(ChatArt(), [look])
    meet = threading.Barrier(2, timeout=20)
    played: dict[str, Trajectory] = {}

    async def several(house: House, name: str) -> None:
        names = [f"{name}{i}" for i in range(6)]
        found = await asyncio.gather(*(house.play(agent, one) for one in names))
        played.update(zip(names, found, strict=True))

    def thread(house: House, name: str) -> None:
        meet.wait()
        asyncio.run(several(house, name))

    with House(says) as house:
        threads = [threading.Thread(target=thread, args=(house, name)) for name in "ab"]
        for each in threads:
            each.start()
        for each in threads:
            each.join()
    assert len(played) == 12
    assert all(histories(t) == whole(name) for name, t in played.items())
    assert len(house.requests) == 24


def test_a_loop_inside_a_sync_node() -> None:
    """A sync node that runs a loop of its own, as code that bridges the two worlds does."""
    agent: Any = create_agent(ChatArt(), [look])

    def node(state: Any) -> Any:
        made = asyncio.run(agent.ainvoke({"messages": [("user", "inner")]}))
        return {"messages": [made["messages"][-1]]}

    graph: Any = StateGraph(MessagesState)
    graph.add_node("node", node)
    graph.add_edge(START, "node")
    with House(says) as house:
        trajectory = asyncio.run(house.play(graph))
    assert histories(trajectory) == whole("inner")
    assert [c.origin.node for c in trajectory.calls] == ["model", "model"]
