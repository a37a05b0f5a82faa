"""How big a difference of rewards is: the unit of a yardstick. Pure functions, each with its paper.

In: the rewards of a step's groups, and what they are compared with. Out: one number per group. The
statistics that the other files of advantages share are here too.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TypeAlias

from art_core.algorithms import Scale
from art_core.errors import RewardError

Groups: TypeAlias = Sequence[Sequence[float]]
"""Finite numbers, of the trajectories of each group."""

EPS = 1e-6
"""Added to a group's std."""
SAMPLE_EPS = 1e-4
"""Added to a group's sample std, as TRL does."""
BATCH_EPS = 1e-8
"""Added to the std of a whole step, which is never as near to 0 as a group's."""


def mean(rewards: Sequence[float]) -> float:
    """The mean: of a group, GRPO (arXiv:2402.03300), or of a step, REINFORCE++ (2501.03262).

    Of equal numbers it is that number to the bit, or rounding would be an advantage.
    """
    return within_range(rewards, math.fsum(rewards) / len(rewards)) if rewards else 0.0


def within_range(numbers: Sequence[float], middle: float) -> float:
    """`middle` without the rounding that has it beyond all of them."""
    return min(max(middle, min(numbers)), max(numbers))


def std(values: Sequence[float]) -> float:
    """Population standard deviation."""
    middle = mean(values)
    return math.sqrt(mean([(v - middle) * (v - middle) for v in values]))


def sample_std(values: Sequence[float]) -> float:
    """With n - 1; 0 for a single value, whose spread is unknown."""
    return std(values) * math.sqrt(len(values) / (len(values) - 1)) if len(values) > 1 else 0.0


def success_rate(rewards: Sequence[float]) -> float:
    """The mean as unit: MaxRL (arXiv:2602.02710). 1 where nothing was earned.

    Raises:
        RewardError: a reward is negative, and so would turn the others' advantages around.
    """
    if min(rewards, default=0.0) < 0:
        raise RewardError(
            "a reward measured by its group's mean",
            got=min(rewards),
            expected="0 or more",
            fix='Shift the rewards, or set TrainConfig(scale_rewards="group").',
        )
    return mean(rewards) or 1.0


def units_of(groups: Groups, zeros: Groups, scale: Scale, within: Groups) -> list[float]:
    """One per group; see `yardsticks`."""
    match scale:
        case "none":
            return [1.0] * len(groups)
        case "group":  # the groups' own zero is their mean, so that this is their std
            stds = [std(rewards) for rewards in groups]
            return [max(s, _inner_std(w)) + EPS for s, w in zip(stds, within, strict=True)]
        case "group_sample":
            stds = [sample_std(rewards) for rewards in groups]
            return [max(s, _inner_std(w)) + SAMPLE_EPS for s, w in zip(stds, within, strict=True)]
        case "mean":
            return [success_rate(rewards) for rewards in groups]
        case "batch":
            return [_batch_std(flat(groups), flat(within))] * len(groups)
        case "batch_centred":
            centred = [r - z for r, z in zip(flat(groups), flat(zeros), strict=True)]
            return [_batch_std(centred, flat(within))] * len(groups)


def _inner_std(within: Sequence[float]) -> float:
    return math.sqrt(mean(within))


def _batch_std(values: Sequence[float], within: Sequence[float]) -> float:
    """1 where nothing varies: a running mean may still differ from what all earned."""
    if are_equal(values) and not any(within):
        return 1.0
    return max(std(values), _inner_std(within)) + BATCH_EPS


def flat(groups: Groups) -> list[float]:
    """The numbers of all groups in one list."""
    return [number for group in groups for number in group]


def are_equal(rewards: Sequence[float]) -> bool:
    """True if a group has nothing to compare: fewer than two rewards, or all the same.

    DAPO's dynamic sampling (arXiv:2503.14476) drops such a group and draws another.
    """
    return len(rewards) < 2 or max(rewards) - min(rewards) <= 1e-12 * max(1.0, abs(max(rewards)))
