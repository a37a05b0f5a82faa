"""Threads: LangGraph's own, `to_thread`, pools that keep the context and pools that lose it."""

from __future__ import annotations

import asyncio
import contextvars
import threading
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import pytest
from langchain_core.runnables import RunnableConfig, RunnableLambda, RunnableParallel
from langchain_core.runnables.config import ContextThreadPoolExecutor, run_in_executor
from langgraph.graph import START, MessagesState, StateGraph

from art_core.errors import CaptureError, RolloutFailure
from art_langgraph import ChatArt, rollout
from tests.langgraph.proofs.evidence import histories, origins
from tests.langgraph.proofs.house import House

LLM = ChatArt()


def one_node(node: Any) -> Any:
    graph: Any = StateGraph(MessagesState)
    graph.add_node("node", node)
    graph.add_edge(START, "node")
    return graph


def ask(question: str, config: Any = None) -> Any:
    return LLM.invoke(question, config)


async def to_thread(config: Any) -> None:
    await asyncio.gather(*(asyncio.to_thread(ask, f"q{i}") for i in range(3)))


async def context_pool(config: Any) -> None:
    def run() -> None:
        with ContextThreadPoolExecutor(3) as pool:
            list(pool.map(ask, ["q0", "q1"]))
            pool.submit(ask, "q2").result()

    await asyncio.to_thread(run)


async def langchains_pool(config: Any) -> None:
    asked = [run_in_executor(None, ask, f"q{i}") for i in range(3)]
    await asyncio.gather(*asked)


async def bare_pool_with_config(config: Any) -> None:
    loop = asyncio.get_running_loop()
    with ThreadPoolExecutor(3) as pool:
        asked = [loop.run_in_executor(pool, ask, f"q{i}", config) for i in range(3)]
        await asyncio.gather(*asked)


async def bare_thread_with_context(config: Any) -> None:
    threads = []
    for i in range(3):
        context = contextvars.copy_context()
        threads.append(threading.Thread(target=context.run, args=(ask, f"q{i}")))
    for thread in threads:
        thread.start()
    for thread in threads:
        await asyncio.to_thread(thread.join)


def _asks(number: int, _: Any) -> Any:
    return ask(f"q{number}")


async def parallel_runnables(config: Any) -> None:
    branches = {f"b{i}": RunnableLambda(partial(_asks, i)) for i in range(3)}
    await asyncio.to_thread(RunnableParallel(branches).invoke, "x")


WAYS = [
    to_thread,
    context_pool,
    langchains_pool,
    bare_pool_with_config,
    bare_thread_with_context,
    parallel_runnables,
]


@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.__name__)
async def test_threads_that_keep_the_context_keep_the_record(way: Any) -> None:
    async def node(state: Any, config: RunnableConfig) -> Any:
        await way(config)
        return {"messages": []}

    with House(lambda talk: f"re {talk.last}") as house:
        trajectory = await house.play(one_node(node))
    assert histories(trajectory) == [["re q0"], ["re q1"], ["re q2"]]
    assert origins(trajectory, "node", "graph_step") == [("node", 1)] * 3


async def test_sync_nodes_side_by_side_run_in_threads_of_langgraph() -> None:
    meet = threading.Barrier(3, timeout=20)  # broken unless all three run at once

    def node(state: Any) -> Any:
        meet.wait()
        return {"messages": [ask(threading.current_thread().name)]}

    graph: Any = StateGraph(MessagesState)
    for name in ("a", "b", "c"):
        graph.add_node(name, node)
        graph.add_edge(START, name)
    with House(lambda talk: f"re {talk.last}") as house:
        trajectory = await house.play(graph)
    assert sorted(origins(trajectory, "node")) == [("a",), ("b",), ("c",)]
    assert len({c.messages[0]["content"] for c in trajectory.calls}) == 3


async def test_a_bare_pool_is_a_typed_error_and_the_record_is_not_whole() -> None:
    """What was asked before is inside the failure; the server never saw the lost calls."""

    def node(state: Any) -> Any:
        ask("first")
        with ThreadPoolExecutor() as pool:
            return {"messages": list(pool.map(ask, ["q0", "q1"]))}

    with House(lambda talk: f"re {talk.last}") as house:
        with pytest.raises(RolloutFailure) as failure:
            await rollout(one_node(node), {"messages": []}, model=house.target())
        asked = [talk.last for talk in house.asked]
    lost = failure.value.__cause__
    assert isinstance(lost, CaptureError)
    assert "ContextThreadPoolExecutor" in str(lost)
    trajectory = failure.value.trajectory
    assert [c.message["content"] for c in trajectory.calls] == ["re first"]
    assert asked == ["first"]
    assert trajectory.metadata["incomplete"]


@pytest.mark.parametrize("passes_config", [True, False])
async def test_a_worker_that_is_older_than_the_rollout(passes_config: bool) -> None:
    """A task that serves all rollouts has the context of none; the node's config is a carrier."""
    orders: asyncio.Queue[tuple[Any, asyncio.Future[Any]]] = asyncio.Queue()

    async def serve() -> None:
        while True:
            config, answer = await orders.get()
            try:
                answer.set_result(await LLM.ainvoke("q", config))
            except CaptureError as error:
                answer.set_exception(error)

    async def node(state: Any, config: RunnableConfig) -> Any:
        answer: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        await orders.put((config if passes_config else None, answer))
        return {"messages": [await answer]}

    worker = asyncio.create_task(serve())
    with House(lambda talk: f"re {talk.last}") as house:
        if passes_config:
            trajectory = await house.play(one_node(node))
            assert histories(trajectory) == [["re q"]]
            assert origins(trajectory, "node", "graph_step") == [("node", 1)]
        else:
            with pytest.raises(RolloutFailure) as failure:
                await rollout(one_node(node), {"messages": []}, model=house.target())
            assert isinstance(failure.value.__cause__, CaptureError)
            assert failure.value.trajectory.metadata["incomplete"]
            assert not house.requests
    worker.cancel()
