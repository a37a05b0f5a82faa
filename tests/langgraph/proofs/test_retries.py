"""Tries and stand-ins: RetryPolicy, `with_retry`, `with_fallbacks`; every try is a record."""

from __future__ import annotations

from typing import Any

import pytest
from langchain_core.messages import AIMessage
from langchain_core.runnables import RunnableConfig, RunnableLambda
from langgraph.graph import START, MessagesState, StateGraph
from langgraph.types import RetryPolicy, Send

from art_core.errors import RolloutFailure
from art_langgraph import ChatArt, rollout
from tests.langgraph.proofs.evidence import histories, origins
from tests.langgraph.proofs.house import House, Talk


def one_node(node: Any, **settings: Any) -> Any:
    graph: Any = StateGraph(MessagesState)
    graph.add_node("node", node, **settings)
    graph.add_edge(START, "node")
    return graph


def policy(attempts: int, kind: type[Exception] = ValueError) -> RetryPolicy:
    return RetryPolicy(max_attempts=attempts, initial_interval=0.01, jitter=False, retry_on=kind)


@pytest.mark.parametrize("is_async", [True, False])
async def test_each_try_of_a_node_has_its_number(is_async: bool) -> None:
    """Two calls a try; the third try passes. All six are samples, told apart by their attempt."""
    words = iter("abcdef")

    def judged(said: list[AIMessage]) -> Any:
        if said[-1].content != "f":
            raise ValueError("not good enough")
        return {"messages": said}

    async def anode(state: Any) -> Any:
        return judged([await ChatArt().ainvoke("x"), await ChatArt().ainvoke("y")])

    def node(state: Any) -> Any:
        return judged([ChatArt().invoke("x"), ChatArt().invoke("y")])

    with House(lambda _: next(words)) as house:
        graph = one_node(anode if is_async else node, retry_policy=policy(3))
        trajectory = await house.play(graph)
    assert origins(trajectory, "attempt", "graph_step") == [
        *((1, 1), (1, 1)),
        *((2, 1), (2, 1)),
        *((3, 1), (3, 1)),
    ]
    assert histories(trajectory) == [[word] for word in "abcdef"]
    assert len({c.origin.namespace for c in trajectory.calls}) == 1


async def test_a_node_that_never_passes_ends_as_the_policys_fault() -> None:
    async def node(state: Any) -> Any:
        await ChatArt().ainvoke("x")
        raise ValueError("not good enough")

    with House(lambda _: "bad") as house:
        trajectory = await house.play(one_node(node, retry_policy=policy(2)))
    assert (trajectory.ended, trajectory.reward) == ("error", 0.0)
    assert origins(trajectory, "attempt") == [(1,), (2,)]
    assert isinstance(trajectory.exception, ValueError)


async def test_tries_of_tasks_side_by_side_do_not_mix() -> None:
    """Of three tasks the second fails once: attempts 1, 1, 2, 1."""
    tried: set[int] = set()

    async def work(state: Any) -> Any:
        said = await ChatArt().ainvoke(f"w{state['number']}")
        if state["number"] == 1 and not tried:
            tried.add(1)
            raise ValueError("once more")
        return {"messages": [said]}

    graph: Any = StateGraph(MessagesState)
    graph.add_node("work", work, retry_policy=policy(2))
    sends = [Send("work", {"number": i}) for i in range(3)]
    graph.add_conditional_edges(START, lambda _: sends, ["work"])
    with House(lambda talk: f"re {talk.last}") as house:
        trajectory = await house.play(graph)
    attempts = sorted((c.message["content"], c.origin.attempt) for c in trajectory.calls)
    assert attempts == [("re w0", 1), ("re w1", 1), ("re w1", 2), ("re w2", 1)]
    assert len({c.origin.task_path for c in trajectory.calls}) == 3


@pytest.mark.parametrize("streaming", [False, True])
async def test_with_retry_keeps_every_try(streaming: bool) -> None:
    llm = ChatArt(max_retries=0, streaming=streaming)
    again = llm.with_retry(stop_after_attempt=3, wait_exponential_jitter=False)

    async def node(state: Any) -> Any:
        return {"messages": [await again.ainvoke(state["messages"])]}

    with House(lambda _: "ok") as house:
        house.faults.append(500)
        trajectory = await house.play(one_node(node))
    assert [c.error is None for c in trajectory.calls] == [False, True]
    assert histories(trajectory) == [["ok"]]
    assert origins(trajectory, "attempt") == [(1,), (1,)]


async def test_a_parser_that_refuses_asks_again() -> None:
    """`(model | parser).with_retry()`: the refused answer was sampled, and is trained."""

    def parse(message: AIMessage) -> int:
        return int(str(message.content))

    chain = (ChatArt() | RunnableLambda(parse)).with_retry(
        stop_after_attempt=2, wait_exponential_jitter=False
    )

    def node(state: Any, config: RunnableConfig) -> Any:
        return {"messages": [AIMessage(str(chain.invoke("a number?", config)))]}

    words = iter(["none", "7"])
    with House(lambda _: next(words)) as house:
        trajectory = await house.play(one_node(node))
    assert histories(trajectory) == [["7"], ["none"]]
    assert trajectory.state["messages"][-1].content == "7"


async def test_with_fallbacks_records_both_models() -> None:
    either = ChatArt(max_retries=0).with_fallbacks([ChatArt(role="backup")])

    async def node(state: Any) -> Any:
        return {"messages": [await either.ainvoke(state["messages"])]}

    with House(lambda talk: talk.model) as house:
        house.faults.append(500)
        trajectory = await house.play(one_node(node), models={"backup": house.target("helper")})
    assert [(c.model, c.error is None) for c in trajectory.calls] == [
        ("agent", False),
        ("helper", True),
    ]
    assert trajectory.state["messages"][-1].content == "helper"


async def test_a_fallback_within_tools_and_structure() -> None:
    """Bound tools and fallbacks together, as agents do it."""

    def look(q: str) -> str:
        """Look something up."""
        return q

    model = ChatArt(max_retries=0).bind_tools([look], tool_choice="required")
    either = model.with_fallbacks([ChatArt(role="backup").bind_tools([look])])

    def node(state: Any) -> Any:
        return {"messages": [either.invoke(state["messages"])]}

    with House(lambda _: "ok") as house:
        house.faults.append(500)
        trajectory = await house.play(one_node(node))
    assert [c.request.get("tool_choice") for c in trajectory.calls] == ["required", None]
    assert [c.error is None for c in trajectory.calls] == [False, True]


async def test_an_endpoint_that_stays_broken_is_a_failure_with_the_calls_inside() -> None:
    def node(state: Any) -> Any:
        return {"messages": [ChatArt().invoke("a"), ChatArt(max_retries=1).invoke("b")]}

    def says(talk: Talk) -> str:
        house.faults.extend([500] * 4)
        return "ok"

    with House(says) as house:
        with pytest.raises(RolloutFailure, match="after 3 calls") as failure:
            await rollout(one_node(node), {"messages": []}, model=house.target())
        trajectory = failure.value.trajectory
        house.prove(trajectory)
    assert [c.error is None for c in trajectory.calls] == [True, False, False]
    assert trajectory.ended == "error"
    assert trajectory.reward is None
