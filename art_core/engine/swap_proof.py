"""Whether an engine answers with the weights that it was told to: the canary of a swap.

In: logprobs of the same tokens under the steps N-1 and N, from the trainer and from the engine.
Out: a `Verdict`. Where the trainer moved most, the engine must have moved alike: the slope of its
change over the trainer's is 1 for the right adapter, 0 where N-1 goes on answering. Numpy only.
Left out: which tokens are asked about (training/canary.py), and who asks the engine.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, Protocol

import numpy as np

from art_core.batch.probe import Float, Probe
from art_core.calls import Ids, Logprobs
from art_core.engine.base import AdapterRef
from art_core.errors import EngineError

LOWEST, HIGHEST = 0.5, 1.5
"""Slopes that count as the right weights."""
TELLING = 0.125
"""Largest standard error of a slope that is decided upon: four of them lie between 0 and 0.5."""
TOKENS = 64
"""Tokens that are looked at: those that the trainer moved most."""
_ROUNDING = 1e-6
"""Nats; the least noise that is believed."""


@dataclass(frozen=True)
class Verdict:
    """What a canary says."""

    outcome: Literal["proved", "inconclusive", "refuted"]
    """Inconclusive: the step moved less than the engine's noise."""
    slope: float
    """Of the engine's change over the trainer's; NaN if the trainer changed nothing."""
    error: float
    """Standard error of the slope."""
    moved: float
    """Nats that the trainer moved the tokens by, root of the mean square."""
    noise: float
    """Nats by which engine and trainer differ on step N-1, as a standard deviation."""
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
    """Compare the engine's change with the trainer's, over the tokens that the trainer moved most.

    The slope is that of a line through the origin. Its error comes from what the line leaves over,
    or from how far trainer and engine are apart on N-1 anyway, whichever is more: an engine that
    goes on with N-1 leaves nothing over.
    """
    change = after - before
    kept = np.argsort(-np.abs(change))[:TOKENS]
    change, told = change[kept], (engine_after - engine_before)[kept]
    noise = float(np.std(engine_before[kept] - before[kept])) if len(kept) else 0.0
    power = float(change @ change)
    moved = float(np.sqrt(power / max(len(kept), 1)))
    if power == 0.0:
        return Verdict("inconclusive", float("nan"), float("inf"), moved, noise, len(kept))
    slope = float(change @ told) / power
    left = float(np.sqrt(np.sum((told - slope * change) ** 2) / max(len(kept) - 1, 1)))
    error = max(left, noise, _ROUNDING) / power**0.5
    if error > TELLING:
        return Verdict("inconclusive", slope, error, moved, noise, len(kept))
    is_right = LOWEST <= slope <= HIGHEST
    return Verdict("proved" if is_right else "refuted", slope, error, moved, noise, len(kept))
