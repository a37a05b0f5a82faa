"""What a rollout sets up before its graph runs, and tears down whatever became of it.

In: two functions of the trajectory, sync or async. Out: they are run inside the rollout's scope and
outside its time limit. A fault in one is no fault of the policy: it makes the rollout a failure.
"""

from __future__ import annotations

import inspect
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any, TypeAlias

from art_core.errors import RolloutFailure
from art_core.trajectories import Trajectory

Hook: TypeAlias = Callable[[Trajectory], Any]
"""A function or coroutine function; what it returns is not used."""


@asynccontextmanager
async def hooked(
    trajectory: Trajectory, set_up: Hook | None, tear_down: Hook | None
) -> AsyncIterator[None]:
    """Run `set_up` before the block and `tear_down` after it, unless `set_up` failed."""
    await _run("set_up", set_up, trajectory)
    try:
        yield
    finally:
        await _run("tear_down", tear_down, trajectory)


async def _run(name: str, hook: Hook | None, trajectory: Trajectory) -> None:
    if hook is None:
        return
    try:
        made = hook(trajectory)
        if inspect.isawaitable(made):
            await made
    except Exception as error:
        trajectory.ended, trajectory.exception = "error", error
        raise RolloutFailure(
            f"{name} failed ({type(error).__name__}: {error})",
            trajectory=trajectory,
            fix="It is yours; what it raised is the cause.",
        ) from error
