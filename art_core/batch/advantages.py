"""From rewards to advantages, and from calls to loss weights. Pure functions of plain numbers.

In: the rewards of a group; which call and trajectory each sampled token belongs to. Out: one
advantage per trajectory, one weight per call.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from typing import Literal

EPS = 1e-6


def group_advantages(rewards: Sequence[float], *, scale: Literal["none", "group"]) -> list[float]:
    """Reward minus the group's mean; "group" also divides by the population std.

    "none" is Dr. GRPO (Liu et al. 2025, arXiv:2503.20783), "group" is GRPO (Shao et al. 2024,
    arXiv:2402.03300, section 4.1.2) with eps 1e-6. Rewards [1, 0, 0, 1] give +-0.5 and +-0.999998.

    Args:
        rewards: finite numbers, one per trajectory.
    """
    if not rewards:
        return []
    mean = math.fsum(rewards) / len(rewards)
    centred = [r - mean for r in rewards]
    if scale == "none":
        return centred
    std = math.sqrt(math.fsum(c * c for c in centred) / len(rewards))
    return [c / (std + EPS) for c in centred]


def are_equal(rewards: Sequence[float]) -> bool:
    """True if a group has nothing to compare: fewer than two rewards, or all the same."""
    return len(rewards) < 2 or max(rewards) - min(rewards) <= 1e-12 * max(1.0, abs(max(rewards)))


def entry_weights(
    lengths: Sequence[int],
    trajectories: Sequence[int],
    aggregation: Literal["token", "sequence", "rollout"],
) -> list[float]:
    """The share of each entry of a call in the step's loss, over all rows; they sum to 1.

    Args:
        lengths: sampled tokens of each call.
        trajectories: which trajectory each call belongs to.
        aggregation: "token" gives every token the same share, "sequence" every call (its tokens
            share it), "rollout" every trajectory (all its calls' tokens share it).
    """
    total = sum(lengths)
    if aggregation == "token":
        return [1.0 / total for _ in lengths]
    if aggregation == "sequence":
        return [1.0 / (len(lengths) * n) for n in lengths]
    tokens: Counter[int] = Counter()
    for n, trajectory in zip(lengths, trajectories, strict=True):
        tokens[trajectory] += n
    return [1.0 / (len(tokens) * tokens[t]) for t in trajectories]
