"""Shapes of state and wrappings of graphs: pydantic, dataclasses, chains, retries, fallbacks."""

from __future__ import annotations

import dataclasses
import operator
from typing import Annotated, Any

import pytest
from langchain.agents import create_agent
from langchain_core.runnables import RunnableLambda
from langgraph.graph import START, MessagesState, StateGraph
from langgraph.types import Command, Send
from pydantic import BaseModel

from art_langgraph import ChatArt
from tests.langgraph.proofs.evidence import histories, origins
from tests.langgraph.proofs.house import House, Talk


class Checked(BaseModel):
    """A state that is validated."""

    messages: Annotated[list[Any], operator.add] = []


@dataclasses.dataclass
class Plain:
    """A state with attributes."""

    messages: Annotated[list[Any], operator.add] = dataclasses.field(default_factory=list)


def echo(talk: Talk) -> str:
    return f"re {talk.last}"


@pytest.mark.parametrize("state", [Checked, Plain])
async def test_states_that_are_no_mapping(state: Any) -> None:
    async def node(state: Any) -> Any:
        return {"messages": [await ChatArt().ainvoke(state.messages)]}

    graph: Any = StateGraph(state)
    graph.add_node("node", node)
    graph.add_edge(START, "node")
    with House(echo) as house:
        trajectory = await house.play(graph)
    assert histories(trajectory) == [["re go"]]
    assert trajectory.state["messages"][-1].content == "re go"


WRAPPED: dict[str, Any] = {
    "with_config": lambda agent: agent.with_config({"tags": ["mine"], "metadata": {"a": 1}}),
    "with_retry": lambda agent: agent.with_retry(stop_after_attempt=2),
    "with_fallbacks": lambda agent: agent.with_fallbacks([agent]),
    "bind": lambda agent: agent.bind(),
    "pipe": lambda agent: agent | RunnableLambda(lambda state: state),
    "inside a function": lambda agent: RunnableLambda(agent.ainvoke),
}


@pytest.mark.parametrize("kind", WRAPPED)
async def test_a_graph_inside_another_runnable(kind: str) -> None:
    graph = WRAPPED[kind](create_agent(ChatArt(), []))
    with House(echo) as house:
        trajectory = await house.play(graph)
    assert histories(trajectory) == [["re go"]]
    assert trajectory.state["messages"][-1].content == "re go"
    assert origins(trajectory, "node", "graph_step", "attempt") == [("model", 1, 1)]


async def test_a_command_that_sends_tasks_out() -> None:
    async def plan(state: Any) -> Any:
        said = await ChatArt().ainvoke("plan")
        return Command(goto=[Send("work", {"n": i}) for i in range(3)], update={"messages": [said]})

    async def work(state: Any) -> Any:
        return {"messages": [await ChatArt().ainvoke(f"w{state['n']}")]}

    graph: Any = StateGraph(MessagesState)
    graph.add_node("plan", plan, destinations=("work",))
    graph.add_node("work", work)
    graph.add_edge(START, "plan")
    with House(echo) as house:
        trajectory = await house.play(graph)
    assert histories(trajectory) == [["re plan"], ["re w0"], ["re w1"], ["re w2"]]
    assert len({c.origin.task_path for c in trajectory.calls}) == 4
    assert len(trajectory.state["messages"]) == 5
