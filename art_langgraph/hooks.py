"""What a rollout calls of its user beside the graph: `set_up`, `tear_down` and `on_interrupt`.

In: functions, sync or async. Out: what they give, or a `HookFailed`: a fault in one is no fault of
the policy. Set-up and tear-down run inside the rollout's scope and outside its time limit.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any, TypeAlias

from art_core.time_limit import time_limit
from art_core.trajectories import Trajectory

Hook: TypeAlias = Callable[[Trajectory], Any]
"""A function or coroutine function; what it returns is not used."""


class HookFailed(Exception):
    """A hook raised.

    Args:
        hook: its name.
        error: what it raised.
    """

    def __init__(self, hook: str, error: Exception) -> None:
        super().__init__(f"{hook} failed ({type(error).__name__}: {error})")
        self.error = error


@asynccontextmanager
async def hooked(
    trajectory: Trajectory, set_up: Hook | None, tear_down: Hook | None
) -> AsyncIterator[None]:
    """Run `set_up` before the block and `tear_down` after it, unless `set_up` failed.

    Raises:
        HookFailed: one of them raised.
    """
    if set_up is not None:
        await run_hook("set_up", set_up, trajectory)
    try:
        yield
    finally:
        if tear_down is not None:
            await run_hook("tear_down", tear_down, trajectory)


async def run_hook(
    name: str, hook: Callable[..., Any], given: Any, *, timeout: float | None = None
) -> Any:
    """What a hook makes of what it is given.

    Args:
        timeout: seconds that it may take; None: as long as it likes.

    Raises:
        HookFailed: it raised, or took longer.
    """
    limit: asyncio.Timeout | None = None
    try:
        async with time_limit(timeout) as limit:
            made = hook(given)
            return await made if inspect.isawaitable(made) else made
    except Exception as error:
        if limit is not None and limit.expired():
            late = TimeoutError(f"no answer after {timeout:g} s")
            raise HookFailed(name, late) from error
        raise HookFailed(name, error) from error
