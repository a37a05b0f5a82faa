"""256 rollouts at once on one compiled graph and one ChatArt: none lost, doubled or crossed."""

from __future__ import annotations

import asyncio
from collections import Counter
from typing import Any

import pytest
from langchain_core.messages import HumanMessage
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.graph import START, MessagesState, StateGraph

from art_core.executor import wide_executor
from art_langgraph import ChatArt
from tests.langgraph.proofs.evidence import said
from tests.langgraph.proofs.house import House, Talk

COUNT = 256
LLM = ChatArt(max_retries=0)


async def first(state: Any) -> Any:
    return {"messages": [await LLM.ainvoke(state["messages"])]}


def second(state: Any) -> Any:
    return {"messages": [HumanMessage("more"), LLM.invoke([*state["messages"], ("user", "more")])]}


async def third(state: Any) -> Any:
    parts = [p async for p in LLM.astream([*state["messages"], ("user", "last")])]
    return {"messages": [HumanMessage("last"), sum(parts[1:], parts[0])]}


def graph() -> Any:
    """Async, in a thread, streamed: three calls, each going on from the one before."""
    made: Any = StateGraph(MessagesState)
    made.add_sequence([first, second, third])
    made.add_edge(START, "first")
    return made.compile(checkpointer=InMemorySaver())


def says(talk: Talk) -> str:
    return f"{talk.user} {talk.count('assistant')}"


@pytest.mark.filterwarnings("error")
async def test_256_rollouts_of_one_graph() -> None:
    compiled = graph()
    with House(says) as house:
        with wide_executor(COUNT):
            played = await asyncio.gather(*(house.play(compiled, f"r{i}") for i in range(COUNT)))
        records = [house.records.of_rollout(str(t.rollout_id)) for t in played]
    for number, trajectory in enumerate(played):
        answers = [f"r{number} {turn}" for turn in range(3)]
        assert [said(c) for c in trajectory.calls] == answers
        assert [m.content for m in trajectory.state["messages"]][1::2] == answers
        assert [c.origin.node for c in trajectory.calls] == ["first", "second", "third"]
    assert Counter(request.status for request in house.requests) == {200: 3 * COUNT}
    assert len({c.key for t in played for c in t.calls}) == 3 * COUNT
    assert sum(map(len, records)) == 3 * COUNT
    assert not house.service.drifts
