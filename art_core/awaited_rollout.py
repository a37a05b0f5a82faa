"""One rollout: awaited in a scope of its own, under a time limit, its faults turned into values.

In: an awaitable that should return a `Trajectory`, or one that makes a group. Out: the trajectory
with the calls that were captured, or a `RolloutFailure` with the calls made until then. Left out:
many of them at once (gather.py).
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Sequence
from dataclasses import dataclass

from art_core.calls import ModelCall
from art_core.capture import Scope, open_scope
from art_core.errors import RolloutFailure
from art_core.time_limit import time_limit
from art_core.trajectories import Ended, Trajectory, TrajectoryGroup


async def play(
    rollout: Awaitable[Trajectory],
    *,
    label: str,
    rollout_id: str | None = None,
    timeout: float | None = None,
) -> Trajectory | RolloutFailure:
    """Await `rollout` in the running task and a fresh capture scope.

    Args:
        rollout: a coroutine, or another awaitable. The calls of a task that was started before
            belong to the scope it was started in.
        label: names the rollout in a failure's message.
        rollout_id: see `capture.open_scope`.
        timeout: seconds on the monotonic clock (which may stand still while the machine sleeps)
            until it is cancelled; time during which an engine of this process holds calls does not
            count. What it returns all the same is taken.

    Returns:
        The trajectory, or a failure whose `trajectory.ended` is "error", "timeout" or "cancelled"
        and whose `__cause__` is the exception. A failure too if the running task is cancelled: the
        caller asks `asyncio.current_task().cancelling()`.
    """
    seen = await _watch(rollout, rollout_id, timeout)
    error = seen.error or _wrong_type(seen.result, Trajectory)
    if isinstance(seen.result, Trajectory):
        trajectory = seen.result
    elif isinstance(error, RolloutFailure):
        trajectory = error.trajectory
    else:
        trajectory = Trajectory(start_time=seen.started)
    adopt(trajectory, seen.scope)
    if trajectory.completion_tokens:
        trajectory.metrics.setdefault("completion_tokens", trajectory.completion_tokens)
    trajectory.metrics.setdefault("duration", seen.seconds)
    return trajectory if error is None else _failure(trajectory, error, seen, label)


async def make_group(
    source: Awaitable[TrajectoryGroup], *, label: str, rollout_id: str | None = None
) -> TrajectoryGroup | RolloutFailure:
    """Await the group that a user's coroutine makes."""
    seen = await _watch(source, rollout_id, None)
    error = seen.error or _wrong_type(seen.result, TrajectoryGroup)
    if isinstance(seen.result, TrajectoryGroup):
        _share(seen.scope, seen.result)
        return seen.result
    trajectory = Trajectory(start_time=seen.started)
    adopt(trajectory, seen.scope)
    assert error is not None
    return _failure(trajectory, error, seen, label)


def adopt(trajectory: Trajectory, scope: Scope, before: Sequence[ModelCall] = ()) -> None:
    """Give a trajectory the calls of its scope, its id, and why the record is not whole.

    Args:
        trajectory: calls that it has already are kept as they are.
        scope: what was recorded.
        before: calls that those of the scope go on from, in place of the trajectory's own.
    """
    if before or not trajectory.calls:
        trajectory.calls = [*before, *scope.calls]
    if before or trajectory.rollout_id is None:
        trajectory.rollout_id = scope.rollout_id
    if scope.incomplete:
        known = trajectory.metadata.get("incomplete", ())
        trajectory.metadata["incomplete"] = [*dict.fromkeys([*known, *scope.incomplete])]


@dataclass(frozen=True)
class _Seen:
    """What became of an awaitable."""

    result: object
    error: BaseException | None
    scope: Scope
    started: float
    """Seconds since the epoch."""
    seconds: float
    past_limit: float | None
    """The time limit in seconds, if it was passed."""


async def _watch(awaitable: Awaitable[object], scope_id: str | None, limit: float | None) -> _Seen:
    begun, started = time.monotonic(), time.time()
    result: object = None
    error: BaseException | None = None
    clock: asyncio.Timeout | None = None
    with open_scope(scope_id) as scope:
        try:
            async with time_limit(limit) as clock:
                result = await awaitable
        except (Exception, asyncio.CancelledError) as caught:  # noqa: BLE001  # a rollout's edge
            error = caught
    passed = limit if clock is not None and clock.expired() else None
    return _Seen(result, error, scope, started, time.monotonic() - begun, passed)


def _wrong_type(result: object, expected: type) -> TypeError | None:
    if isinstance(result, expected):
        return None
    return TypeError(
        f"it returned {result!r:.200} of type {type(result).__name__}, "
        f"expected an art.{expected.__name__}"
    )


def _failure(
    trajectory: Trajectory, error: BaseException, seen: _Seen, label: str
) -> RolloutFailure:
    cancelled = isinstance(error, asyncio.CancelledError)
    ended: Ended = "timeout" if seen.past_limit else "cancelled" if cancelled else "error"
    if isinstance(error, RolloutFailure):
        if ended == "timeout":
            trajectory.ended = ended
        return error
    fix = ""
    if seen.past_limit:
        what = f"{label} ran past its limit of {seen.past_limit:g} s"
        fix = "Raise rollout_timeout, or bound the turns of the agent."
    elif cancelled:
        what = f"{label} was cancelled after {seen.seconds:.1f} s"
    else:
        what = f"{label} failed after {seen.seconds:.1f} s: {type(error).__name__}: {error}"
    trajectory.ended, trajectory.exception = ended, error
    failure = RolloutFailure(what, trajectory=trajectory, fix=fix)
    failure.__cause__ = error
    return failure


def _share(scope: Scope, group: TrajectoryGroup) -> None:
    """Give calls to the trajectories of a group that was played inside one scope.

    A trajectory's kept Choices say which calls are its own; the only trajectory of a group has all.
    What can't be told apart is said in the group's logs.
    """
    taken = {call.key for trajectory in group for call in trajectory.calls}
    free = [call for call in scope.calls if call.key not in taken]
    bare = [trajectory for trajectory in group if not trajectory.calls]
    for trajectory in bare:
        chosen = trajectory.chosen_records()
        if chosen is not None:
            trajectory.calls = [call for call in free if call.key in chosen]
        elif len(group) == 1:
            trajectory.calls = free
    if free and not all(trajectory.calls for trajectory in bare):
        group.logs.append(
            f"{len(free)} calls were captured that can't be told apart by trajectory; give the "
            "rollouts to the group unawaited: TrajectoryGroup(rollout(...) for _ in range(8))"
        )
