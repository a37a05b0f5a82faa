"""`finish`: work that a Ctrl-C may not cut in half.

In: a coroutine. Out: its result; if this task is cancelled meanwhile, the cancellation waits until
the coroutine is through. A killed process needs none of this: checkpoints are whole or absent.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


async def finish(work: Coroutine[Any, Any, T]) -> T:
    """Await `work` to its end.

    Raises:
        asyncio.CancelledError: this task was cancelled; `work` has ended by then.
        Exception: what `work` raised, also where the task was cancelled too.
    """
    task = asyncio.ensure_future(work)
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        if not task.cancelled():
            await task
        raise
