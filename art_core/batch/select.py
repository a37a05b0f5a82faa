"""Which calls of a step are trained: groups -> samples, and what was left out and why.

In: groups as gathered, the model's name and step. Out: one `Sample` per trained call. A group
with nothing to compare is skipped with its reason; what can't be right is a typed error that names
the group and the trajectory, raised before anything changes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from art_core.batch.advantages import are_equal, group_advantages
from art_core.batch.forest import Sample
from art_core.backend import Skipped
from art_core.calls import ModelCall
from art_core.config import TrainConfig
from art_core.errors import NoTrainableTokens, RewardError, StaleCall, WrongModel
from art_core.trajectories import Trajectory, TrajectoryGroup

Join = Callable[[Sequence[ModelCall]], Sequence[ModelCall]]
"""Adds the server's token records to calls that came without ids."""


@dataclass(frozen=True)
class Selection:
    """What a step trains."""

    samples: list[Sample]
    """Their weights are not set yet."""
    skipped: list[Skipped]
    groups: int
    """Groups that are trained."""


def select(
    groups: Sequence[TrajectoryGroup],
    *,
    model: str,
    step: int,
    config: TrainConfig,
    join: Join,
) -> Selection:
    """Choose the calls of `model` and give each its trajectory's advantage.

    Raises:
        RewardError: a reward is missing, NaN or infinite.
        WrongModel: the calls of a trajectory are another model's.
        StaleCall: a call is older than `config.max_staleness` steps.
        NoTrainableTokens: a completed trajectory has no call whose ids are known.
    """
    samples: list[Sample] = []
    skipped: list[Skipped] = []
    trajectories = 0
    trained = 0
    for index, group in enumerate(groups):
        rewards = [_reward(t, index, i) for i, t in enumerate(group)]
        reason = _why_not(group, rewards)
        if reason is not None:
            skipped.append(Skipped(index, reason, len(group)))
            continue
        trained += 1
        advantages = group_advantages(rewards, scale=config.scale_rewards)
        for i, (trajectory, advantage) in enumerate(zip(group, advantages, strict=True)):
            where = f"trajectory {i} of group {index}"
            calls = _calls(trajectory, model, join, where)
            kept = [c for c in calls if not (config.mask_truncated and c.finish_reason == "length")]
            if not kept:
                why = "its calls were all cut by their token limit" if calls else (
                    f"it ended by {trajectory.ended} before the model said anything"
                )
                skipped.append(Skipped(index, f"trajectory {i}: {why}", 1))
                continue
            for call in kept:
                _check_age(call, step, config.max_staleness, where)
                samples.append(_sample(call, advantage, len(samples), trajectories))
            trajectories += 1
    return Selection(samples, skipped, trained)


def _reward(trajectory: Trajectory, group: int, index: int) -> float:
    reward = trajectory.reward
    if reward is None or not math.isfinite(reward):
        raise RewardError(
            f"reward of trajectory {index} of group {group}",
            got=reward,
            expected="a finite number",
            fix="Set traj.reward before training, or leave the trajectory out of its group.",
        )
    return float(reward)


def _why_not(group: TrajectoryGroup, rewards: Sequence[float]) -> str | None:
    if not rewards:
        failed = len(group.exceptions)
        return f"empty group: all {failed} rollouts failed" if failed else "empty group"
    if len(rewards) == 1:
        return "one trajectory only: there is nothing to compare it with"
    if are_equal(rewards):
        return f"all {len(rewards)} rewards are equal ({rewards[0]:g}): nothing to learn from"
    return None


def _calls(trajectory: Trajectory, model: str, join: Join, where: str) -> list[ModelCall]:
    """The calls to train: those whose Choice the user kept, else all of this model's."""
    chosen = trajectory.chosen_records()
    calls: Iterable[ModelCall] = trajectory.calls
    if chosen is not None:
        calls = [c for c in calls if c.key in chosen]
    joined = [c for c in join(list(calls)) if c.trainable]
    ours = [c for c in joined if c.model == model]
    if not ours and joined:
        raise WrongModel(
            f"calls of {where}",
            got=sorted({c.model for c in joined}),
            expected=f"calls of {model!r}",
            fix="Train the model that played, or play with model=this one.",
        )
    if not ours and trajectory.ended == "completed":
        raise _no_tokens(trajectory, chosen is not None, where)
    return ours


def _no_tokens(trajectory: Trajectory, chosen: bool, where: str) -> NoTrainableTokens:
    places = sorted({str(c.origin) for c in trajectory.calls})
    if places:
        what = f"{where} has no call whose sampled tokens are known; asked by {', '.join(places)}"
        fix = "Point those nodes at ChatArt, or at an endpoint that returns token ids."
    elif chosen:
        what = f"{where} keeps choices that no captured call gave"
        fix = "Keep the Choice objects of model.openai_client() as they came."
    else:
        what = f"{where} made no call to the model; nodes that ran: {trajectory.metadata.get('nodes')}"
        fix = "Check that the graph's model is ChatArt() or model.openai_client()."
    return NoTrainableTokens(what, fix=fix)


def _check_age(call: ModelCall, step: int, allowed: int, where: str) -> None:
    if call.step is not None and step - call.step > allowed:
        raise StaleCall(
            f"a call of {where} was answered by step {call.step}, {step - call.step} steps ago",
            expected=f"at most max_staleness={allowed} steps behind step {step}",
            fix="Gather anew, or raise TrainConfig(max_staleness=...).",
        )


def _sample(call: ModelCall, advantage: float, index: int, trajectory: int) -> Sample:
    assert call.prompt_ids is not None and call.sampled_ids is not None
    assert call.logprobs is not None
    return Sample(
        prompt_ids=call.prompt_ids,
        sampled_ids=call.sampled_ids,
        logprobs=call.logprobs,
        advantage=advantage,
        weight=0.0,
        temperature=call.sampling.temperature,
        distorted=call.sampling.distorted,
        call=index,
        trajectory=trajectory,
    )
