"""The user's reward function: found by name, called with what was played.

In: "module:function" or "path.py:function". Out: a float for a trajectory. The function takes the
trajectory, or the trajectory and the scenario's line; it may be a coroutine function.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from typing import Any, SupportsFloat, TypeAlias

from art_core.errors import RewardError
from art_core.trajectories import Trajectory

RewardFunction: TypeAlias = Callable[..., Any]


async def reward_of(function: RewardFunction, trajectory: Trajectory, line: Any) -> float:
    """What `function` says the trajectory is worth.

    Args:
        function: of the trajectory, or of the trajectory and the scenario.
        line: the scenario, as it stands in its file.

    Raises:
        RewardError: it returned no finite number.
    """
    value = function(*(trajectory, line)[: _places(function)])
    if inspect.isawaitable(value):
        value = await value
    if isinstance(value, Trajectory):
        value = value.reward
    if not isinstance(value, SupportsFloat) or not math.isfinite(value):
        raise RewardError(
            f"the reward function {_name(function)} returned no number",
            got=value,
            expected="a finite number",
            fix="Return 0.0 where nothing was achieved.",
        )
    return float(value)


def _places(function: RewardFunction) -> int:
    """How many arguments it takes: 1 or 2."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):  # something built in
        return 1
    if any(p.kind is p.VAR_POSITIONAL for p in parameters):
        return 2
    places = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    return min(len(places), 2)


def _name(function: RewardFunction) -> str:
    return repr(getattr(function, "__name__", function))
