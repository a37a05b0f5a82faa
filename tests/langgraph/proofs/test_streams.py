"""Graphs and models that are streamed, by every door LangChain has: the ids are on the wire."""

from __future__ import annotations

from typing import Any

import pytest
from langchain.agents import create_agent
from langchain_core.messages import AIMessage
from langgraph.graph import START, MessagesState, StateGraph

from art_langgraph import ChatArt, capture
from tests.langgraph.proofs.evidence import histories, origins
from tests.langgraph.proofs.house import House, Talk, look, uses

pytestmark = pytest.mark.filterwarnings(  # LangChain's third event stream is a beta
    "ignore::langchain_core._api.beta_decorator.LangChainBetaWarning"
)
ASK: Any = {"messages": [("user", "go")]}
LOOK = uses("look", q="x")


def says(talk: Talk) -> str:
    return LOOK if talk.role == "user" else "done"


async def modes(agent: Any) -> None:
    wanted = ["values", "updates", "messages", "custom", "debug", "tasks", "checkpoints"]
    async for _ in agent.astream(ASK, stream_mode=wanted, subgraphs=True):
        pass


async def events(agent: Any) -> None:
    async for _ in agent.astream_events(ASK, version="v2"):
        pass


async def third_events(agent: Any) -> None:
    async for _ in await agent.astream_events(ASK, version="v3"):
        pass


async def sync_messages(agent: Any) -> None:
    list(agent.stream(ASK, stream_mode="messages"))


@pytest.mark.parametrize("door", [modes, events, third_events, sync_messages])
async def test_a_streamed_agent_makes_the_same_calls(door: Any) -> None:
    agent = create_agent(ChatArt(), [look])
    with House(says) as house:
        async with capture(house.target()) as trajectory:
            await door(agent)
        house.prove(trajectory)
    assert histories(trajectory) == [[LOOK, "done"]]
    assert origins(trajectory, "node", "graph_step", "attempt") == [
        ("model", 1, 1),
        ("model", 3, 1),
    ]


async def plain(messages: Any) -> Any:
    parts = [part async for part in ChatArt().astream(messages)]
    return sum(parts[1:], parts[0])


async def its_events(messages: Any) -> Any:
    text = ""
    async for event in ChatArt().astream_events(messages, version="v2"):
        if event["event"] == "on_chat_model_stream":
            text += str(event["data"]["chunk"].content)
    return AIMessage(text)


async def its_third_events(messages: Any) -> Any:
    stream = await ChatArt().astream_events(messages, version="v3")
    return await stream.output


async def its_sync_third_events(messages: Any) -> Any:
    return ChatArt().stream_events(messages, version="v3").output


@pytest.mark.parametrize("door", [plain, its_events, its_third_events, its_sync_third_events])
async def test_a_model_streamed_in_a_node_is_one_call(door: Any) -> None:
    async def node(state: Any) -> Any:
        return {"messages": [await door(state["messages"])]}

    graph: Any = StateGraph(MessagesState)
    graph.add_node("node", node)
    graph.add_edge(START, "node")
    with House(lambda talk: f"re {talk.last}") as house:
        trajectory = await house.play(graph)
    assert histories(trajectory) == [["re go"]]
    assert str(trajectory.state["messages"][-1].text) == "re go"
    assert origins(trajectory, "node", "graph_step", "attempt") == [("node", 1, 1)]
