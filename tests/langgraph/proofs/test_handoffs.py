"""Teams of agents: langgraph-swarm and langgraph-supervisor, each agent a history of its own."""

from __future__ import annotations

from typing import Any

import pytest
from langchain.agents import create_agent
from langgraph.checkpoint.memory import InMemorySaver

from art_langgraph import ChatArt, capture
from tests.langgraph.proofs.evidence import histories, levels, origins
from tests.langgraph.proofs.house import House, Talk, look, uses


def swarm() -> Any:
    """Alice looks things up and hands over to Bob; they share the messages, not the prompt."""
    package = pytest.importorskip("langgraph_swarm", reason="langgraph-swarm is not installed")
    to_bob = package.create_handoff_tool(agent_name="bob")
    to_alice = package.create_handoff_tool(agent_name="alice")
    alice = create_agent(ChatArt(), [look, to_bob], system_prompt="Alice", name="alice")
    bob = create_agent(ChatArt(role="bob"), [to_alice], system_prompt="Bob", name="bob")
    return package.create_swarm([alice, bob], default_active_agent="alice")


def swarm_says(talk: Talk) -> str:
    if talk.system.startswith("Bob"):
        return f"Bob heard {talk.count('user')}."
    return uses("look", q="x") if talk.role == "user" else uses("transfer_to_bob")


async def test_a_swarm_hands_over() -> None:
    with House(swarm_says) as house:
        trajectory = await house.play(swarm(), models={"bob": house.target("helper")})
    assert histories(trajectory) == sorted(
        [[uses("look", q="x"), uses("transfer_to_bob")], ["Bob heard 1."]]
    )
    assert [levels(c) for c in trajectory.calls] == [
        ["alice", "model"],
        ["alice", "model"],
        ["bob", "model"],
    ]
    assert [(c.model, c.origin.role) for c in trajectory.calls] == [
        ("agent", None),
        ("agent", None),
        ("helper", "bob"),
    ]
    assert trajectory.state["active_agent"] == "bob"


async def test_a_swarm_remembers_who_spoke_in_the_next_turn() -> None:
    """The user's second turn goes to Bob; his prompt goes on from his first answer, by ids."""
    graph = swarm().compile(checkpointer=InMemorySaver())
    thread: Any = {"configurable": {"thread_id": "t"}}
    with House(swarm_says) as house:
        async with capture(house.target()) as trajectory:
            for _ in range(2):
                ask: Any = {"messages": [("user", "go")]}
                await graph.ainvoke(ask, thread)
        house.prove(trajectory)
    assert histories(trajectory) == sorted(
        [
            [uses("look", q="x"), uses("transfer_to_bob")],
            ["Bob heard 1.", "Bob heard 2."],
        ]
    )


def supervisor_says(talk: Talk) -> str:
    """The supervisor asks both of its agents in turn; each of them looks first."""
    if talk.system.startswith("Boss"):
        done = sum("transferred" in text for role, text in talk.turns if role == "tool")
        order = [uses("transfer_to_math"), uses("transfer_to_maps"), "All done."]
        return order[min(done // 2, 2)]
    who = talk.system.split()[0]
    return uses("look", q=who) if talk.role != "tool" or "seen" not in talk.last else f"{who} done"


@pytest.mark.filterwarnings("ignore:create_react_agent has been moved")  # the package's own
@pytest.mark.parametrize("mode", ["last_message", "full_history"])
async def test_a_supervisor_and_its_agents(mode: Any) -> None:
    package = pytest.importorskip(
        "langgraph_supervisor", reason="langgraph-supervisor is not installed"
    )
    math = create_agent(ChatArt(), [look], system_prompt="Math", name="math")
    maps = create_agent(ChatArt(), [look], system_prompt="Maps", name="maps")
    team = package.create_supervisor(
        [math, maps], model=ChatArt(role="boss"), prompt="Boss", output_mode=mode
    )
    with House(supervisor_says) as house:
        trajectory = await house.play(team, models={"boss": house.target("helper")})
    assert origins(trajectory, "role") == [(role,) for role in ("boss", None, None) * 2] + [
        ("boss",)
    ]
    assert [levels(c)[0] for c in trajectory.calls] == [
        *("supervisor", "math", "math"),
        *("supervisor", "maps", "maps"),
        "supervisor",
    ]
    assert histories(trajectory) == sorted(
        [
            [uses("transfer_to_math"), uses("transfer_to_maps"), "All done."],
            [uses("look", q="Math"), "Math done"],
            [uses("look", q="Maps"), "Maps done"],
        ]
    )
    assert trajectory.state["messages"][-1].content == "All done."
