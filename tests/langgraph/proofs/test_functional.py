"""The functional API: entrypoints and tasks, in parallel, with retries, caches and interrupts."""

from __future__ import annotations

import asyncio
from typing import Any

from langgraph.cache.memory import InMemoryCache
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.func import entrypoint, task
from langgraph.types import CachePolicy, Command, RetryPolicy, interrupt

from art_langgraph import ChatArt, capture
from tests.langgraph.proofs.evidence import histories, levels, origins
from tests.langgraph.proofs.house import House


async def test_tasks_side_by_side_are_calls_of_their_own() -> None:
    @task
    async def write(topic: str) -> str:
        return str((await ChatArt().ainvoke(topic)).content)

    @task
    def check(text: str) -> str:
        return str(ChatArt(role="critic").invoke(text).content)

    @entrypoint()
    async def essay(topics: list[str]) -> str:
        drafts = await asyncio.gather(*(write(topic) for topic in topics))
        checked = [await check(draft) for draft in drafts]
        return str((await ChatArt().ainvoke(" ".join(checked))).content)

    with House(lambda talk: f"re {talk.last}") as house:
        trajectory = await house.play(essay, ["a", "b"])
    assert trajectory.state == "re re re a re re b"
    assert histories(trajectory) == sorted(
        [["re a"], ["re b"], ["re re a"], ["re re b"], ["re re re a re re b"]]
    )
    assert sorted(origins(trajectory, "node", "role"), key=str) == [
        ("check", "critic"),
        ("check", "critic"),
        ("essay", None),
        ("write", None),
        ("write", None),
    ]
    assert [levels(c) for c in trajectory.calls[:2]] == [["essay", "write"]] * 2


async def test_a_task_that_is_tried_again_counts_its_attempts() -> None:
    tries: list[str] = []

    async def write(topic: str) -> str:
        said = str((await ChatArt().ainvoke(topic)).content)
        tries.append(said)
        if len(tries) < 3:
            raise ValueError("once more")
        return said

    policy = RetryPolicy(max_attempts=3, initial_interval=0.01, retry_on=ValueError)
    as_task: Any = task  # its overloads know no function with settings
    writing = as_task(write, retry_policy=policy)

    @entrypoint()
    async def essay(topic: str) -> str:
        return str(await writing(topic))

    words = iter(["bad", "better", "good"])
    with House(lambda _: next(words)) as house:
        trajectory = await house.play(essay, ["x"])
    assert trajectory.state == "good"
    assert origins(trajectory, "node", "attempt") == [("write", 1), ("write", 2), ("write", 3)]
    assert histories(trajectory) == [["bad"], ["better"], ["good"]]


async def test_an_interrupted_entrypoint_does_not_ask_again_for_what_it_knows() -> None:
    """The task's result is in the checkpoint; what the entrypoint itself asked is asked again."""

    @task
    async def write(topic: str) -> str:
        return str((await ChatArt().ainvoke(topic)).content)

    @entrypoint(checkpointer=InMemorySaver())
    async def essay(topic: str) -> str:
        draft = await write(topic)
        opinion = str((await ChatArt().ainvoke(f"Rate {draft}")).content)
        answer = interrupt({"draft": draft, "opinion": opinion})
        return f"{draft} {answer}"

    thread: Any = {"configurable": {"thread_id": "t"}}
    with House(lambda talk: f"re {talk.last}") as house:
        async with capture(house.target()) as trajectory:
            await essay.ainvoke("a", thread)
            state = await essay.ainvoke(Command(resume="fine"), thread)
        house.prove(trajectory)
    assert state == "re a fine"
    assert histories(trajectory) == [["re Rate re a"], ["re Rate re a"], ["re a"]]
    assert origins(trajectory, "node") == [("write",), ("essay",), ("essay",)]


async def test_a_cached_task_is_asked_once() -> None:
    async def write(topic: str) -> str:
        return str((await ChatArt().ainvoke(topic)).content)

    as_task: Any = task  # its overloads know no function with settings
    writing = as_task(write, cache_policy=CachePolicy())

    @entrypoint(cache=InMemoryCache())
    async def essay(topic: str) -> list[str]:
        return [await writing(topic), await writing(topic)]

    with House(lambda talk: f"re {talk.last}") as house:
        trajectory = await house.play(essay, ["a"])
    assert len(trajectory.state) == 2
    assert histories(trajectory) == [[trajectory.state[0]]]
