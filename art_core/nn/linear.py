"""Frozen linear layers on CPU through oneDNN, which torch's own float32 path does not use.

In: a model on CPU in float32. Out: the same model, the same weights, each `nn.Linear` replaced by
one that calls oneDNN in both directions. Results differ by float noise only. Measured on a 2-core
AVX-512 AMD machine at 576 x 1536 and 2048 rows: 426 against 207 GFLOP/s
(`benchmarks/embedded_engine.py` shows the effect on whole answers).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn


class FrozenLinear(nn.Linear):
    """`nn.Linear` whose weight takes no gradient."""

    def forward(self, input: Tensor) -> Tensor:
        out: Tensor = _Linear.apply(input, self.weight, self.bias)  # type: ignore[no-untyped-call]  # torch's stub
        return out


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.weight = weight
        return _product(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:  # type: ignore[override]  # torch's stub takes any number of gradients
        return _product(grad, ctx.weight.t(), None), None, None


def _product(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """x [..., i], weight [o, i] -> [..., o]."""
    flat = x.reshape(-1, x.shape[-1])
    out: Tensor = torch.ops.mkldnn._linear_pointwise(flat, weight, bias, "none", [], "")
    return out.view(*x.shape[:-1], weight.shape[0])


def use_onednn(model: nn.Module) -> bool:
    """Replace the frozen linear layers of a float32 CPU model in place; False where it can't be."""
    first = next(model.parameters())
    if (
        first.device.type != "cpu"
        or first.dtype != torch.float32
        or not torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]  # torch's stub
        or not hasattr(torch.ops.mkldnn, "_linear_pointwise")
    ):
        return False
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if type(child) is nn.Linear:
                swapped = FrozenLinear.__new__(FrozenLinear)
                swapped.__dict__ = child.__dict__  # weights, hooks and settings stay the same
                setattr(parent, name, swapped)
    return True
