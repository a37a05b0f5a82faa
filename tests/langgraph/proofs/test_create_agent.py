"""`create_agent`: tools, several calls in one turn, and answers in a structure, all recorded."""

from __future__ import annotations

import json
from typing import Any

from langchain.agents import create_agent
from langchain.agents.structured_output import ProviderStrategy, ToolStrategy
from langchain_core.tools import tool
from pydantic import BaseModel

from art_langgraph import ChatArt
from tests.langgraph.proofs.evidence import histories, origins, said
from tests.langgraph.proofs.house import House, Talk, uses


def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


class City(BaseModel):
    """A place."""

    name: str
    people: int


class Country(BaseModel):
    """A place of places."""

    name: str


async def test_several_tool_calls_in_a_turn_are_one_sample() -> None:
    both = f"{uses('add', a=1, b=2)}\n{uses('add', a=3, b=4)}"

    def says(talk: Talk) -> str:
        return both if talk.role == "user" else f"I have {talk.count('tool')} sums."

    with House(says) as house:
        trajectory = await house.play(create_agent(ChatArt(), [add]))
    assert histories(trajectory) == [[both, "I have 2 sums."]]
    assert origins(trajectory, "node", "graph_step", "attempt", "role") == [
        ("model", 1, 1, None),
        ("model", 3, 1, None),
    ]
    results = [m.content for m in trajectory.state["messages"] if m.type == "tool"]
    assert results == ["3", "7"]
    assert trajectory.completion_tokens == len(both) + 1 + len("I have 2 sums.") + 1


async def test_an_answer_by_tool_is_asked_for_again_until_it_is_right() -> None:
    wrong, right = uses("City", name="Oslo", people="many"), uses("City", name="Oslo", people=7)

    def says(talk: Talk) -> str:
        return wrong if talk.role == "user" else right

    agent = create_agent(ChatArt(), [add], response_format=ToolStrategy(City))
    with House(says) as house:
        trajectory = await house.play(agent)
    assert trajectory.state["structured_response"] == City(name="Oslo", people=7)
    assert histories(trajectory) == [[wrong, right]]
    assert {c.sampling.grammar for c in trajectory.calls} == {"tool_call"}
    assert all(c.sampling.distorted for c in trajectory.calls)


async def test_an_answer_by_one_of_several_tools() -> None:
    def says(talk: Talk) -> str:
        return uses("add", a=1, b=1) if talk.role == "user" else uses("Country", name="Norway")

    agent = create_agent(ChatArt(), [add], response_format=ToolStrategy(City | Country))
    with House(says) as house:
        trajectory = await house.play(agent)
    assert trajectory.state["structured_response"] == Country(name="Norway")
    assert len(histories(trajectory)) == 1
    assert len(trajectory.calls) == 2


async def test_an_answer_by_schema_after_a_tool() -> None:
    answer = '{ "name":"Oslo",\n"people": 7}'

    def says(talk: Talk) -> str:
        return uses("add", a=3, b=4) if talk.role == "user" else answer

    agent = create_agent(ChatArt(), [add], response_format=ProviderStrategy(City))
    with House(says) as house:
        trajectory = await house.play(agent)
    assert trajectory.state["structured_response"] == City(name="Oslo", people=7)
    assert histories(trajectory) == [[uses("add", a=3, b=4), answer]]
    assert all(c.sampling.grammar is not None for c in trajectory.calls)
    asked = trajectory.calls[0].request["response_format"]
    assert asked["json_schema"]["name"] == "City"


async def test_an_answer_that_breaks_the_schema_is_the_policys_fault() -> None:
    agent = create_agent(ChatArt(), [], response_format=ProviderStrategy(City))
    with House(lambda _: '{"name": "Oslo"}') as house:
        trajectory = await house.play(agent)
    assert (trajectory.ended, trajectory.reward) == ("error", 0.0)
    assert [said(c) for c in trajectory.calls] == ['{"name": "Oslo"}']


async def test_a_tool_that_asks_a_model_is_a_history_of_its_own() -> None:
    @tool
    async def translate(text: str) -> str:
        """Translate into Norwegian."""
        return str((await ChatArt().ainvoke(f"Translate: {text}")).content)

    def says(talk: Talk) -> str:
        if talk.user.startswith("Translate"):
            return "hei"
        return uses("translate", text="hi") if talk.role == "user" else f"It is {talk.last}."

    with House(says) as house:
        trajectory = await house.play(create_agent(ChatArt(), [translate]))
    assert histories(trajectory) == [[uses("translate", text="hi"), "It is hei."], ["hei"]]
    assert origins(trajectory, "node", "graph_step") == [("model", 1), ("tools", 2), ("model", 3)]


async def test_a_tool_that_asks_a_model_in_parallel_and_in_a_thread() -> None:
    """Sync tools run in LangGraph's pool; each of the calls knows the task it was made in."""

    def shout(text: str) -> str:
        """Say it louder."""
        return str(ChatArt().invoke(f"Shout: {text}").content)

    asks = "\n".join(uses("shout", text=f"t{i}") for i in range(4))

    def says(talk: Talk) -> str:
        if talk.user.startswith("Shout"):
            return talk.user.upper()
        return asks if talk.role == "user" else "done"

    with House(says) as house:
        trajectory = await house.play(create_agent(ChatArt(), [shout]))
    loud = [[f"SHOUT: T{i}"] for i in range(4)]
    assert histories(trajectory) == sorted([*loud, [asks, "done"]])
    inside = [c.origin for c in trajectory.calls if c.origin.node == "tools"]
    assert len({o.task_path for o in inside}) == 4
    assert len({o.namespace for o in inside}) == 4
    results = [m.content for m in trajectory.state["messages"] if m.type == "tool"]
    assert results == [f"SHOUT: T{i}" for i in range(4)]


async def test_one_agent_object_streams_and_does_not() -> None:
    """The ids are the same, however the client reads them."""

    def says(talk: Talk) -> str:
        return uses("add", a=1, b=2) if talk.role == "user" else json.dumps({"sum": talk.last})

    played: list[Any] = []
    with House(says) as house:
        for streaming in (False, True):
            agent = create_agent(ChatArt(streaming=streaming), [add])
            played.append(await house.play(agent))
    one, other = (histories(t) for t in played)
    assert one == other
