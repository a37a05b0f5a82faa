"""Free code played in a scope: `capture`, `wrap_rollout`, and `init_chat_model` under ART's name.

In: code that calls a `ChatArt`, and the model behind it. Out: trajectories with every call. Graphs
are played by `rollout`, which knows more of them.
"""

from __future__ import annotations

import asyncio
import functools
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from typing import Any, ParamSpec

from art_core.awaited_rollout import adopt
from art_core.capture import open_scope
from art_core.errors import ConfigError, RolloutFailure
from art_core.trajectories import Trajectory
from art_langgraph.chat_model import ChatArt
from art_langgraph.endings import ended, reraise_own_cancel, verdict_on
from art_langgraph.recorded import SETTLE_SECONDS, recorded, tell
from art_langgraph.targets import ModelLike, targets_of

_P = ParamSpec("_P")


@asynccontextmanager
async def capture(
    model: ModelLike | None = None,
    *,
    models: Mapping[str, ModelLike] | None = None,
    metadata: Mapping[str, Any] | None = None,
    evaluation: bool = False,
    rollout_id: str | None = None,
) -> AsyncIterator[Trajectory]:
    """Record the calls of free code: `async with capture(model) as traj: ...`.

    Exceptions pass through; the trajectory then holds the calls made before. Arguments as for
    `rollout`. The calls and histories are there from the end of the block on.

    Raises:
        RolloutFailure: the backend's part of the calls can't be had; the trajectory is inside.
    """
    targets = targets_of(model, models, evaluation=evaluation)
    trajectory = Trajectory(metadata=dict(metadata or {}))
    behind = [model, *(models or {}).values()]
    with open_scope(rollout_id, targets) as scope:
        try:
            async with recorded(trajectory, scope):
                yield trajectory
        except BaseException as error:
            try:
                await tell(trajectory, scope, behind)
            except RolloutFailure as failure:
                error.add_note(str(failure))
            raise
        await tell(trajectory, scope, behind)


def wrap_rollout(
    model: ModelLike,
    fn: Callable[_P, Awaitable[Trajectory]],
    *,
    failure_reward: float | None = 0.0,
    evaluation: bool = False,
) -> Callable[_P, Awaitable[Trajectory]]:
    """ART's name for playing `fn` with `model` behind every `ChatArt` in it.

    Args:
        model: as for `rollout`.
        fn: a coroutine function that returns a `Trajectory`; its calls are added to it.
        failure_reward: as for `rollout`.
        evaluation: as for `rollout`.

    Raises:
        RolloutFailure: when called, as for `rollout`.
        TypeError: when called, if `fn` returned anything but a `Trajectory`.
    """

    @functools.wraps(fn)
    async def played(*args: _P.args, **kwargs: _P.kwargs) -> Trajectory:
        trajectory, verdict = Trajectory(), None
        with open_scope(None, targets_of(model, None, evaluation=evaluation)) as scope:
            try:
                trajectory = await fn(*args, **kwargs)
            except RolloutFailure:
                raise
            except (Exception, asyncio.CancelledError) as error:  # noqa: BLE001  # a rollout's edge
                reraise_own_cancel(error)
                trajectory.exception = error
                verdict = verdict_on(error, scope)
            if not isinstance(trajectory, Trajectory):
                raise TypeError(f"a rollout returns an art.Trajectory, got {trajectory!r:.200}")
            await scope.settle(SETTLE_SECONDS)
        if trajectory.rollout_id is None:
            adopt(trajectory, scope)
            trajectory.finish()
            await tell(trajectory, scope, [model])
        return ended(trajectory, verdict, failure_reward)

    return played


def init_chat_model(
    model: str | None = None,
    *,
    model_provider: str | None = None,
    configurable_fields: object = None,
    config_prefix: str | None = None,
    **kwargs: Any,
) -> ChatArt:
    """ART's name for a `ChatArt`. The rollout says which model is behind it.

    Args:
        model: not used, nor are `model_provider` and `config_prefix`: kept so that moving over is a
            change of imports.
        configurable_fields: not supported.
        kwargs: of `ChatArt`.

    Raises:
        ConfigError: `configurable_fields` is given.
    """
    if configurable_fields is not None:
        raise ConfigError(
            "init_chat_model has no configurable fields",
            got=configurable_fields,
            expected="None",
            fix="Give each role its model: ChatArt(role=...) with rollout(..., models={...}).",
        )
    return ChatArt(**kwargs)
