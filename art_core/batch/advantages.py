"""From rewards to advantages: what a reward is measured against, and in which unit.

In: the rewards of a step's groups, plain numbers. Out: a `Yardstick` per trajectory, whose
`measure(reward)` is the advantage. Each zero and each unit is a function of its own; the
algorithms of the literature are pairs of them. Left out: rewards of single calls (credit.py), and
how tokens share in the loss (weights.py).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

from art_core.algorithms import Baseline, Scale
from art_core.errors import RewardError

Groups: TypeAlias = Sequence[Sequence[float]]

EPS = 1e-6
"""Added to a group's std."""
SAMPLE_EPS = 1e-4
"""Added to a group's sample std, as TRL does."""
BATCH_EPS = 1e-8
"""Added to the std of a whole step, which is never as near to 0 as a group's."""
DECAY = 0.95
"""Of the running baseline: its share that each reward leaves."""


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

    baseline, scale: which function below gives the zero and which the unit. As the papers pair
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
    zeros = _zeros(groups, baseline, lengths, running)
    units = _units(groups, zeros, scale, within or [[0.0] * len(rewards) for rewards in groups])
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


# --- zeros: what a reward is compared with -------------------------------------------------------


def mean(rewards: Sequence[float]) -> float:
    """The mean: of a group, GRPO (arXiv:2402.03300), or of a step, REINFORCE++ (2501.03262).

    Of equal numbers it is that number to the bit, or rounding would be an advantage.
    """
    return _between(rewards, math.fsum(rewards) / len(rewards)) if rewards else 0.0


def _between(numbers: Sequence[float], middle: float) -> float:
    """`middle` without the rounding that has it beyond all of them."""
    return min(max(middle, min(numbers)), max(numbers))


def means_of_the_others(rewards: Sequence[float]) -> list[float]:
    """For each reward the mean of the others: RLOO (arXiv:2402.14740). One alone: itself."""
    total, others = math.fsum(rewards), len(rewards) - 1
    return [_between(rewards, (total - r) / others) if others else r for r in rewards]


def length_weighted_mean(rewards: Sequence[float], lengths: Sequence[int]) -> float:
    """sum(L r) / sum(L): OPO's baseline of least variance (arXiv:2505.23585)."""
    total = sum(lengths)
    if not total:
        return mean(rewards)
    weighted = math.fsum(r * n for r, n in zip(rewards, lengths, strict=True))
    return _between(rewards, weighted / total)


def running_means(groups: Groups, start: float) -> list[list[float]]:
    """b before each reward, and then b <- .95 b + .05 r: SPIRAL's RAE (arXiv:2506.24119)."""
    found: list[list[float]] = []
    for rewards in groups:
        found.append([])
        for reward in rewards:
            found[-1].append(start)
            start = next_running(start, reward)
    return found


def next_running(baseline: float, reward: float) -> float:
    """The running baseline after one more reward; see `running_means`."""
    return DECAY * baseline + (1.0 - DECAY) * reward


def _zeros(
    groups: Groups, baseline: Baseline, lengths: Sequence[Sequence[int]], running: float
) -> list[list[float]]:
    """One per trajectory."""
    match baseline:
        case "group":
            return [[mean(rewards)] * len(rewards) for rewards in groups]
        case "leave_one_out":
            return [means_of_the_others(rewards) for rewards in groups]
        case "length":
            return [
                [length_weighted_mean(rewards, n)] * len(rewards)
                for rewards, n in zip(groups, lengths, strict=True)
            ]
        case "batch":
            return [[mean(flat(groups))] * len(rewards) for rewards in groups]
        case "running":
            return running_means(groups, running)


# --- units: how big a difference is --------------------------------------------------------------


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


def _units(groups: Groups, zeros: Groups, scale: Scale, within: Groups) -> list[float]:
    """One per group."""
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


# --- rewards before they are compared ------------------------------------------------------------


def are_equal(rewards: Sequence[float]) -> bool:
    """True if a group has nothing to compare: fewer than two rewards, or all the same.

    DAPO's dynamic sampling (arXiv:2503.14476) drops such a group and draws another.
    """
    return len(rewards) < 2 or max(rewards) - min(rewards) <= 1e-12 * max(1.0, abs(max(rewards)))


def overlong_penalty(length: int, *, limit: int, buffer: int) -> float:
    """DAPO's soft punishment (arXiv:2503.14476, section 3.4; there 20,480 and 4,096 tokens).

    0 up to limit - buffer, then falling to -1 at `limit`, -1 beyond.
    """
    if length > limit:
        return -1.0
    return min(0.0, (limit - buffer - length) / buffer)
