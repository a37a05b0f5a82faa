"""Linear layers that read the same input, as one product with the adapter in its weight.

In: positions [N, i], and what comes before the product: a norm, a gate, or nothing. Out: [N, o],
with the gradients of the input and of the adapter's matrices. The weight is W + scale * B A, so
that no product of the adapter's own is needed forward, and none for the input's gradient; those of
A and B (LoRA, Hu et al. 2021, arXiv:2106.09685, eq. 3) follow from dW without computing it:
dB = scale * dy^T (x A^T), dA = scale * (dy B)^T x.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from art_core.nn.linear import product, weight_gradient


@dataclass(frozen=True, eq=False)
class Factors:
    """The adapter's matrices of one linear layer."""

    at: slice
    """The layer's outputs within the product's."""
    a: Tensor
    """[r, i], the parameter."""
    b: Tensor
    """[o, r], the parameter."""
    scale: float


@dataclass(frozen=True, eq=False)
class Product:
    """Layers side by side."""

    weight: Tensor
    """[o, i] with the adapter, columns times the norm's weight; may be packed for oneDNN."""
    bias: Tensor | None
    factors: Sequence[Factors]
    """Of the layers whose adapter learns."""
    fold: Tensor | None
    """[i] the norm's weight."""
    a: Tensor | None
    """[R, i] every A below each other, columns times the norm's weight; None if none learns."""
    b: Tensor | None
    """[o, R] every scale * B on the diagonal."""


class Before(Protocol):
    """What is done to the input first."""

    def forward(self, x: Tensor) -> Tensor:
        """What the product reads."""

    def backward(self, x: Tensor, h: Tensor, dh: Tensor) -> Tensor:
        """The gradient of x, given h = forward(x) and its gradient, which may be overwritten."""


@dataclass(frozen=True)
class Norm:
    """Root mean square norm without its weight (Zhang & Sennrich 2019, arXiv:1910.07467)."""

    epsilon: float

    def forward(self, x: Tensor) -> Tensor:
        return x * self._rate(x)

    def backward(self, x: Tensor, h: Tensor, dh: Tensor) -> Tensor:
        along = (dh * h).mean(-1, keepdim=True)
        return dh.addcmul_(h, along, value=-1.0).mul_(self._rate(x))

    def _rate(self, x: Tensor) -> Tensor:
        squares: Tensor = torch.linalg.vector_norm(x, dim=-1, keepdim=True).square_()
        return squares.div_(x.shape[-1]).add_(self.epsilon).rsqrt_()


@dataclass(frozen=True)
class Gate:
    """silu(g) * u of x = [g, u] (Shazeer 2020, arXiv:2002.05202)."""

    def forward(self, x: Tensor) -> Tensor:
        g, u = x.chunk(2, dim=-1)
        return torch.nn.functional.silu(g).mul_(u)

    def backward(self, x: Tensor, h: Tensor, dh: Tensor) -> Tensor:
        g, u = x.chunk(2, dim=-1)
        dx = torch.empty_like(x)
        dg, du = dx.chunk(2, dim=-1)
        torch.mul(dh, torch.nn.functional.silu(g), out=du)
        torch.ops.aten.silu_backward.grad_input(dh.mul_(u), g, grad_input=dg)
        return dx


@dataclass(frozen=True)
class Nothing:
    """The product reads x itself."""

    def forward(self, x: Tensor) -> Tensor:
        return x

    def backward(self, x: Tensor, h: Tensor, dh: Tensor) -> Tensor:
        return dh


def apply(what: Product, x: Tensor, before: Before, *, add: Tensor | None = None) -> Tensor:
    """[N, i] -> [N, o], plus `add`."""
    if not torch.is_grad_enabled():
        return _forward(what, x, before, add)
    leaves = [leaf for part in what.factors for leaf in (part.a, part.b)]
    out: Tensor = _Product.apply(x, add, what, before, *leaves)  # type: ignore[no-untyped-call]  # torch's stub
    return out


def _forward(what: Product, x: Tensor, before: Before, add: Tensor | None) -> Tensor:
    out = product(before.forward(x), what.weight, what.bias)
    return out if add is None else out.add_(add)


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, add: Tensor | None, what: Product, before: Before, *leaves: Tensor
    ) -> Tensor:
        ctx.save_for_backward(x)
        ctx.what, ctx.before = what, before
        return _forward(what, x, before, add)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        what, before, (x,) = ctx.what, ctx.before, ctx.saved_tensors
        grad = grad.contiguous()
        h = before.forward(x)
        leaves = _leaf_gradients(what, h, grad)
        dx = None
        if ctx.needs_input_grad[0]:
            dx = before.backward(x, h, product(grad, what.weight.t(), None))
        return dx, grad if ctx.needs_input_grad[1] else None, None, None, *leaves


def _leaf_gradients(what: Product, h: Tensor, grad: Tensor) -> list[Tensor]:
    """Of A and B of each layer, in order."""
    if what.a is None or what.b is None:
        return []
    db = weight_gradient(product(h, what.a), grad)  # [o, R], each block to be scaled
    da = weight_gradient(h, product(grad, what.b.t()))  # [R, i]
    if what.fold is not None:
        da = da * what.fold
    found: list[Tensor] = []
    row = 0
    for part in what.factors:
        rows = slice(row, row + len(part.a))
        found += [da[rows], db[part.at, rows] * part.scale]
        row = rows.stop
    return found
