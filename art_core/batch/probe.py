"""A `Probe`: tokens of a step, and what the trainer says of them before and after it.

In: made by training/canary.py. Out: what an engine is asked about (engine/swap_proof.py).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from art_core.calls import Ids

Float = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Probe:
    """Sequences with what the trainer says of some of their tokens, at temperature 1."""

    sequences: tuple[Ids, ...]
    tokens: tuple[npt.NDArray[np.int64], ...]
    """Of each sequence the places of the tokens asked about, from 1."""
    before: Float
    """[all those tokens] natural-log probabilities under step N-1."""
    after: Float
    """Under step N."""
