"""Checkpointers, stores and node caches: what is remembered is not sampled again."""

from __future__ import annotations

from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from langchain.agents import create_agent
from langchain_core.messages import AIMessage, HumanMessage
from langgraph.cache.memory import InMemoryCache
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.graph import START, MessagesState, StateGraph
from langgraph.runtime import Runtime
from langgraph.store.memory import InMemoryStore
from langgraph.types import CachePolicy

from art_langgraph import ChatArt, capture
from tests.langgraph.proofs.evidence import histories, origins
from tests.langgraph.proofs.house import House, Talk


@asynccontextmanager
async def saver(kind: str, folder: Path) -> Any:
    """A checkpointer of a kind."""
    if kind == "memory":
        yield InMemorySaver()
        return
    package = pytest.importorskip(
        "langgraph.checkpoint.sqlite.aio", reason="langgraph-checkpoint-sqlite is not installed"
    )
    async with package.AsyncSqliteSaver.from_conn_string(str(folder / "c.sqlite")) as made:
        yield made


def turn(talk: Talk) -> str:
    return f"turn {talk.count('assistant')}"


@pytest.mark.parametrize("kind", ["memory", "sqlite"])
async def test_turns_on_one_thread_are_one_history(kind: str, tmp_path: Path) -> None:
    """Messages go through the checkpointer's serialisation and back; the ids still join."""
    ask: Any = {"messages": [("user", "go")]}
    async with saver(kind, tmp_path) as memory:
        agent = create_agent(ChatArt(), [], checkpointer=memory)
        with House(turn) as house:
            async with capture(house.target()) as trajectory:
                for _ in range(3):
                    await agent.ainvoke(ask, {"configurable": {"thread_id": "t"}})
            house.prove(trajectory)
    assert histories(trajectory) == [["turn 0", "turn 1", "turn 2"]]


@pytest.mark.parametrize("kind", ["memory", "sqlite"])
async def test_rollouts_of_one_checkpointer_begin_anew(kind: str, tmp_path: Path) -> None:
    async with saver(kind, tmp_path) as memory:
        agent = create_agent(ChatArt(), [], checkpointer=memory)
        with House(turn) as house:
            played = [await house.play(agent) for _ in range(2)]
    assert [histories(t) for t in played] == [[["turn 0"]]] * 2
    assert len({t.metadata["graph"]["thread_id"] for t in played}) == 2


async def test_going_back_in_time_asks_again() -> None:
    """A run forked from an old checkpoint is a branch: same prompt, another sample."""
    agent = create_agent(ChatArt(), [], checkpointer=InMemorySaver())
    thread: Any = {"configurable": {"thread_id": "t"}}
    words = iter(["one", "other"])
    ask: Any = {"messages": [("user", "go")]}
    with House(lambda _: next(words)) as house:
        async with capture(house.target()) as trajectory:
            await agent.ainvoke(ask, thread)
            past = [s async for s in agent.aget_state_history(thread) if s.next == ("model",)]
            state = await agent.ainvoke(None, past[0].config)
        house.prove(trajectory)
    assert state["messages"][-1].content == "other"
    assert histories(trajectory) == [["one"], ["other"]]


async def test_a_store_is_read_and_written_by_nodes() -> None:
    async def node(state: Any, runtime: Runtime) -> Any:
        assert runtime.store is not None
        known = await runtime.store.aget(("notes",), "last")
        said = await ChatArt().ainvoke([HumanMessage(f"known: {known and known.value['text']}")])
        await runtime.store.aput(("notes",), "last", {"text": said.content})
        return {"messages": [said]}

    graph: Any = StateGraph(MessagesState)
    graph.add_node("node", node)
    graph.add_edge(START, "node")
    compiled = graph.compile(store=InMemoryStore())
    with House(lambda talk: f"re {talk.last}") as house:
        played = [await house.play(compiled) for _ in range(2)]
    assert [histories(t) for t in played] == [[["re known: None"]], [["re known: re known: None"]]]


async def test_a_cached_node_is_no_sample() -> None:
    """Node caches are the graph's: the second rollout is told that nothing was asked."""

    async def node(state: Any) -> Any:
        return {"messages": [await ChatArt().ainvoke("q")]}

    async def last(state: Any) -> Any:
        return {"messages": [await ChatArt().ainvoke("r")]}

    graph: Any = StateGraph(MessagesState)
    graph.add_node("node", node, cache_policy=CachePolicy(key_func=lambda _: "same"))
    graph.add_node("last", last)
    graph.add_edge(START, "node")
    graph.add_edge("node", "last")
    compiled = graph.compile(cache=InMemoryCache())
    with House(lambda talk: f"re {talk.last}") as house:
        first, second = [await house.play(compiled) for _ in range(2)]
    assert histories(first) == [["re q"], ["re r"]]
    assert histories(second) == [["re r"]]
    assert origins(second, "node") == [("last",)]
    assert len(second.state["messages"]) == 3


async def test_an_old_answer_out_of_a_store_is_no_lost_call() -> None:
    """The second rollout's state holds the first one's answer: said before, and told by no one."""

    async def node(state: Any, runtime: Runtime) -> Any:
        assert runtime.store is not None
        known = await runtime.store.aget(("answers",), "last")
        old = [] if known is None else [AIMessage(**known.value)]
        said = await ChatArt().ainvoke([*old, HumanMessage("q")])
        kept = {"content": said.content, "response_metadata": said.response_metadata}
        await runtime.store.aput(("answers",), "last", kept)
        return {"messages": [*old, said]}

    graph: Any = StateGraph(MessagesState)
    graph.add_node("node", node)
    graph.add_edge(START, "node")
    compiled = graph.compile(store=InMemoryStore())
    with House(turn) as house:
        first, second = [await house.play(compiled) for _ in range(2)]
    assert [histories(t) for t in (first, second)] == [[["turn 0"]], [["turn 1"]]]
    assert len(second.state["messages"]) == 3
