"""Nodes as people write them: odd, but nothing of what they ask is lost."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator
from typing import Any

import pytest
from langchain_core.messages import AIMessage, FunctionMessage, HumanMessage, ToolMessage
from langgraph.graph import START, MessagesState, StateGraph

from art_langgraph import ChatArt, rollout
from tests.stub_endpoint import Asked, completion, endpoint, streamed

ASK: Any = {"messages": [("user", "q")]}
IMAGE = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AA=="}}


def graph_of(node: Any) -> Any:
    graph: Any = StateGraph(MessagesState)
    graph.add_node("node", node)
    graph.add_edge(START, "node")
    return graph


def echo(asked: Asked) -> dict[str, Any]:
    return completion(asked.body["messages"][0]["content"], [1])


async def test_batches_of_every_form_are_recorded() -> None:
    async def node(state: Any) -> Any:
        llm = ChatArt()
        said = await llm.abatch(["a", "b"])
        said += [answer async for _, answer in llm.abatch_as_completed(["c", "d"])]
        said += await asyncio.to_thread(llm.batch, ["e", "f"])
        said.append(await asyncio.wait_for(llm.ainvoke("g"), 5))
        return {"messages": said[:1]}

    with endpoint(echo) as stub:
        trajectory = await rollout(graph_of(node), ASK, model=stub.target())
    assert sorted(c.message["content"] for c in trajectory.calls) == list("abcdefg")
    assert {c.origin.node for c in trajectory.calls} == {"node"}
    assert trajectory.completeness.kept == 7
    assert len(trajectory.additional_histories) == 6


async def test_a_task_that_outlives_its_graph_is_told() -> None:
    until = threading.Event()
    tasks: list[asyncio.Task[Any]] = []

    def answer(asked: Asked) -> dict[str, Any]:
        if asked.body["messages"][0]["content"] == "late":
            until.wait(5)
        return echo(asked)

    async def node(state: Any) -> Any:
        tasks.append(asyncio.create_task(ChatArt().ainvoke("late")))
        return {"messages": [await ChatArt().ainvoke("now")]}

    with endpoint(answer) as stub:
        trajectory = await rollout(graph_of(node), ASK, model=stub.target())
        until.set()
        await asyncio.gather(*tasks, return_exceptions=True)
    assert trajectory.ended == "completed"
    assert trajectory.completeness.kept == 1
    errors = [call.error for call in trajectory.calls]
    assert len(errors) == 2
    assert "the rollout ended while this call was open" in errors


async def test_a_node_that_waits_no_longer_and_goes_on() -> None:
    until = threading.Event()

    def answer(asked: Asked) -> dict[str, Any]:
        if asked.body["messages"][0]["content"] == "slow":
            until.wait(5)
        return echo(asked)

    async def node(state: Any) -> Any:
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(ChatArt().ainvoke("slow"), 0.1)
        return {"messages": [await ChatArt().ainvoke("quick")]}

    with endpoint(answer) as stub:
        trajectory = await rollout(graph_of(node), ASK, model=stub.target())
        until.set()
    assert trajectory.ended == "completed"
    assert [c.error for c in trajectory.calls] == ["CancelledError", None]


@pytest.mark.parametrize("version", ["v0", "v1"])
async def test_content_in_blocks_goes_on_from_what_was_said(version: str) -> None:
    """No prompt ids: the history is one by its messages, whatever shape they are given back in."""
    answers = [completion(f"said {i}", [20 + i], prompt_ids=None) for i in range(3)]

    async def node(state: Any) -> Any:
        llm, said = ChatArt(output_version=version), [*state["messages"]]
        for _ in range(3):
            more = HumanMessage([{"type": "text", "text": "go on"}])
            said += [await llm.ainvoke(said), more]
        return {"messages": said[1:]}

    with endpoint(answers) as stub:
        trajectory = await rollout(graph_of(node), ASK, model=stub.target())
    assert trajectory.additional_histories == []
    assert len(trajectory.calls) == 3


@pytest.mark.parametrize(
    "history",
    [
        [
            AIMessage("", additional_kwargs={"function_call": {"name": "f", "arguments": "{}"}}),
            FunctionMessage(content="r", name="f"),
        ],
        [
            AIMessage("", tool_calls=[{"name": "f", "args": {}, "id": "c"}]),
            ToolMessage(
                [{"type": "text", "text": "see"}, IMAGE],
                tool_call_id="c",
                artifact=object(),
                status="error",
            ),
        ],
        [ToolMessage("file a\udce9.txt", tool_call_id="c")],
    ],
)
async def test_histories_of_every_age_are_sent_and_kept(history: list[Any]) -> None:
    """The old function calls; images out of tools; file names that UTF-8 does not know."""

    async def node(state: Any) -> Any:
        return {"messages": [await ChatArt().ainvoke([*state["messages"], *history])]}

    with endpoint([completion("x", [2])]) as stub:
        trajectory = await rollout(graph_of(node), ASK, model=stub.target())
    assert trajectory.exception is None
    assert trajectory.completeness.kept == 1
    assert len(trajectory.messages()) == len(history) + 2


async def test_streams_within_streams_are_recorded() -> None:
    async def asked() -> AsyncIterator[str]:
        yield "q"

    async def node(state: Any) -> Any:
        llm = ChatArt()
        parts = [part.text async for part in llm.atransform(asked())]
        chain = llm | (lambda said: said.text)
        async for _ in chain.astream_events("q", version="v2"):
            pass
        return {"messages": [AIMessage("".join(parts))]}

    with endpoint(lambda _: streamed("ab", [1])) as stub:
        trajectory = await rollout(graph_of(node), ASK, model=stub.target())
    assert trajectory.state["messages"][-1].content == "ab"
    assert [c.trainable for c in trajectory.calls] == [True, True]
