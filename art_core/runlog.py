"""What a step leaves in the run folder: its mean figures, and its trajectories.

In: groups of a split and a step. Out: a line in `history.jsonl` and a Parquet file. The same for
train, val and test, for models that are trained and models that are compared with.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from art_core.completeness import Completeness
from art_core.metrics import MetricsLog, plain_value
from art_core.rundir import RunDir
from art_core.trajectories import Trajectory, TrajectoryGroup
from art_core.trajectory_files import write_trajectories
from art_core.trajectory_rows import reward_of


def log_step(
    run: RunDir,
    split: str,
    step: int,
    groups: Sequence[TrajectoryGroup] = (),
    metrics: Mapping[str, Any] | None = None,
) -> None:
    """Write a step's trajectories and figures.

    Args:
        run: need not be open.
        split: "train", "val", "test" or another name.
        step: of the model that played them.
        groups: their means are logged; without any, only `metrics` are.
        metrics: further figures; they win over a mean of the same name.

    Raises:
        ConfigError: a metric is no number, or a name breaks the rule.
        RunFolderError: the disk is full or refuses.
    """
    if groups:
        write_trajectories(run, split, step, groups)
    figures = {**(summarize(groups) if groups else {}), **(metrics or {})}
    if figures:
        MetricsLog(run.history).append(step, split, figures)


def summarize(groups: Sequence[TrajectoryGroup]) -> dict[str, float]:
    """Mean figures over the trajectories of `groups`.

    Returns:
        "reward" (mean of those that are set; absent if none is), "reward_std_dev" (mean over groups
        of two or more of the standard deviation inside the group: 0 means nothing to learn from),
        "trajectories", "failures", "exception_rate" (failures / rollouts), "completion_tokens"
        (mean sampled tokens a trajectory), the mean of each of the trajectories' and groups'
        metrics, "ended/<how>" (share of trajectories) for other ends than "completed", and where
        calls were captured "calls/answered", "calls/seen", "calls/kept", "calls/left_out/<why>" and
        "calls/rendered" (calls a trajectory; see `Completeness`).
    """
    trajectories = [trajectory for group in groups for trajectory in group]
    failures = sum(len(group.exceptions) for group in groups)
    rollouts = len(trajectories) + failures
    figures: dict[str, float] = {"trajectories": len(trajectories), "failures": failures}
    if rollouts:
        figures["exception_rate"] = failures / rollouts
    if trajectories:
        figures |= _captured(trajectories)
        figures["completion_tokens"] = _mean(t.completion_tokens for t in trajectories)
    if rewards := _rewards(trajectories):
        figures["reward"] = _mean(rewards)
    spreads = [_std(r) for group in groups if len(r := _rewards(group)) > 1]
    if spreads:
        figures["reward_std_dev"] = _mean(spreads)
    for end in sorted({t.ended for t in trajectories} - {"completed"}):
        figures[f"ended/{end}"] = _mean(t.ended == end for t in trajectories)
    return {**_mean_metrics(groups), **_mean_metrics(trajectories), **figures}


def _captured(trajectories: Sequence[Trajectory]) -> dict[str, float]:
    """What of the calls can be trained, a trajectory; nothing if none was captured."""
    whole = sum((t.completeness for t in trajectories), Completeness())
    if not whole.seen:
        return {}
    return {name: n / len(trajectories) for name, n in whole.figures().items()}


def _rewards(trajectories: Iterable[Trajectory]) -> list[float]:
    numbers = (reward_of(t) for t in trajectories)
    return [number for number in numbers if number is not None]


def _mean_metrics(owners: Iterable[Trajectory | TrajectoryGroup]) -> dict[str, float]:
    values: dict[str, list[float]] = {}
    for owner in owners:
        for name, value in owner.metrics.items():
            number = plain_value(name, value)
            if isinstance(number, int | float):
                values.setdefault(name, []).append(number)
    return {name: _mean(column) for name, column in values.items()}


def _mean(values: Iterable[float]) -> float:
    column = list(values)
    return sum(column) / len(column)


def _std(values: list[float]) -> float:
    mean = _mean(values)
    return math.sqrt(_mean((value - mean) * (value - mean) for value in values))
