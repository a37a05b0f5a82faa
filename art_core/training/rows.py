"""The rows of an optimizer step, as the model can take them.

In: samples. Out: rows of trees where the model shares positions; else rows of one sequence each, in
which only calls that extend each other are together.
"""

from __future__ import annotations

from collections.abc import Sequence

from art_core.batch.forest import Row, plant
from art_core.batch.leaves import leaves_of
from art_core.batch.sample import Sample
from art_core.nn.lora import LoraModel


def rows_for(model: LoraModel, samples: Sequence[Sample], max_tokens: int) -> list[Row]:
    """Lay the samples in rows of at most `max_tokens` positions.

    Raises:
        GroupError: a sample is too long for a row.
    """
    if model.shares_positions:
        return plant(samples, max_tokens)
    return [row for leaf in leaves_of(samples) for row in plant(leaf.samples, max_tokens)]
