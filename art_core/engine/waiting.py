"""Waiting for several things at once, and saying so while nothing comes."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Coroutine, Iterable
from typing import Any, TypeVar

_T = TypeVar("_T")


async def side_by_side(jobs: Iterable[Coroutine[Any, Any, None]]) -> None:
    """Run the coroutines side by side; the first fault cancels the others and is raised."""
    waiting = list(jobs)
    if len(waiting) == 1:
        await waiting[0]
        return
    tasks = [asyncio.create_task(job) for job in waiting]
    try:
        await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def pauses(work: Awaitable[None], seconds: float) -> AsyncGenerator[None, None]:
    """Something whenever `work` has gone on for `seconds` more."""
    task = asyncio.ensure_future(work)
    try:
        while not (await asyncio.wait({task}, timeout=seconds))[0]:
            yield
        await task
    finally:
        task.cancel()


async def items(queue: asyncio.Queue[_T | None], seconds: float) -> AsyncGenerator[_T | None, None]:
    """The queue's items up to its None; a None whenever nothing came for `seconds`."""
    while True:
        try:
            async with asyncio.timeout(seconds):
                item = await queue.get()
        except TimeoutError:
            yield None
            continue
        if item is None:
            return
        yield item
