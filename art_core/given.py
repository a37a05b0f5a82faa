"""What users hand over to be trained or logged, as lists; what is none of it is refused by name.

In: groups, trajectories, exceptions, alone or in any iterable. Out: lists of one kind, or a typed
error that says what to give.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from art_core.errors import ConfigError, GroupError
from art_core.trajectories import Trajectory, TrajectoryGroup

Loggable = Trajectory | BaseException | TrajectoryGroup


def as_groups(given: Iterable[Loggable] | Loggable) -> list[TrajectoryGroup]:
    """Groups as they are; loose trajectories and exceptions as one group.

    Raises:
        GroupError: both are mixed, or something is neither.
    """
    if isinstance(given, TrajectoryGroup):
        return [given]
    items = [given] if isinstance(given, Trajectory | BaseException) else list(given)
    groups = [item for item in items if isinstance(item, TrajectoryGroup)]
    loose = [item for item in items if isinstance(item, Trajectory | BaseException)]
    if len(groups) + len(loose) != len(items) or (groups and loose):
        raise GroupError(
            "what is logged",
            got=[type(item).__name__ for item in items],
            expected="TrajectoryGroups, or trajectories and exceptions, not mixed",
        )
    return groups if groups else [TrajectoryGroup(loose)] if loose else []


def settled(given: Iterable[TrajectoryGroup] | TrajectoryGroup) -> list[TrajectoryGroup]:
    """Groups whose rollouts are all over.

    Raises:
        GroupError: something is no group, or its rollouts were not awaited.
    """
    groups = [given] if isinstance(given, TrajectoryGroup) else list(given)
    for index, group in enumerate(groups):
        if not isinstance(group, TrajectoryGroup):
            raise GroupError(
                f"item {index} of what is trained is a {type(group).__name__}",
                got=group,
                expected="an art.TrajectoryGroup",
                fix="Give groups: rewards are compared within a group.",
            )
        if group.pending:
            raise GroupError(
                f"group {index} has {len(group.pending)} rollouts that were not awaited",
                fix="First: groups = await art.gather_trajectory_groups(groups).",
            )
    return groups


def conversations(given: Iterable[Trajectory] | Trajectory) -> list[Trajectory]:
    """Trajectories, of whatever reward.

    Raises:
        GroupError: something is no trajectory.
    """
    trajectories = [given] if isinstance(given, Trajectory) else list(given)
    for index, trajectory in enumerate(trajectories):
        if not isinstance(trajectory, Trajectory):
            raise GroupError(
                f"item {index} of what is trained is a {type(trajectory).__name__}",
                got=trajectory,
                expected="an art.Trajectory",
                fix="Give conversations: art.Trajectory(messages_and_choices=[...]).",
            )
    return trajectories


def no_dev_config(given: Mapping[str, Any] | None) -> None:
    """ART's `_config`, an experimental second place for settings, may be there and empty.

    Raises:
        ConfigError: something is set in it.
    """
    if given:
        raise ConfigError(
            "_config",
            got=given,
            expected="None: a setting lives in one place",
            fix="Set TrainSFTConfig(...) for the steps, and for adapter, sampling and engine "
            "TrainableModel(art_config=ModelConfig(...)).",
        )
