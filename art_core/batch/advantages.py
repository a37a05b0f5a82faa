"""From rewards to advantages: what a reward is measured against, and in which unit.

In: the rewards of a step's groups, plain numbers. Out: a `Yardstick` per trajectory, whose
`measure(reward)` is the advantage. Each zero (baselines.py) and each unit (scales.py) is a function
of its own; the algorithms of the literature are pairs of them. Left out: rewards of single calls
(credit.py), and how tokens share in the loss (weights.py).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from art_core.algorithms import Baseline, Scale
from art_core.batch.baselines import zeros_of
from art_core.batch.scales import BATCH_EPS, Groups, are_equal, flat, mean, std, units_of


@dataclass(frozen=True)
class Yardstick:
    """What a reward is measured with."""

    zero: float
    """A reward of this much is neither good nor bad."""
    unit: float = 1.0

    def measure(self, reward: float) -> float:
        """The advantage of a trajectory with this reward."""
        return (reward - self.zero) / self.unit


def yardsticks(
    groups: Groups,
    *,
    baseline: Baseline = "group",
    scale: Scale = "none",
    lengths: Sequence[Sequence[int]] = (),
    running: float = 0.0,
    within: Groups | None = None,
) -> list[list[Yardstick]]:
    """One per trajectory, in groups like the rewards.

    baseline, scale: which function gives the zero and which the unit. As the papers pair
    them: GRPO is "group" and "group" (TRL: "group_sample"), Dr. GRPO "group" and "none", RLOO
    "leave_one_out" and "none", MaxRL "group" and "mean", REINFORCE++ "batch" and "batch",
    REINFORCE++-baseline "group" and "batch_centred", Lite PPO "group" and "batch", OPO "length" and
    "none", RAE "running" and "none".

    Args:
        groups: finite rewards.
        lengths: sampled tokens of each trajectory; needed by "length".
        running: the running baseline before this step; needed by "running".
        within: for each trajectory the variance of what its calls are worth, in groups like the
            rewards; None: its calls are all worth its reward. A unit that is a std is no less than
            the std within trajectories: where they are equal and only their calls differ, the
            former is 0.

    Raises:
        RewardError: "mean" is given a negative reward.
    """
    zeros = zeros_of(groups, baseline, lengths, running)
    units = units_of(groups, zeros, scale, within or [[0.0] * len(rewards) for rewards in groups])
    return [
        [Yardstick(zero, unit) for zero in column]
        for column, unit in zip(zeros, units, strict=True)
    ]


def advantages(
    groups: Groups,
    *,
    baseline: Baseline = "group",
    scale: Scale = "none",
    lengths: Sequence[Sequence[int]] = (),
    running: float = 0.0,
) -> list[list[float]]:
    """The rewards measured; see `yardsticks`."""
    found = yardsticks(groups, baseline=baseline, scale=scale, lengths=lengths, running=running)
    return [
        [yardstick.measure(r) for yardstick, r in zip(column, rewards, strict=True)]
        for column, rewards in zip(found, groups, strict=True)
    ]


# --- several rewards -----------------------------------------------------------------------------


def decoupled_advantages(groups: Sequence[Sequence[Sequence[float]]]) -> list[list[float]]:
    """GDPO (arXiv:2601.05242): each part of the reward is normalised within its group by itself,
    and the sum of them over the step. So a part that varies little is not drowned by another.

    Args:
        groups: for each group, for each part, the values of its trajectories.
    """
    sums = [[math.fsum(of_one) for of_one in zip(*map(_z, parts), strict=True)] for parts in groups]
    everything = flat(sums)
    if are_equal(everything):
        return [[0.0] * len(column) for column in sums]
    yardstick = Yardstick(mean(everything), std(everything) + BATCH_EPS)
    return [[yardstick.measure(value) for value in column] for column in sums]


def _z(values: Sequence[float]) -> list[float]:
    if are_equal(values):
        return [0.0] * len(values)
    yardstick = Yardstick(mean(values), std(values) + BATCH_EPS)
    return [yardstick.measure(value) for value in values]
