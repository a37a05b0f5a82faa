"""Which calls of a step are trained: groups -> samples, and what was left out and why.

In: groups as gathered, the model's name and step. Out: one `Sample` per trained call, each with its
advantage. What can't take part is left out with its reason; what can't be right is a typed error
that names the group and the trajectory, raised before anything changes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial

from art_core.backend import Skipped
from art_core.batch.advantages import (
    Yardstick,
    are_equal,
    decoupled_advantages,
    flat,
    next_running,
    yardsticks,
)
from art_core.batch.candidates import Candidate, NotFinite, candidate
from art_core.batch.credit import places, visit_yardsticks
from art_core.batch.fitting import Misfit
from art_core.batch.minibatches import acts_without_advantage
from art_core.batch.observations import observations, observed_sample
from art_core.batch.sample import Sample
from art_core.config import TrainConfig
from art_core.errors import GroupError, RewardError
from art_core.trajectories import Trajectory, TrajectoryGroup


@dataclass(frozen=True)
class Selection:
    """What a step trains."""

    samples: list[Sample]
    """Their weights are not set yet."""
    skipped: list[Skipped]
    groups: int
    """Groups that are trained."""
    share: float
    """Of all trajectories, those that are trained."""
    running: float = 0.0
    """The running baseline after this step."""
    misfits: Counter[Misfit] = field(default_factory=Counter)
    """Calls of the trained groups that were left out or cut, by cause."""


@dataclass(frozen=True)
class _Group:
    """A group as it is compared."""

    index: int
    candidates: list[Candidate]


def select(
    groups: Sequence[TrajectoryGroup],
    *,
    model: str,
    step: int,
    config: TrainConfig,
    running: float = 0.0,
    vocab_size: int | None = None,
    context_length: int | None = None,
) -> Selection:
    """Choose the calls of `model` and give each its advantage.

    Calls that came without tokens have been joined with the server's records before (`join`). A
    trajectory whose reward is NaN or infinite is left out; the others of its group are compared
    without it.

    Args:
        running: the running baseline before this step; see `TrainConfig.baseline`.
        vocab_size: ids that the model knows; None: they are not looked at.
        context_length: positions that the model can read; None: as many as a row has.

    Raises:
        RewardError: a reward is missing or no number.
        WrongModel: the calls of a trajectory are another model's.
        StaleCall: a call is older than `config.max_staleness` steps, or of a step to come.
        GroupError: a call has more tokens than a row may have or the model can read, and
            `config.too_long` is "error".
        NoTrainableTokens: a completed trajectory has no call whose ids are known.
            (All but the first are reasons to leave out where `config.unfit` says so.)
    """
    skipped: list[Skipped] = []
    compared: list[_Group] = []
    check = partial(
        candidate,
        model=model,
        step=step,
        config=config,
        vocab_size=vocab_size,
        context_length=context_length,
    )
    for index, group in enumerate(groups):
        found = _Group(index, list(_candidates(group, index, check, config, skipped)))
        why = _why_not(found.candidates, len(group.exceptions), config)
        if why is None:
            compared.append(found)
        else:
            skipped.append(Skipped(index, why, len(found.candidates)))
    after = _running_after(compared, running)
    advantages = _advantages(compared, config, running)
    if not _teaches(advantages, config):
        why = "all advantages of the step are 0: nothing to learn from"
        skipped += [Skipped(found.index, why, len(found.candidates)) for found in compared]
        compared, advantages = [], []
    samples: list[Sample] = []
    trained = trajectories = 0
    for found, columns in zip(compared, advantages, strict=True):
        speak = [
            (one, column)
            for one, column in zip(found.candidates, columns, strict=True)
            if one.why_silent is None
        ]
        for trajectory, (one, column) in enumerate(speak, start=trajectories):
            samples += _samples(one, column, len(samples), trajectory, step, config)
        trajectories += len(speak)
        trained += bool(speak)
        skipped += [
            Skipped(found.index, f"trajectory {one.index}: {one.why_silent}", 1, one.index)
            for one in found.candidates
            if one.why_silent is not None
        ]
    everyone = sum(len(group) for group in groups)
    share = len({sample.trajectory for sample in samples}) / everyone if everyone else 0.0
    skipped.sort(key=lambda skip: skip.group)
    misfits = Counter[Misfit]()
    for found in compared:
        for one in found.candidates:
            misfits.update(one.misfits)
    return Selection(samples, skipped, trained, share, after, misfits)


# --- what takes part -----------------------------------------------------------------------------


def _candidates(
    group: TrajectoryGroup,
    index: int,
    check: Callable[[Trajectory, int, str], Candidate],
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


# --- what it is worth ----------------------------------------------------------------------------


def _advantages(
    groups: Sequence[_Group], config: TrainConfig, running: float
) -> list[list[list[float]]]:
    """For each group, for each candidate, one advantage per call."""
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
    return [_measured(g, column, config) for g, column in zip(groups, found, strict=True)]


def _measured(group: _Group, plain: Sequence[Yardstick], config: TrainConfig) -> list[list[float]]:
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


def _samples(
    one: Candidate,
    advantages: Sequence[float],
    first: int,
    trajectory: int,
    step: int,
    config: TrainConfig,
) -> list[Sample]:
    """`first` is the index of the first of them over the step."""
    heard: Sequence[int | None] = [None] * len(one.calls)
    if config.observation_coef:
        heard = observations(one.calls)
    found: list[Sample] = []
    for call, advantage, at in zip(one.calls, advantages, heard, strict=True):
        if advantage == 0.0 and config.zero_advantages == "leave_out":
            continue
        index = first + len(found)
        if at is not None:
            found.append(observed_sample(call, at, index=index, trajectory=trajectory))
            index += 1
        found.append(
            Sample.of(
                call,
                advantage=advantage,
                weight=0.0,
                index=index,
                trajectory=trajectory,
                staleness=0 if call.step is None else step - call.step,
            )
        )
    return found


def _teaches(advantages: Sequence[Sequence[Sequence[float]]], config: TrainConfig) -> bool:
    """True if the step has a gradient: an update without one would drift on its momentum."""
    if config.equal_groups == "keep" and acts_without_advantage(config):
        return True
    found = [a for columns in advantages for column in columns for a in column]
    return not found or any(a != 0.0 for a in found)


def _running_after(groups: Sequence[_Group], running: float) -> float:
    for reward in flat(_rewards(groups)):
        running = next_running(running, reward)
    return running


def _rewards(groups: Sequence[_Group]) -> list[list[float]]:
    return [[one.worth.whole for one in group.candidates] for group in groups]
