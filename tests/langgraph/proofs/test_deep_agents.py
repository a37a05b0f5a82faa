"""deepagents: a planner whose sub-agents work in graphs of their own, side by side."""

from __future__ import annotations

from typing import Any

import pytest

from art_langgraph import ChatArt
from tests.langgraph.proofs.evidence import histories, levels
from tests.langgraph.proofs.house import House, Talk, look, uses

deepagents = pytest.importorskip("deepagents", reason="deepagents is not installed")


def task(number: int) -> str:
    return uses("task", description=f"Find {number}", subagent_type="finder")


def says(talk: Talk) -> str:
    if talk.system.startswith("You find"):
        return uses("look", q=talk.user[-1]) if talk.role == "user" else f"found {talk.last[-1]}"
    steps = [
        uses("write_todos", todos=[{"content": "find", "status": "in_progress"}]),
        f"{task(1)}\n{task(2)}",
        uses("write_file", file_path="/notes.md", content="1, 2"),
    ]
    done = talk.count("assistant")
    return steps[done] if done < len(steps) else "All found."


async def test_sub_agents_in_parallel_are_histories_beside_the_planners() -> None:
    finder: dict[str, Any] = {
        "name": "finder",
        "description": "Finds things.",
        "system_prompt": "You find things.",
        "tools": [look],
        "model": ChatArt(role="finder"),
    }
    agent = deepagents.create_deep_agent(model=ChatArt(), subagents=[finder])
    with House(says) as house:
        trajectory = await house.play(agent, models={"finder": house.target("helper")})
    plan = [says_at(i) for i in range(4)]
    found = [[uses("look", q=str(i)), f"found {i}"] for i in (1, 2)]
    assert histories(trajectory) == sorted([plan, *found])
    assert len(trajectory.calls) == 8
    inside = [c for c in trajectory.calls if c.origin.role == "finder"]
    assert {tuple(levels(c)) for c in inside} == {("tools", "model")}
    assert {c.model for c in inside} == {"helper"}
    assert len({str(c.origin.namespace).split("|")[0] for c in inside}) == 2
    assert list(trajectory.state["files"]) == ["/notes.md"]


def says_at(turn: int) -> str:
    """The planner's answer at a turn."""
    before = (("system", ""), ("user", "go"), *(("assistant", ""),) * turn)
    return says(Talk(before, "agent"))
