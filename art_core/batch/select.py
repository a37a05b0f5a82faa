"""Which calls of a step are trained: groups -> samples, and what was left out and why.

In: groups as gathered, the model's name and step. Out: one `Sample` per trained call. A group
with nothing to compare is skipped with its reason; what can't be right is a typed error that names
the group and the trajectory, raised before anything changes.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, SupportsFloat

from art_core.backend import Skipped
from art_core.batch.advantages import are_equal, group_advantages
from art_core.batch.fitting import Fitted, Misfit, fit
from art_core.batch.forest import Sample
from art_core.calls import ModelCall
from art_core.config import TrainConfig
from art_core.errors import NoTrainableTokens, RewardError, StaleCall, WrongModel
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
    misfits: Counter[Misfit] = field(default_factory=Counter)
    """Calls that were left out or cut, by cause."""


def select(
    groups: Sequence[TrajectoryGroup],
    *,
    model: str,
    step: int,
    config: TrainConfig,
    vocab_size: int | None = None,
) -> Selection:
    """Choose the calls of `model` and give each its trajectory's advantage.

    Calls that came without tokens have been joined with the server's records before (`join`).

    Args:
        vocab_size: ids that the model knows; None: they are not looked at.

    Raises:
        RewardError: a reward is missing, NaN or infinite.
        WrongModel: the calls of a trajectory are another model's.
        StaleCall: a call is older than `config.max_staleness` steps.
        GroupError: a call has more tokens than a row may have, and `config.too_long` is "error".
        NoTrainableTokens: a completed trajectory has no call whose ids are known.
    """
    samples: list[Sample] = []
    skipped: list[Skipped] = []
    misfits: Counter[Misfit] = Counter()
    trajectories = 0
    trained = 0
    for index, group in enumerate(groups):
        rewards = [_reward(t, index, i) for i, t in enumerate(group)]
        reason = _why_not(group, rewards)
        if reason is not None:
            skipped.append(Skipped(index, reason, len(group)))
            continue
        before = trajectories
        advantages = group_advantages(rewards, scale=config.scale_rewards)
        for i, (trajectory, advantage) in enumerate(zip(group, advantages, strict=True)):
            where = f"trajectory {i} of group {index}"
            calls = _calls(trajectory, model, where)
            whole = [
                c for c in calls if not (config.mask_truncated and c.finish_reason == "length")
            ]
            fitted = fit(whole, config, vocab_size=vocab_size, where=where)
            misfits += fitted.misfits
            if not fitted.calls:
                why = _why_silent(trajectory, calls, fitted)
                skipped.append(Skipped(index, f"trajectory {i}: {why}", 1))
                continue
            for call in fitted.calls:
                _check_age(call, step, config.max_staleness, where)
                samples.append(
                    Sample.of(
                        call,
                        advantage=advantage,
                        weight=0.0,
                        index=len(samples),
                        trajectory=trajectories,
                    )
                )
            trajectories += 1
        trained += trajectories > before
    everyone = sum(len(group) for group in groups)
    share = trajectories / everyone if everyone else 0.0
    return Selection(samples, skipped, trained, share, misfits)


def _reward(trajectory: Trajectory, group: int, index: int) -> float:
    reward: Any = trajectory.reward  # whatever the user assigned
    if not isinstance(reward, SupportsFloat) or not math.isfinite(reward):
        raise RewardError(
            f"reward of trajectory {index} of group {group}",
            got=reward,
            expected="a finite number",
            fix="Set traj.reward before training, or leave the trajectory out of its group.",
        )
    return float(reward)


def _why_not(group: TrajectoryGroup, rewards: Sequence[float]) -> str | None:
    failed = f" ({len(group.exceptions)} of its rollouts failed)" if group.exceptions else ""
    if not rewards:
        return f"the group is empty{failed}"
    if len(rewards) == 1:
        return f"one trajectory only: there is nothing to compare it with{failed}"
    if are_equal(rewards):
        return f"all {len(rewards)} rewards are equal ({rewards[0]:g}): nothing to learn from"
    return None


def _why_silent(trajectory: Trajectory, calls: Sequence[ModelCall], fitted: Fitted) -> str:
    if fitted.misfits:
        causes = ", ".join(f"{number} {cause}" for cause, number in fitted.misfits.items())
        return f"no call of it fits the model: {causes}"
    if calls:
        return "its calls were all cut by their token limit"
    return f"it ended by {trajectory.ended} before the model said anything"


def _calls(trajectory: Trajectory, model: str, where: str) -> list[ModelCall]:
    """The calls to train: those whose Choice the user kept, else all of this model's."""
    chosen = trajectory.chosen_records()
    calls = trajectory.calls
    if chosen is not None:
        calls = [c for c in calls if c.key in chosen]
    whole = [c for c in calls if c.trainable]
    ours = [c for c in whole if c.model == model]
    if not ours and whole:
        raise WrongModel(
            f"calls of {where}",
            got=sorted({c.model for c in whole}),
            expected=f"calls of {model!r}",
            fix="Train the model that played, or play with model=this one.",
        )
    if not ours and trajectory.ended == "completed":
        raise _no_tokens(trajectory, calls, where)
    return ours


def _no_tokens(trajectory: Trajectory, calls: Sequence[ModelCall], where: str) -> NoTrainableTokens:
    if calls:
        places = sorted({str(c.origin) for c in calls})
        left_out = trajectory.completeness.left_out
        causes = ", ".join(f"{number} {cause}" for cause, number in left_out.items())
        what = (
            f"{where} has no call whose sampled tokens are known; asked by {', '.join(places)}; "
            f"left out: {causes}"
        )
        fix = "Point those nodes at ChatArt, or at an endpoint that returns token ids."
    elif trajectory.chosen_records():
        what = f"{where} keeps choices that no captured call gave"
        fix = "Keep the Choice objects of model.openai_client() as they came."
    else:
        nodes = (trajectory.metadata.get("graph") or {}).get("nodes")
        ran = f"; nodes that ran: {nodes}" if nodes else ""
        what = f"{where} made no call to the model{ran}"
        fix = "Check that the graph's model is ChatArt() or model.openai_client()."
    return NoTrainableTokens(what, fix=fix)


def _check_age(call: ModelCall, step: int, allowed: int, where: str) -> None:
    if call.step is not None and step - call.step > allowed:
        raise StaleCall(
            f"a call of {where} was answered by step {call.step}, {step - call.step} steps ago",
            expected=f"at most max_staleness={allowed} steps behind step {step}",
            fix="Gather anew, or raise TrainConfig(max_staleness=...).",
        )
