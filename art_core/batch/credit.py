"""Rewards of single calls: what each call of a group is worth, and what it is measured with.

In: a group's rewards, its calls with rewards of their own, and the yardsticks of its trajectories.
Out: one advantage per call. The rule: a trajectory's reward counts for each of its calls, a call's
own reward for that call ("own"), or for that call and all before it in the trajectory ("to_go").
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

from art_core.algorithms import Spread
from art_core.batch.advantages import Yardstick
from art_core.batch.baselines import means_of_the_others
from art_core.batch.scales import EPS, mean, std
from art_core.calls import Origin

Place: TypeAlias = tuple[str, int]
"""Where in a graph a call was made: the node with those around it, and the n-th call there."""


@dataclass(frozen=True)
class Worth:
    """What a trajectory's calls are worth."""

    calls: tuple[float, ...]
    """Of each trained call, in the order they were made."""
    whole: float
    """Of the trajectory, to be compared with the others of its group: the mean of these."""

    @property
    def variance(self) -> float:
        """Of the calls about their mean."""
        return mean([(r - self.whole) * (r - self.whole) for r in self.calls])


def earned(own: Sequence[float | None], spread: Spread) -> list[float]:
    """What each call of a trajectory earned beside the trajectory's reward.

    Args:
        own: rewards of all its calls, also of those that are context; None where one has none.
    """
    found = [r or 0.0 for r in own]
    if spread == "to_go" and any(found):
        return [math.fsum(found[i:]) for i in range(len(found))]
    return found


def worth(reward: float, earned: Sequence[float]) -> Worth:
    """What a trajectory is worth.

    Args:
        reward: of the trajectory.
        earned: beside it, by each of the calls that are trained.
    """
    if not any(earned):  # to the bit, which a mean of equal numbers need not be
        return Worth((reward,) * len(earned), reward)
    calls = tuple(reward + r for r in earned)
    return Worth(calls, mean(calls))


def places(origins: Sequence[Origin]) -> list[Place]:
    """The place of each call of one trajectory, in the order they were made.

    Subgraphs with nodes of the same name are told apart by the nodes they hang from.
    """
    seen: Counter[str] = Counter()
    found = []
    for origin in origins:
        name = "/".join(origin.path) or str(origin)
        seen[name] += 1
        found.append((name, seen[name]))
    return found


def visit_yardsticks(
    worths: Sequence[Worth],
    where: Sequence[Sequence[Place]],
    otherwise: Sequence[Yardstick],
    *,
    leave_one_out: bool,
    scaled: bool,
) -> list[list[Yardstick]]:
    """Each call measured against the calls that the group made at the same place.

    A call that no other trajectory of the group made a call like is measured with its
    trajectory's yardstick.

    Args:
        worths, where, otherwise: one of each per trajectory of the group.
        leave_one_out: compare with the others alone, not with the mean of all.
        scaled: divide by the std of the calls at the place.
    """
    alike: dict[Place, list[float]] = defaultdict(list)
    for value, column in zip(worths, where, strict=True):
        for call, place in zip(value.calls, column, strict=True):
            alike[place].append(call)
    turn: Counter[Place] = Counter()
    found = []
    for column, plain in zip(where, otherwise, strict=True):
        found.append([plain] * len(column))
        for at, place in enumerate(column):
            values = alike[place]
            if len(values) > 1:
                zeros = (
                    means_of_the_others(values) if leave_one_out else [mean(values)] * len(values)
                )
                unit = std(values) + EPS if scaled else 1.0
                found[-1][at] = Yardstick(zeros[turn[place]], unit)
            turn[place] += 1
    return found
