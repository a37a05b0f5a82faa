"""Which trajectories of a step's groups are compared with each other, and what is left out and why.

In: groups as gathered, and what checks a trajectory. Out: `Compared` groups of candidates; and each
group or trajectory that can't take part, with its reason.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from art_core.backend import Skipped
from art_core.batch.candidates import Candidate, NotFinite
from art_core.batch.scales import are_equal
from art_core.config import TrainConfig
from art_core.errors import GroupError, RewardError
from art_core.trajectories import Trajectory, TrajectoryGroup

Check: TypeAlias = Callable[[Trajectory, int, str], Candidate]
"""Given a trajectory, its index in its group and its place in words; raises as `candidate`."""


@dataclass(frozen=True)
class Compared:
    """A group as it is compared."""

    index: int
    candidates: list[Candidate]


def compared_groups(
    groups: Sequence[TrajectoryGroup], check: Check, config: TrainConfig
) -> tuple[list[Compared], list[Skipped]]:
    """The groups in which something can be compared, and what was left out.

    Raises:
        RewardError, GroupError: of `check`; but for the first, where `config.unfit` is "refuse".
    """
    skipped: list[Skipped] = []
    kept: list[Compared] = []
    for index, group in enumerate(groups):
        found = Compared(index, list(_candidates(group, index, check, config, skipped)))
        why = _why_not(found.candidates, len(group.exceptions), config)
        if why is None:
            kept.append(found)
        else:
            skipped.append(Skipped(index, why, len(found.candidates)))
    return kept, skipped


def _candidates(
    group: TrajectoryGroup,
    index: int,
    check: Check,
    config: TrainConfig,
    skipped: list[Skipped],
) -> Iterator[Candidate]:
    """The trajectories of a group that are compared; the others go to `skipped`."""
    for i, trajectory in enumerate(group):
        where = f"trajectory {i} of group {index}"
        try:
            yield check(trajectory, i, where)
        except NotFinite as error:
            skipped.append(Skipped(index, f"trajectory {i}: {error}", 1, i))
        except RewardError:
            raise
        except GroupError as error:
            if config.unfit == "refuse":
                raise
            skipped.append(Skipped(index, f"trajectory {i}: {error}", 1, i))


def _why_not(candidates: Sequence[Candidate], failures: int, config: TrainConfig) -> str | None:
    """Why a group is skipped."""
    failed = f" ({failures} of its rollouts failed)" if failures else ""
    if not candidates:
        return f"the group is empty{failed}"
    if config.equal_groups == "keep" or config.baseline in ("batch", "running"):
        return None
    if len(candidates) == 1:
        return f"one trajectory only: there is nothing to compare it with{failed}"
    if config.reward_parts:
        parts = zip(*(one.parts for one in candidates), strict=True)
        if all(are_equal(column) for column in parts):
            return f"all {len(candidates)} have equal parts of the reward: nothing to learn from"
    elif are_equal([r for one in candidates for r in one.worth.calls or (one.worth.whole,)]):
        reward = candidates[0].worth.whole
        return f"all {len(candidates)} rewards are equal ({reward:g}): nothing to learn from"
    return None
