"""Whether an engine answers with the weights that it was told to: the canary of a swap.

In: logprobs of the same tokens under the steps N-1 and N, from the trainer and from the engine.
Out: a `Verdict`. Where the trainer moved, the engine must have moved alike: the slope of its change
over the trainer's is 1 for the right adapter, 0 where N-1 goes on answering. Numpy only.
Left out: which tokens are asked about (training/canary.py), and who asks the engine.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, Protocol, TypeAlias

import numpy as np

from art_core.batch.probe import Float, Probe
from art_core.calls import Ids, Logprobs
from art_core.engine.base import AdapterRef
from art_core.errors import EngineError

LOWEST, HIGHEST = 0.5, 1.5
"""Slopes that count as the right weights; others are refuted if twice their error is out too."""
TELLING = 0.125
"""Largest standard error of a slope that is decided upon: four of them lie between 0 and 0.5."""
_LOUD = 3.0
"""Root mean squares above which a token's change weighs no more."""
_MANY = 8.0
"""Tokens that must have moved alike: a few have ratios of their own, whatever weights answer."""
_CLEAR = 0.25
"""Of the trainer's change, what must be left of it without its rounding."""
_SURE = -1e-4
"""Logprobs above count as this: of a token so sure float32 knows little."""
_ROUNDING = 1e-6
"""Log-odds; the least noise that is believed."""


Outcome: TypeAlias = Literal["proved", "inconclusive", "refuted"]


@dataclass(frozen=True)
class Verdict:
    """What a canary says."""

    outcome: Outcome
    """Inconclusive: the step moved less than the engine's noise."""
    slope: float
    """Of the engine's change over the trainer's; NaN if the trainer changed nothing."""
    error: float
    """Standard error of the slope."""
    moved: float
    """Log-odds that the trainer moved the tokens by, root of the mean square."""
    noise: float
    """Log-odds by which engine and trainer differ on step N-1, as a standard deviation."""
    tokens: int


class Scorer(Protocol):
    """What is asked of an engine."""

    async def score(self, adapter: AdapterRef | None, ids: Ids) -> Logprobs:
        """[T - 1] natural-log probabilities of ids[1:] at temperature 1."""
        ...


async def prove_swap(
    engine: Scorer, old: AdapterRef | None, new: AdapterRef, probe: Probe
) -> Verdict:
    """Ask the engine about the probe's tokens under both steps.

    Args:
        old: what `probe.before` is of; None: the base model.

    Raises:
        EngineError: `new` is answered by other weights, or the engine failed.
    """
    scored = []
    for adapter in (old, new):
        parts = [
            (await engine.score(adapter, ids))[places - 1]
            for ids, places in zip(probe.sequences, probe.tokens, strict=True)
        ]
        scored.append(np.concatenate(parts).astype(np.float64))
        if not np.isfinite(scored[-1]).all():
            raise EngineError(
                f"{adapter or 'the base model'} is answered by logprobs that are no numbers",
                got=f"{int((~np.isfinite(scored[-1])).sum())} of {len(scored[-1])}",
                expected="finite logprobs",
                fix="Look at the engine's log, and at the step's weights for NaN.",
            )
    verdict = judge(probe.before, probe.after, *scored)
    if verdict.outcome == "refuted":
        raise EngineError(
            f"{new} is not answered by its own weights",
            got=f"the engine's change is {verdict.slope:.2f} of the trainer's "
            f"(standard error {verdict.error:.2f}, {verdict.tokens} tokens)",
            expected=f"{LOWEST} to {HIGHEST}",
            fix=f"{old or 'The base model'} goes on serving; look at the engine's log.",
        )
    return verdict


def judge(before: Float, after: Float, engine_before: Float, engine_after: Float) -> Verdict:
    """Compare the engine's change with the trainer's, token by token, in log-odds.

    In them rounding is much the same for all tokens, however sure the model is of one. In bfloat16
    what the trainer calls its change is half its own rounding at times, which pulls a plain slope
    towards 0, the more so over the tokens that changed most. How much of it is rounding is seen in
    how far trainer and engine are apart on N-1: what the trainer rounded then is in both. It is
    taken off, as for any regression on noisy values (Fuller, Measurement Error Models, 1987). The
    error comes from what the line leaves over, or from that distance, whichever is more: an engine
    that goes on with N-1 leaves nothing over.
    """
    old, new, engine_old, engine_new = map(_log_odds, (before, after, engine_before, engine_after))
    change, told, apart = new - old, engine_new - engine_old, engine_old - old
    moved, noise = _rms(change), float(np.std(apart)) if len(apart) else 0.0
    weight = np.clip(change, -_LOUD * moved, _LOUD * moved)
    parts = weight * change
    whole = float(parts.sum())
    power = whole - 2 * max(0.0, float(weight @ apart))
    if power <= _CLEAR * whole or whole**2 < _MANY * float(parts @ parts):
        return Verdict("inconclusive", float("nan"), float("inf"), moved, noise, len(change))
    slope = float(weight @ told) / power
    left = max(_rms(told - slope * change), 2**0.5 * noise, _ROUNDING)
    error = float(np.linalg.norm(weight)) * float(np.hypot(left, 2 * noise * slope)) / power
    return Verdict(_outcome(slope, error), slope, error, moved, noise, len(change))


def _outcome(slope: float, error: float) -> Outcome:
    if error > TELLING:
        return "inconclusive"
    if LOWEST <= slope <= HIGHEST:
        return "proved"
    is_far = slope + 2 * error < LOWEST or slope - 2 * error > HIGHEST
    return "refuted" if is_far else "inconclusive"


def _log_odds(logprobs: Float) -> Float:
    kept = np.minimum(logprobs, _SURE)
    odds: Float = kept - np.log(-np.expm1(kept))
    return odds


def _rms(values: Float) -> float:
    return float(np.sqrt(np.mean(values**2))) if len(values) else 0.0
