"""What a reward is compared with: the zero of its yardstick. Pure functions, each with its paper.

In: the rewards of a step's groups. Out: one number per trajectory.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from art_core.algorithms import Baseline
from art_core.batch.scales import Groups, flat, mean, within_range

DECAY = 0.95
"""Of the running baseline: its share that each reward leaves."""


def means_of_the_others(rewards: Sequence[float]) -> list[float]:
    """For each reward the mean of the others: RLOO (arXiv:2402.14740). One alone: itself."""
    total, others = math.fsum(rewards), len(rewards) - 1
    return [within_range(rewards, (total - r) / others) if others else r for r in rewards]


def length_weighted_mean(rewards: Sequence[float], lengths: Sequence[int]) -> float:
    """sum(L r) / sum(L): OPO's baseline of least variance (arXiv:2505.23585)."""
    total = sum(lengths)
    if not total:
        return mean(rewards)
    weighted = math.fsum(r * n for r, n in zip(rewards, lengths, strict=True))
    return within_range(rewards, weighted / total)


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


def zeros_of(
    groups: Groups, baseline: Baseline, lengths: Sequence[Sequence[int]], running: float
) -> list[list[float]]:
    """One per trajectory; see `yardsticks`."""
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
