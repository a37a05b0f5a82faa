"""Rollouts inside rollouts, free code around graphs, and several trajectories at once."""

from __future__ import annotations

import asyncio
from typing import Any

from langchain.agents import create_agent
from langgraph.graph import START, MessagesState, StateGraph

from art_core.trajectories import Trajectory
from art_langgraph import ChatArt, capture, rollout, wrap_rollout
from tests.langgraph.proofs.evidence import histories, origins
from tests.langgraph.proofs.house import House, Talk, look, uses


def one_node(node: Any) -> Any:
    graph: Any = StateGraph(MessagesState)
    graph.add_node("node", node)
    graph.add_edge(START, "node")
    return graph


def echo(talk: Talk) -> str:
    return f"re {talk.last}"


async def test_a_rollout_played_inside_a_node_is_in_both_trajectories_once() -> None:
    """The inner one has its own model; the outer one has all calls, each with its place."""
    inner_found: list[Any] = []

    async def judge(state: Any) -> Any:
        return {"messages": [await ChatArt().ainvoke("judge")]}

    with House(echo) as house:

        async def node(state: Any) -> Any:
            mine = await ChatArt().ainvoke("before")
            ask: Any = {"messages": []}
            target = house.target("helper")
            inner_found.append(await rollout(one_node(judge), ask, model=target))
            return {"messages": [mine, await ChatArt().ainvoke("after")]}

        trajectory = await house.play(one_node(node))
        (inner,) = inner_found
        house.prove(inner)
    assert [(c.model, c.message["content"]) for c in trajectory.calls] == [
        ("agent", "re before"),
        ("helper", "re judge"),
        ("agent", "re after"),
    ]
    assert [c.key for c in inner.calls] == [trajectory.calls[1].key]
    assert inner.rollout_id == f"{trajectory.rollout_id}.0"


async def test_free_code_around_graphs_and_bare_models() -> None:
    agent: Any = create_agent(ChatArt(), [look])

    def says(talk: Talk) -> str:
        if talk.user == "plan":
            return "a b"
        return uses("look", q=talk.user) if talk.role == "user" else f"found {talk.user}"

    async def task(name: str) -> Any:
        return await agent.ainvoke({"messages": [("user", name)]})

    with House(says) as house:
        async with capture(house.target()) as trajectory:
            plan = await ChatArt().ainvoke("plan")
            await asyncio.gather(*(task(name) for name in str(plan.content).split()))
        house.prove(trajectory)
    assert histories(trajectory) == sorted(
        [["a b"], [uses("look", q="a"), "found a"], [uses("look", q="b"), "found b"]]
    )
    assert origins(trajectory, "node")[0] == (None,)


async def test_two_captures_side_by_side_do_not_see_each_other() -> None:
    llm = ChatArt()

    async def one(house: House, name: str) -> Any:
        async with capture(house.target()) as trajectory:
            for number in range(3):
                await llm.ainvoke(f"{name}{number}")
                await asyncio.sleep(0)
        return trajectory

    with House(echo) as house:
        played = await asyncio.gather(*(one(house, name) for name in "abc"))
        for trajectory in played:
            house.prove(trajectory)
    for name, trajectory in zip("abc", played, strict=True):
        assert histories(trajectory) == [[f"re {name}{i}"] for i in range(3)]


async def test_a_wrapped_function_that_plays_a_graph() -> None:
    agent: Any = create_agent(ChatArt(), [look])

    async def play(name: str) -> Trajectory:
        state = await agent.ainvoke({"messages": [("user", name)]})
        return Trajectory(reward=float(len(state["messages"])))

    def says(talk: Talk) -> str:
        return uses("look", q="x") if talk.role == "user" else "done"

    with House(says) as house:
        trajectory = await wrap_rollout(house.target(), play)("go")
        house.prove(trajectory)
    assert trajectory.reward == 4.0
    assert histories(trajectory) == [[uses("look", q="x"), "done"]]
