"""What the trainer says of a step's own tokens before and after it: the canary of a swap.

In: the samples of a step, and the adapter. Out: a `Probe` (engine/swap_proof.py). A few short calls
are enough; they cost two forward passes more.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch

from art_core.batch.probe import Float, Probe
from art_core.batch.sample import Sample
from art_core.nn.lora import LoraModel
from art_core.training.logprobs import entry_logprobs
from art_core.training.rows import rows_for

_POSITIONS = 2048
"""Of all sequences of a canary together."""
_SEQUENCES = 8


def watch_canary(
    model: LoraModel, name: str, samples: Sequence[Sample], *, longest: int
) -> Callable[[], Probe | None]:
    """Look at the samples before a step; call what is returned after it.

    Args:
        name: the adapter that is trained.
        longest: ids that the engine can read.

    Returns:
        None later, if no sample is short enough.
    """
    chosen = _chosen(samples, longest)
    before = _logprobs(model, name, chosen)

    def after() -> Probe | None:
        if not chosen:
            return None
        return Probe(
            sequences=tuple(np.concatenate([s.prompt_ids, s.sampled_ids]) for s in chosen),
            tokens=tuple(len(s.prompt_ids) + np.arange(len(s.sampled_ids)) for s in chosen),
            before=before,
            after=_logprobs(model, name, chosen),
        )

    return after


def _chosen(samples: Sequence[Sample], longest: int) -> list[Sample]:
    """Those with the largest advantages, each read at temperature 1 and numbered anew."""
    chosen: list[Sample] = []
    left = _POSITIONS
    for sample in sorted(samples, key=lambda s: -abs(s.advantage)):
        size = sample.positions + 1
        if size < min(longest, left + 1) and len(chosen) < _SEQUENCES:
            left -= size
            chosen.append(sample._replace(temperature=1.0, call=len(chosen)))
    return chosen


def _logprobs(model: LoraModel, name: str, samples: Sequence[Sample]) -> Float:
    """Of all sampled tokens, sample by sample."""
    found: dict[int, Float] = {}
    with model.acting(name), torch.no_grad():
        for row in rows_for(model, samples, _POSITIONS):
            values: Float = (
                entry_logprobs(model, row, entropy_gradient=False)[0].double().cpu().numpy()
            )
            for call in np.unique(row.entries.call):
                at = row.entries.call == call
                order = np.argsort(row.depth[row.entries.position[at]])
                found[int(call)] = values[at][order]
    return np.concatenate([found[sample.call] for sample in samples]) if found else np.empty(0)
