"""Which calls of a step are trained: groups -> samples, and what was left out and why.

In: groups as gathered, the model's name and step. Out: one `Sample` per trained call, each with its
advantage. What can't take part is left out with its reason; what can't be right is a typed error
that names the group and the trajectory, raised before anything changes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial

from art_core.backend import Skipped
from art_core.batch.candidates import Candidate, candidate
from art_core.batch.compared import Compared, compared_groups
from art_core.batch.fitting import Misfit
from art_core.batch.measured import measured, running_after
from art_core.batch.minibatches import acts_without_advantage
from art_core.batch.observations import observations, observed_sample
from art_core.batch.sample import Sample
from art_core.config import TrainConfig
from art_core.trajectories import TrajectoryGroup


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
    check = partial(
        candidate,
        model=model,
        step=step,
        config=config,
        vocab_size=vocab_size,
        context_length=context_length,
    )
    compared, skipped = compared_groups(groups, check, config)
    after = running_after(compared, running)
    advantages = measured(compared, config, running)
    if not _teaches(advantages, config):
        why = "all advantages of the step are 0: nothing to learn from"
        skipped += [Skipped(found.index, why, len(found.candidates)) for found in compared]
        compared, advantages = [], []
    skipped += [_silent(found, one) for found in compared for one in found.candidates if one.silent]
    skipped.sort(key=lambda skip: skip.group)
    samples = _samples(compared, advantages, step, config)
    everyone = sum(len(group) for group in groups)
    return Selection(
        samples,
        skipped,
        groups=sum(not all(one.silent for one in found.candidates) for found in compared),
        share=len({sample.trajectory for sample in samples}) / everyone if everyone else 0.0,
        running=after,
        misfits=sum((one.misfits for found in compared for one in found.candidates), Counter()),
    )


def _silent(group: Compared, one: Candidate) -> Skipped:
    return Skipped(group.index, f"trajectory {one.index}: {one.why_silent}", 1, one.index)


def _samples(
    groups: Sequence[Compared],
    advantages: Sequence[Sequence[Sequence[float]]],
    step: int,
    config: TrainConfig,
) -> list[Sample]:
    """Of every candidate that has something to train; their numbers count over the step."""
    samples: list[Sample] = []
    trajectory = 0
    for group, columns in zip(groups, advantages, strict=True):
        for one, column in zip(group.candidates, columns, strict=True):
            if not one.silent:
                samples += _samples_of(one, column, len(samples), trajectory, step, config)
                trajectory += 1
    return samples


def _samples_of(
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
