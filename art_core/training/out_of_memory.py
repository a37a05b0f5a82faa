"""When memory runs out in a step: how it is known, what is tried next, and what is said in the end.

In: an error of torch or Python, and the rows of the step. Out: a plain record that holds no tensor;
an exception would hold all that its frames held, and the next try would find memory as full.
"""

from __future__ import annotations

import gc
from dataclasses import dataclass

import torch

from art_core.config import LEAST_ROW
from art_core.errors import TrainingError

_SIGNS = (
    "DefaultCPUAllocator",
    "CUBLAS_STATUS_ALLOC_FAILED",
    "bad_alloc",
    "CUDA out of memory",
    "could not create a primitive",
    "could not create a memory",
)
"""In the text of errors that have no class of their own: torch's on a processor, cuBLAS', C++'s,
those of a compiled kernel, and oneDNN's, which says no more than that."""


@dataclass(frozen=True)
class OutOfMemory:
    """A try that did not fit."""

    reason: str
    row: int
    """Positions of the row under way."""
    fitted: int
    """Positions of the longest row that did fit; 0 if none did."""
    longest_row: int
    longest_call: int
    """Positions of the longest call, which can't be parted."""
    settings: str
    """The class that the step's settings have."""

    @property
    def smaller(self) -> int | None:
        """Row size for the next try: half. None: the rows hold one call each already."""
        size = max(self.longest_row // 2, self.longest_call)
        return size if size < self.longest_row else None

    def __str__(self) -> str:
        return f"memory ran out at a row of {self.row} tokens ({self.reason})"

    def error(self) -> TrainingError:
        """What to raise when nothing is left to try."""
        fits = self.fitted or self.row // 2
        if fits >= LEAST_ROW:
            advice = f"Set {self.settings}(max_tokens_per_row={fits}), and keep calls as short"
        else:
            advice = "Take a smaller base model or a device with more memory, or keep calls shorter"
        return TrainingError(
            str(self),
            fix=f"The adapter is unchanged. {advice}: the longest has {self.longest_call} tokens.",
        )


def is_out_of_memory(error: BaseException) -> bool:
    """True if memory is what an allocation lacked."""
    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return True
    text = str(error)
    return any(sign in text for sign in _SIGNS)


def free() -> None:
    """Give back what a failed try left."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
