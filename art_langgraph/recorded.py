"""From a scope to a trajectory: the calls of a rollout, and why some are context only.

In: a scope that recorded, and what the callbacks saw beside it. Out: the trajectory's calls, each
with its parent run and, where it is no sample of the policy or was not chosen, the cause; then its
histories. It leaves out tokens that only the backend has (`TrainableModel.join`).
"""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any, Protocol, runtime_checkable

from art_core.awaited_rollout import adopt
from art_core.calls import ModelCall
from art_core.capture import Scope
from art_core.exchange import split_step
from art_core.trajectories import Trajectory
from art_langgraph.callbacks import TrajectoryCallbackHandler, has_record
from art_langgraph.endings import failed_beside

SETTLE_SECONDS = 0.5
"""How long a rollout waits at its end for responses that are just being closed."""


@runtime_checkable
class HasRecords(Protocol):
    """A model whose backend keeps token records, such as `art.TrainableModel`."""

    async def join(self, trajectories: Any) -> None:
        """Add the token side to calls that came without it."""
        ...


@asynccontextmanager
async def recorded(
    trajectory: Trajectory, scope: Scope, before: Sequence[ModelCall] = ()
) -> AsyncIterator[None]:
    """Give the trajectory the calls of its scope behind those `before`, however the block ends."""
    begun = time.monotonic()
    try:
        yield
        await scope.settle(SETTLE_SECONDS)
    finally:
        scope.close()
        adopt(trajectory, scope, before)
        trajectory.finish()
        if before:
            duration = trajectory.metrics["duration"] + time.monotonic() - begun
            trajectory.metrics["duration"] = duration


async def tell(
    trajectory: Trajectory,
    scope: Scope,
    models: Iterable[object],
    *,
    handler: TrajectoryCallbackHandler | None = None,
    is_chosen: Callable[[ModelCall], bool] | None = None,
) -> None:
    """Say of every call what it is, join what the backend has of it, and tell the histories.

    Histories that free code has written itself are left alone.

    Args:
        models: those behind the rollout; each that has records is asked for its part.
        is_chosen: False for a call that is to be context; None: all are chosen.

    Raises:
        RolloutFailure: a backend did not give its part; all else has been told.
    """
    parents = handler.parents if handler is not None else {}
    policies = _policies(scope)

    def labelled(call: ModelCall) -> ModelCall:
        parent = parents.get(call.origin.run_id or "")
        if parent is not None and call.origin.parent_run_id is None:
            call = replace(call, origin=replace(call.origin, parent_run_id=parent))
        if call.left_out is not None or call.error is not None:
            return call
        if _is_foreign(call, scope, policies):
            return replace(call, left_out="other model")
        return (
            call
            if is_chosen is None or is_chosen(call)
            else replace(call, left_out="outside the chosen nodes")
        )

    trajectory.calls = [labelled(call) for call in trajectory.calls]
    try:
        if any(wants_tokens(call) for call in trajectory.calls):
            await _join(trajectory, models)
    finally:
        if handler is not None or not trajectory.messages_and_choices:
            trajectory.tell_histories()


async def _join(trajectory: Trajectory, models: Iterable[object]) -> None:
    for model in models:
        if not isinstance(model, HasRecords):
            continue
        try:
            await model.join(trajectory)
        except Exception as error:
            raise failed_beside(
                trajectory,
                f"the tokens that the backend recorded can't be had ({type(error).__name__}: "
                f"{error})",
                error,
                "Its calls are in .trajectory; model.join(trajectory) asks again.",
            ) from error


def wants_tokens(call: ModelCall) -> bool:
    """True if the backend knows the call's tokens, and the call does not."""
    is_whole = call.error is None and call.left_out is None
    return is_whole and call.sampled_ids is None and has_record(call)


def is_policys(call: ModelCall, scope: Scope) -> bool:
    """True if the policy itself was asked, whatever came of it."""
    if call.left_out == "other model":
        return False
    return has_record(call) or bool(call.response) or call.model in _policies(scope)


def _is_foreign(call: ModelCall, scope: Scope, policies: set[str]) -> bool:
    """True if another model was asked: by a client of its own, or as one of the hosted roles.

    Where the environment names the model, what went over our transport was its own.
    """
    if call.sampled_ids is not None or has_record(call) or call.model in policies:
        return False
    return not call.response or bool(scope.targets)


def _policies(scope: Scope) -> set[str]:
    """Names of the rollout's models that give token data."""
    return {split_step(t.model_name)[0] for t in scope.targets.values() if t.token_data}
