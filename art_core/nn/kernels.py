"""GPU kernels for what lies between a layer's products: rotary embeddings, the gated activation.

In: tensors on a GPU in half precision. Out: the same as transformers' own small operations, but
in float32 and rounded once, in one pass over memory forward and one backward. Importing it needs
Triton, which comes with torch for GPUs.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

_BLOCK = 2048
"""Elements that one program of an elementwise kernel computes."""


@triton.jit  # type: ignore[untyped-decorator]  # Triton ships no types
def _rotate_kernel(  # type: ignore[no-untyped-def]  # Triton reads annotations itself
    x, cos, sin, out, heads, half, sign, group: tl.constexpr, width_half: tl.constexpr
):
    n = tl.program_id(0)
    h = tl.program_id(1) * group + tl.arange(0, group)
    d = tl.arange(0, width_half)
    angle = n * 2 * half + d
    c = tl.load(cos + angle, mask=d < half, other=0.0).to(tl.float32)[None, :]
    s = tl.load(sin + angle, mask=d < half, other=0.0).to(tl.float32)[None, :] * sign
    at = (n * heads + h)[:, None] * 2 * half + d[None, :]
    inside = (h < heads)[:, None] & (d < half)[None, :]
    a = tl.load(x + at, mask=inside, other=0.0).to(tl.float32)
    b = tl.load(x + at + half, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + at, (a * c - b * s).to(out.dtype.element_ty), mask=inside)
    tl.store(out + at + half, (b * c + a * s).to(out.dtype.element_ty), mask=inside)


@triton.jit  # type: ignore[untyped-decorator]  # Triton ships no types
def _gate_kernel(  # type: ignore[no-untyped-def]  # Triton reads annotations itself
    gate, up, out, size, block: tl.constexpr
):
    at = tl.program_id(0).to(tl.int64) * block + tl.arange(0, block)
    g = tl.load(gate + at, mask=at < size, other=0.0).to(tl.float32)
    u = tl.load(up + at, mask=at < size, other=0.0).to(tl.float32)
    tl.store(out + at, (g * tl.sigmoid(g) * u).to(out.dtype.element_ty), mask=at < size)


@triton.jit  # type: ignore[untyped-decorator]  # Triton ships no types
def _gate_backward_kernel(  # type: ignore[no-untyped-def]  # Triton reads annotations itself
    grad, gate, up, dgate, dup, size, block: tl.constexpr
):
    at = tl.program_id(0).to(tl.int64) * block + tl.arange(0, block)
    inside = at < size
    y = tl.load(grad + at, mask=inside, other=0.0).to(tl.float32)
    g = tl.load(gate + at, mask=inside, other=0.0).to(tl.float32)
    u = tl.load(up + at, mask=inside, other=0.0).to(tl.float32)
    sigma = tl.sigmoid(g)
    slope = sigma * (1 + g * (1 - sigma))
    tl.store(dgate + at, (y * u * slope).to(dgate.dtype.element_ty), mask=inside)
    tl.store(dup + at, (y * g * sigma).to(dup.dtype.element_ty), mask=inside)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """x: [1, N, heads, D]; cos, sin: [1, N, D], the second half like the first. As x."""
    out: Tensor = _Rotate.apply(x, cos, sin)  # type: ignore[no-untyped-call]  # torch's stub
    return out


def gated(gate: Tensor, up: Tensor) -> Tensor:
    """silu(gate) * up."""
    out: Tensor = _Gated.apply(gate, up)  # type: ignore[no-untyped-call]  # torch's stub
    return out


def _turn(x: Tensor, cos: Tensor, sin: Tensor, sign: float) -> Tensor:
    x = x.contiguous()
    _, n, heads, width = x.shape
    out = torch.empty_like(x)
    half = width // 2
    at_once = min(8, triton.next_power_of_2(heads))
    grid = (n, triton.cdiv(heads, at_once))
    _rotate_kernel[grid](
        x, cos, sin, out, heads, half, sign, group=at_once, width_half=triton.next_power_of_2(half)
    )
    return out


class _Rotate(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        cos, sin = cos.contiguous(), sin.contiguous()
        ctx.save_for_backward(cos, sin)
        return _turn(x, cos, sin, 1.0)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        cos, sin = ctx.saved_tensors
        return _turn(grad, cos, sin, -1.0), None, None  # turned back


class _Gated(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor) -> Tensor:
        gate, up = gate.contiguous(), up.contiguous()
        ctx.save_for_backward(gate, up)
        out = torch.empty_like(gate)
        _gate_kernel[(triton.cdiv(gate.numel(), _BLOCK),)](
            gate, up, out, gate.numel(), block=_BLOCK
        )
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        gate, up = ctx.saved_tensors
        dgate, dup = torch.empty_like(gate), torch.empty_like(up)
        _gate_backward_kernel[(triton.cdiv(gate.numel(), _BLOCK),)](
            grad.contiguous(), gate, up, dgate, dup, gate.numel(), block=_BLOCK
        )
        return dgate, dup
