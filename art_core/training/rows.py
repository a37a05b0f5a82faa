"""The rows of an optimizer step, as the model can take them.

In: samples. Out: rows of trees where the model shares positions; else rows of one sequence each, in
which only calls that extend each other are together.
"""

from __future__ import annotations

from collections.abc import Sequence

from art_core.batch.forest import Row, Sample, plant
from art_core.batch.leaves import common_prefix
from art_core.nn.lora import LoraModel


def rows_for(model: LoraModel, samples: Sequence[Sample], max_tokens: int) -> list[Row]:
    """Lay the samples in rows of at most `max_tokens` positions.

    Raises:
        GroupError: a sample is too long for a row.
    """
    if model.shares_positions:
        return plant(samples, max_tokens)
    return [row for chain in chains(samples) for row in plant(chain, max_tokens)]


def chains(samples: Sequence[Sample]) -> list[list[Sample]]:
    """Samples of one sequence together: each extends the one before it."""
    paths = [sample.path for sample in samples]
    order = sorted(range(len(samples)), key=lambda i: paths[i].astype(">i4").tobytes())
    found: list[list[Sample]] = []
    last: int | None = None
    for i in order:
        if last is not None and common_prefix(paths[last], paths[i]) == len(paths[last]):
            found[-1].append(samples[i])
        else:
            found.append([samples[i]])
        last = i
    return found
