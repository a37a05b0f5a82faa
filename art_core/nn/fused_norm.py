"""RMS norms on a GPU as one kernel: transformers' own go through float32 in six.

In: a model on a GPU in half precision. Out: the same model, each norm that is x / rms(x) * weight
computed by torch's kernel, which sums up in float32 too. Which norms are so is tried out: some
models add one to the weight.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

_AGREE = 2.0**-6
"""Relative to the largest value: the two round at different places."""


def use_fused_norms(model: torch.nn.Module) -> int:
    """Replace norms in place; returns how many."""
    first = next(model.parameters())
    if first.device.type != "cuda" or first.dtype not in (torch.bfloat16, torch.float16):
        return 0
    classes: dict[type, type] = {}
    norms = [m for m in model.modules() if type(m).__name__.endswith("RMSNorm")]
    replaced = 0
    for norm in norms:
        if _is_plain(norm):
            kind = type(norm)
            norm.__class__ = classes.setdefault(kind, _fused(kind))
            replaced += 1
    return replaced


def _fused(kind: type) -> type:
    def forward(self: Any, hidden_states: Tensor) -> Tensor:
        return torch.nn.functional.rms_norm(
            hidden_states, self.weight.shape, self.weight, epsilon(self)
        )

    return type(f"Fused{kind.__name__}", (kind,), {"forward": forward})


def epsilon(norm: Any) -> float:
    """What the norm adds to the mean of squares."""
    return float(norm.variance_epsilon if hasattr(norm, "variance_epsilon") else norm.eps)


def is_like_rms_norm(norm: Any, width: int | None = None) -> bool:
    """Whether it holds what such a norm needs, for heads of `width` if that is given."""
    weight = getattr(norm, "weight", None)
    if weight is None or weight.dim() != 1 or width not in (None, len(weight)):
        return False
    return hasattr(norm, "variance_epsilon") or hasattr(norm, "eps")


@torch.no_grad()
def _is_plain(norm: Any) -> bool:
    if not is_like_rms_norm(norm):
        return False
    weight = norm.weight
    x = torch.randn(8, len(weight), device=weight.device, dtype=weight.dtype)
    own = norm(x)
    fused = torch.nn.functional.rms_norm(x, weight.shape, weight, epsilon(norm))
    return bool((own - fused).abs().max() <= _AGREE * own.abs().max())
