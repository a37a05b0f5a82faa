"""The importance ratio exp(n - o), held where floats can compute with it.

In: logprobs [E] of two policies. Out: the ratio, at most e^20; and which tokens are beyond that. A
sampler that says it found such a token this unlikely (2e-9) did not sample it by that: the number
is broken. In float32 the ratio itself would be infinite from e^89 on, and the norm of a gradient
from half of that.
"""

from __future__ import annotations

import torch
from torch import Tensor

LARGEST = 20.0
"""Nats."""


def ratio(new: Tensor, old: Tensor) -> Tensor:
    """exp(n - o), and e^20 with a gradient of 0 where it would be more."""
    return torch.exp(torch.clamp(new - old, max=LARGEST))


def is_beyond(new: Tensor, old: Tensor) -> Tensor:
    """[E] bool: the ratio is above e^20."""
    return (new - old).detach() > LARGEST
