"""Linear layers on CPU through oneDNN, which torch's own float32 path does not use.

In: a model on CPU in float32. Out: the same model, the same weights, each `nn.Linear` replaced by
one that calls oneDNN in both directions. Results differ by float noise only. Measured on a 2-core
AVX-512 AMD machine at 576 x 1536 and 2048 rows: 426 against 207 GFLOP/s; the gradient of a LoRA
matrix of rank 8 took 14 ms the usual way, as much as the frozen layer it stands beside.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

_LARGE = 128 * 128
"""Numbers of a product from which on oneDNN is faster than torch's batch of small ones."""


class OneDnnLinear(nn.Linear):
    """`nn.Linear` by oneDNN."""

    def forward(self, input: Tensor) -> Tensor:
        out: Tensor = _Linear.apply(input, self.weight, self.bias)  # type: ignore[no-untyped-call]  # torch's stub
        return out


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(x if weight.requires_grad else None, weight)
        return product(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        x, weight = ctx.saved_tensors
        needs_x, needs_weight, needs_bias = ctx.needs_input_grad
        return (
            product(grad, weight.t()) if needs_x else None,
            weight_gradient(x, grad) if needs_weight else None,
            grad.reshape(-1, grad.shape[-1]).sum(0) if needs_bias else None,
        )


def weight_gradient(x: Tensor, grad: Tensor) -> Tensor:
    """[..., i], [..., o] -> [o, i], with the longer side as the product's columns."""
    x, grad = x.reshape(-1, x.shape[-1]), grad.reshape(-1, grad.shape[-1])
    if grad.shape[1] <= x.shape[1]:
        return product(grad.t(), x.t())
    return product(x.t(), grad.t()).t()


def product(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x [..., i], weight [o, i], bias [o] -> [..., o]; by oneDNN where it can be."""
    if not _fits(x):
        return nn.functional.linear(x, weight, bias)
    flat = x.reshape(-1, x.shape[-1])
    out: Tensor = torch.ops.mkldnn._linear_pointwise(flat, weight, bias, "none", [], "")
    return out.view(*x.shape[:-1], weight.shape[0])


def products(x: Tensor, weight: Tensor) -> Tensor:
    """x [n, p, i], weight [n, o, i] -> [n, p, o]: n products that have nothing in common."""
    if not _fits(x) or x.shape[1] * weight.shape[1] < _LARGE:
        return torch.bmm(x, weight.transpose(1, 2))
    return torch.stack([product(a, b) for a, b in zip(x, weight, strict=True)])


def packed(weight: Tensor, positions: int) -> Tensor:
    """A copy of weight [o, i] in the order in which oneDNN reads it for that many positions.

    The products are the same bits, and at 48 positions a quarter faster: else each call has to
    bring the weight into that order. It can't be transposed, so it serves forward only.
    """
    if not _fits(weight) or not hasattr(torch.ops.mkldnn, "_reorder_linear_weight"):
        return weight
    found: Tensor = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), positions)
    return found


def _fits(x: Tensor) -> bool:
    return (
        x.device.type == "cpu"
        and x.dtype == torch.float32
        and torch.backends.mkldnn.is_available()
        and hasattr(torch.ops.mkldnn, "_linear_pointwise")
    )


def use_onednn(model: nn.Module) -> bool:
    """Replace the linear layers of a float32 CPU model in place; False where it can't be."""
    if not _fits(next(model.parameters())):
        return False
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if type(child) is nn.Linear:
                swapped = OneDnnLinear.__new__(OneDnnLinear)
                swapped.__dict__ = child.__dict__  # weights, hooks and settings stay the same
                setattr(parent, name, swapped)
    return True


def input_gradient(layer: nn.Linear, grad: Tensor) -> Tensor:
    """grad [..., o] of the layer's output -> [..., i] of its input, as its own backward pass."""
    if isinstance(layer, OneDnnLinear):
        return product(grad, layer.weight.t(), None)
    return grad @ layer.weight
