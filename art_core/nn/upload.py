"""Columns of a row on their way to the model's device.

In: numpy arrays. Out: tensors there. On a GPU they go through pinned memory, so that the processor
does not wait for work that the GPU has yet to do.
"""

from __future__ import annotations

from typing import Any

import numpy.typing as npt
import torch
from torch import Tensor


def upload(column: npt.NDArray[Any], device: torch.device) -> Tensor:
    """On a CPU it shares the array's memory."""
    found = torch.from_numpy(column)
    if device.type != "cuda":
        return found.to(device)
    return found.pin_memory().to(device, non_blocking=True)
