"""Turns between models: a bound, a queue for each, nobody starved, nobody lost."""

from __future__ import annotations

import asyncio

import pytest

from art_core.engine.api_errors import ApiError
from art_core.server.admission import Admission


async def settle() -> None:
    for _ in range(10):
        await asyncio.sleep(0)


async def test_a_models_five_calls_do_not_wait_for_anothers_hundred() -> None:
    admission, order = Admission(running=1), list[str]()

    async def call(model: str) -> None:
        async with admission.turn(model):
            order.append(model)
            await asyncio.sleep(0)

    many = [asyncio.create_task(call("many")) for _ in range(100)]
    await settle()
    few = [asyncio.create_task(call("few")) for _ in range(5)]
    await asyncio.gather(*many, *few)
    first, last = order.index("few"), len(order) - 1 - order[::-1].index("few")
    assert last - first <= 10, "by turns: few, many, few, many, ..."
    assert (admission.running, admission.waiting, len(order)) == (0, 0, 105)


async def test_a_full_queue_is_refused_with_429() -> None:
    admission = Admission(running=1, waiting=2)
    go = asyncio.Event()

    async def call() -> None:
        async with admission.turn("a"):
            await go.wait()

    calls = [asyncio.create_task(call()) for _ in range(3)]
    await settle()
    with pytest.raises(ApiError, match="too many calls waiting") as caught:
        await call()
    assert caught.value.status == 429
    go.set()
    await asyncio.gather(*calls)
    async with admission.turn("a"):
        assert admission.running == 1


async def test_who_leaves_while_waiting_or_when_let_in_takes_no_place() -> None:
    admission = Admission(running=1)
    go = asyncio.Event()

    async def call() -> None:
        async with admission.turn("a"):
            await go.wait()

    first, second, third = (asyncio.create_task(call()) for _ in range(3))
    await settle()
    second.cancel()
    await settle()
    assert admission.waiting == 1
    first.cancel()
    await asyncio.sleep(0)
    third.cancel()
    await asyncio.gather(first, second, third, return_exceptions=True)
    assert (admission.running, admission.waiting) == (0, 0)
