"""What of one trajectory can be trained: its reward and its calls, checked.

In: a trajectory, the model being trained, its step. Out: a `Candidate`; or a `GroupError` that
names what is wrong; or `NotFinite`, for rewards that are a number and yet none.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from art_core.batch.credit import Worth, earned, worth
from art_core.batch.fitting import Fitted, Misfit, fit
from art_core.calls import ModelCall
from art_core.config import TrainConfig
from art_core.errors import NoTrainableTokens, RewardError, StaleCall, WrongModel
from art_core.trajectories import Trajectory, number_of

_LARGEST = 1e100
"""A reward whose square, over many, is still a float."""


class NotFinite(Exception):
    """A reward is NaN or infinite: the judge failed, not the policy and not the user."""


@dataclass(frozen=True)
class Candidate:
    """A trajectory that takes part in its group's comparison."""

    index: int
    """In its group."""
    calls: list[ModelCall]
    """To be trained; none if `why_silent`."""
    why_silent: str | None
    """Why it has no call to train, although its reward counts."""
    worth: Worth
    parts: tuple[float, ...]
    """Values of `TrainConfig.reward_parts`."""
    length: int
    """Tokens that the model sampled in it."""
    misfits: Counter[Misfit]
    """Its calls that were left out or cut, by cause."""

    @property
    def silent(self) -> bool:
        """It has no call to train."""
        return self.why_silent is not None


def candidate(
    trajectory: Trajectory,
    index: int,
    where: str,
    *,
    model: str,
    step: int,
    config: TrainConfig,
    vocab_size: int | None = None,
    context_length: int | None = None,
) -> Candidate:
    """Check a trajectory.

    Raises:
        RewardError, WrongModel, StaleCall, GroupError, NoTrainableTokens: see `select`.
        NotFinite: it has to be left out.
    """
    reward = _finite(trajectory.reward, "reward", where)
    parts = tuple(
        _finite(trajectory.metrics.get(name), f"metrics[{name!r}]", where)
        for name in config.reward_parts
    )
    calls = _calls(trajectory, model, where)
    length = sum(len(c.sampled_ids) for c in calls if c.sampled_ids is not None)
    if config.overlong_limit is not None:
        limit, buffer = config.overlong_limit, config.overlong_buffer
        reward += overlong_penalty(length, limit=limit, buffer=buffer)
    whole = [c for c in calls if not (config.mask_truncated and c.finish_reason == "length")]
    fitted = fit(whole, config, vocab_size=vocab_size, context_length=context_length, where=where)
    kept = fitted.calls
    for call in kept:
        _check_age(call, step, config.max_staleness, where)
    why_silent = None if kept else _why_silent(trajectory, calls, fitted)
    own = [
        None if c.reward is None else _finite(c.reward, "reward of a call", where)
        for c in trajectory.calls
    ]
    by_call = dict(
        zip((c.key for c in trajectory.calls), earned(own, config.call_rewards), strict=True)
    )
    value = worth(reward, [by_call[c.key] for c in kept])
    return Candidate(index, kept, why_silent, value, parts, length, fitted.misfits)


def overlong_penalty(length: int, *, limit: int, buffer: int) -> float:
    """DAPO's soft punishment (arXiv:2503.14476, section 3.4; there 20,480 and 4,096 tokens).

    0 up to limit - buffer, then falling to -1 at `limit`, -1 beyond.
    """
    if length > limit:
        return -1.0
    return min(0.0, (limit - buffer - length) / buffer)


def _finite(reward: Any, what: str, where: str) -> float:
    """`reward`, whatever the user assigned, as a float that can be squared and summed up."""
    value = number_of(reward)
    if value is None:
        raise RewardError(
            f"{what} of {where}",
            got=reward,
            expected="a finite number",
            fix="Set traj.reward before training, or leave the trajectory out of its group.",
        )
    if not math.isfinite(value):
        raise NotFinite(f"its {what} is {value}")
    if abs(value) > _LARGEST:
        raise NotFinite(f"its {what}, {value:g}, is too large to be compared")
    return value


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
    if call.step is None:
        return
    if call.step > step:
        raise StaleCall(
            f"a call of {where} was answered by step {call.step}, which comes after step {step}",
            expected=f"a step up to {step}",
            fix="Gather anew: it is of a run that was taken back.",
        )
    if step - call.step > allowed:
        raise StaleCall(
            f"a call of {where} was answered by step {call.step}, {step - call.step} steps ago",
            expected=f"at most max_staleness={allowed} steps behind step {step}",
            fix="Gather anew, or raise TrainConfig(max_staleness=...).",
        )
