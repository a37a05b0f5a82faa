"""The optimizer of a run: AdamW of torch, or bitsandbytes' with moments in 8 bits.

In: the parameters and which of the two. Out: an optimizer whose learning rate, decay and betas are
set before each of its steps. What of it is kept in a checkpoint is in moments.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from importlib.util import find_spec
from typing import Literal

import torch
from torch import Tensor

from art_core.errors import ConfigError

Kind = Literal["adamw", "adamw_8bit"]
MOMENT_BYTES: dict[Kind, int] = {"adamw": 8, "adamw_8bit": 2}
"""Of both moments of a trained number."""


def make_optimizer(parameters: Sequence[Tensor], kind: Kind) -> torch.optim.Optimizer:
    """One that has not seen a gradient yet.

    Raises:
        ConfigError: 8 bits are asked for without a GPU, or without bitsandbytes.
    """
    on_gpu = parameters[0].device.type == "cuda"
    if kind == "adamw":
        return torch.optim.AdamW(parameters, lr=0.0, fused=True if on_gpu else None)
    if not on_gpu or find_spec("bitsandbytes") is None:
        raise ConfigError(
            "moments in 8 bits need a GPU and bitsandbytes",
            got="there is no GPU" if not on_gpu else "bitsandbytes is not installed",
            fix="Run: pip install 'art-langgraph[gpu]'; or set TrainerConfig(optimizer='adamw').",
        )
    from bitsandbytes.optim import AdamW8bit

    found: torch.optim.Optimizer = AdamW8bit(list(parameters), lr=0.0)
    return found
