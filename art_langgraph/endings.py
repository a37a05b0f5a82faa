"""How a rollout is handed back: as a trajectory, or as a `RolloutFailure` with it inside.

In: what ended a graph or failed beside it, and the calls until then. Out: a verdict, and the
trajectory with its end and reward. Whose fault which exception is stands in `faults`.
"""

from __future__ import annotations

import asyncio
from typing import cast

from art_core.calls import ModelCall
from art_core.capture import Scope
from art_core.errors import RolloutFailure
from art_core.trajectories import Trajectory
from art_core.transport import CALLER_LEFT
from art_langgraph.faults import Verdict, judge
from art_langgraph.hooks import HookFailed


def reraise_own_cancel(error: BaseException) -> None:
    """Let a cancel of this very task travel on: whoever asked for it is waiting for it."""
    task = asyncio.current_task()
    if isinstance(error, asyncio.CancelledError) and task is not None and task.cancelling():
        raise error


def verdict_on(
    error: BaseException, scope: Scope, *, expired: bool = False, played: bool = False
) -> Verdict:
    """The verdict on what ended a rollout.

    Args:
        error: what was raised.
        scope: the rollout's.
        expired: its time was up.
        played: the graph had come to its end before: what failed is its source, when it closed.
    """
    if expired:
        return Verdict("timeout", by_policy=True)
    return judge(error, answered=not played and _answered_last(scope))


def ended(
    trajectory: Trajectory, verdict: Verdict | None, failure_reward: float | None
) -> Trajectory:
    """The trajectory with its end; None is the verdict on one that came to its own.

    Raises:
        RolloutFailure: the policy was not to blame.
    """
    if verdict is None:
        return trajectory
    trajectory.ended = verdict.ended
    if not verdict.by_policy:
        error = cast(BaseException, trajectory.exception)
        calls = len(trajectory.calls)
        raise RolloutFailure(
            f"the rollout failed ({type(error).__name__}: {error}) after {calls} calls",
            trajectory=trajectory,
            fix="The policy was not to blame, so it is not trained on; its calls are in "
            ".trajectory.",
        ) from error
    if trajectory.reward is None:
        trajectory.reward = failure_reward
    return trajectory


def failed_beside(
    trajectory: Trajectory, what: str, error: BaseException, fix: str
) -> RolloutFailure:
    """What to raise where something beside the graph failed: its exception, if any, is told too.

    Args:
        trajectory: keeps the graph's exception; it gets `error` where it has none.
        what: says what failed, and how.
        error: the cause.
        fix: what to do next.
    """
    graphs = trajectory.exception
    if graphs is None or graphs is error:
        trajectory.exception = error
    else:
        what += f", after the graph had ({type(graphs).__name__}: {graphs})"
    trajectory.ended = "error"
    failure = RolloutFailure(what, trajectory=trajectory, fix=fix)
    failure.__cause__ = error
    return failure


def hook_failure(trajectory: Trajectory, failed: HookFailed) -> RolloutFailure:
    """What to raise where a hook failed."""
    fix = "It is yours; what it raised is the cause."
    return failed_beside(trajectory, str(failed), failed.error, fix)


def _answered_last(scope: Scope) -> bool:
    """True if the last call to end was answered; calls that the graph itself left don't count."""
    done = [c for c in scope.calls if _is_answer(c) or c.error not in (None, *CALLER_LEFT)]
    return bool(done) and _is_answer(max(done, key=lambda call: call.ended))


def _is_answer(call: ModelCall) -> bool:
    """True for a whole answer of the policy: over our transport, or by the record id of ours."""
    return call.error is None and (bool(call.response) or not call.record_id.startswith("local-"))
