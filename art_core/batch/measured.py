"""What each call of the compared groups is worth: the candidates' rewards as advantages.

In: groups as they are compared, and the settings. Out: one advantage per call. Which function of
advantages.py and credit.py measures what is decided here; the formulae are there.
"""

from __future__ import annotations

from collections.abc import Sequence

from art_core.batch.advantages import Yardstick, decoupled_advantages, yardsticks
from art_core.batch.baselines import next_running
from art_core.batch.compared import Compared
from art_core.batch.credit import places, visit_yardsticks
from art_core.batch.scales import flat
from art_core.config import TrainConfig


def measured(
    groups: Sequence[Compared], config: TrainConfig, running: float
) -> list[list[list[float]]]:
    """For each group, for each candidate, one advantage per call.

    Args:
        running: the running baseline before this step.
    """
    if config.reward_parts:
        parts = [list(zip(*(one.parts for one in g.candidates), strict=True)) for g in groups]
        return [
            [[a] * len(one.calls) for a, one in zip(column, g.candidates, strict=True)]
            for column, g in zip(decoupled_advantages(parts), groups, strict=True)
        ]
    found = yardsticks(
        _rewards(groups),
        baseline=config.baseline,
        scale=config.scale_rewards,
        lengths=[[one.length for one in g.candidates] for g in groups],
        running=running,
        within=[[one.worth.variance for one in g.candidates] for g in groups],
    )
    return [_of_group(g, column, config) for g, column in zip(groups, found, strict=True)]


def _of_group(
    group: Compared, plain: Sequence[Yardstick], config: TrainConfig
) -> list[list[float]]:
    """For each candidate, one advantage per call."""
    worths = [one.worth for one in group.candidates]
    if config.call_baseline == "visit":
        sticks = visit_yardsticks(
            worths,
            [places([c.origin for c in one.calls]) for one in group.candidates],
            plain,
            leave_one_out=config.baseline == "leave_one_out",
            scaled=config.scale_rewards == "group",
        )
    else:
        sticks = [[y] * len(w.calls) for y, w in zip(plain, worths, strict=True)]
    return [
        [y.measure(r) for y, r in zip(column, w.calls, strict=True)]
        for column, w in zip(sticks, worths, strict=True)
    ]


def running_after(groups: Sequence[Compared], running: float) -> float:
    """The running baseline after this step."""
    for reward in flat(_rewards(groups)):
        running = next_running(running, reward)
    return running


def _rewards(groups: Sequence[Compared]) -> list[list[float]]:
    return [[one.worth.whole for one in group.candidates] for group in groups]
