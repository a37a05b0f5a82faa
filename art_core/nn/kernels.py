"""GPU kernels for what lies between a layer's products: heads with their norms and rotary
embeddings, and the gated activation.

In: what one product gave for queries, keys and values, or for gate and up. Out: the same as
transformers' own small operations give, but in float32 and rounded once, in one pass over memory
forward and one backward. Importing it needs Triton, which comes with torch for GPUs.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

_BLOCK = 1024
"""Elements that one program of the gate computes."""
_AT_ONCE = 8
"""Heads that one program turns, at most."""


@dataclass(frozen=True, eq=False)
class Heads:
    """How a product's outputs are cut into heads, and what is done to those of queries and keys."""

    queries: int
    keys: int
    """As many values stand behind them."""
    width: int
    norms: tuple[Tensor, Tensor] | None = None
    """[D] weights of the RMS norm of each query, and of each key; None: there are none."""
    epsilon: float = 0.0


@triton.jit  # type: ignore[untyped-decorator]  # Triton ships no types
def _heads_kernel(  # type: ignore[no-untyped-def]  # Triton reads annotations itself
    x, q, k, v, cos, sin, q_norm, k_norm, epsilon,
    queries, keys, half, has_norms: tl.constexpr, group: tl.constexpr, lanes: tl.constexpr,
):  # fmt: skip
    n = tl.program_id(0).to(tl.int64)
    first = tl.program_id(1) * group
    h = first + tl.arange(0, group)
    d = tl.arange(0, lanes)
    inside = (h < queries + 2 * keys)[:, None] & (d < half)[None, :]
    at = (n * (queries + 2 * keys) + h)[:, None] * 2 * half + d[None, :]
    a = tl.load(x + at, mask=inside, other=0.0)
    b = tl.load(x + at + half, mask=inside, other=0.0)
    if first >= queries + keys:
        to = (n * keys + h - queries - keys)[:, None] * 2 * half + d[None, :]
        tl.store(v + to, a, mask=inside)
        tl.store(v + to + half, b, mask=inside)
    else:
        ya, yb = a.to(tl.float32), b.to(tl.float32)
        weight, out, to = q_norm, q, (n * queries + h)[:, None] * 2 * half + d[None, :]
        if first >= queries:
            weight, out = k_norm, k
            to = (n * keys + h - queries)[:, None] * 2 * half + d[None, :]
        if has_norms:
            squares = tl.sum(ya * ya, 1) + tl.sum(yb * yb, 1)
            rate = tl.rsqrt(squares / (2 * half) + epsilon)[:, None]
            wa = tl.load(weight + d, mask=d < half, other=0.0).to(tl.float32)[None, :]
            wb = tl.load(weight + half + d, mask=d < half, other=0.0).to(tl.float32)[None, :]
            ya *= rate * wa
            yb *= rate * wb
        c = tl.load(cos + n * 2 * half + d, mask=d < half, other=0.0).to(tl.float32)[None, :]
        s = tl.load(sin + n * 2 * half + d, mask=d < half, other=0.0).to(tl.float32)[None, :]
        tl.store(out + to, (ya * c - yb * s).to(out.dtype.element_ty), mask=inside)
        tl.store(out + to + half, (yb * c + ya * s).to(out.dtype.element_ty), mask=inside)


@triton.jit  # type: ignore[untyped-decorator]  # Triton ships no types
def _heads_backward_kernel(  # type: ignore[no-untyped-def]  # Triton reads annotations itself
    dx, x, dq, dk, dv, cos, sin, q_norm, k_norm, epsilon,
    queries, keys, half, has_norms: tl.constexpr, group: tl.constexpr, lanes: tl.constexpr,
):  # fmt: skip
    n = tl.program_id(0).to(tl.int64)
    first = tl.program_id(1) * group
    h = first + tl.arange(0, group)
    d = tl.arange(0, lanes)
    inside = (h < queries + 2 * keys)[:, None] & (d < half)[None, :]
    at = (n * (queries + 2 * keys) + h)[:, None] * 2 * half + d[None, :]
    if first >= queries + keys:
        of = (n * keys + h - queries - keys)[:, None] * 2 * half + d[None, :]
        tl.store(dx + at, tl.load(dv + of, mask=inside, other=0.0), mask=inside)
        tl.store(dx + at + half, tl.load(dv + of + half, mask=inside, other=0.0), mask=inside)
    else:
        weight, grad, of = q_norm, dq, (n * queries + h)[:, None] * 2 * half + d[None, :]
        if first >= queries:
            weight, grad = k_norm, dk
            of = (n * keys + h - queries)[:, None] * 2 * half + d[None, :]
        c = tl.load(cos + n * 2 * half + d, mask=d < half, other=0.0).to(tl.float32)[None, :]
        s = tl.load(sin + n * 2 * half + d, mask=d < half, other=0.0).to(tl.float32)[None, :]
        ga = tl.load(grad + of, mask=inside, other=0.0).to(tl.float32)
        gb = tl.load(grad + of + half, mask=inside, other=0.0).to(tl.float32)
        da = ga * c + gb * s  # turned back
        db = gb * c - ga * s
        if has_norms:
            a = tl.load(x + at, mask=inside, other=0.0).to(tl.float32)
            b = tl.load(x + at + half, mask=inside, other=0.0).to(tl.float32)
            rate = tl.rsqrt((tl.sum(a * a, 1) + tl.sum(b * b, 1)) / (2 * half) + epsilon)[:, None]
            da *= tl.load(weight + d, mask=d < half, other=0.0).to(tl.float32)[None, :]
            db *= tl.load(weight + half + d, mask=d < half, other=0.0).to(tl.float32)[None, :]
            along = (tl.sum(a * da, 1) + tl.sum(b * db, 1))[:, None] * rate * rate / (2 * half)
            da = rate * (da - a * along)
            db = rate * (db - b * along)
        tl.store(dx + at, da.to(dx.dtype.element_ty), mask=inside)
        tl.store(dx + at + half, db.to(dx.dtype.element_ty), mask=inside)


@triton.jit  # type: ignore[untyped-decorator]  # Triton ships no types
def _gate_kernel(  # type: ignore[no-untyped-def]  # Triton reads annotations itself
    x, out, width, block: tl.constexpr
):
    n = tl.program_id(0).to(tl.int64)
    d = tl.program_id(1) * block + tl.arange(0, block)
    g = tl.load(x + n * 2 * width + d, mask=d < width, other=0.0).to(tl.float32)
    u = tl.load(x + n * 2 * width + width + d, mask=d < width, other=0.0).to(tl.float32)
    value = g * tl.sigmoid(g) * u
    tl.store(out + n * width + d, value.to(out.dtype.element_ty), mask=d < width)


@triton.jit  # type: ignore[untyped-decorator]  # Triton ships no types
def _gate_backward_kernel(  # type: ignore[no-untyped-def]  # Triton reads annotations itself
    grad, x, dx, width, block: tl.constexpr
):
    n = tl.program_id(0).to(tl.int64)
    d = tl.program_id(1) * block + tl.arange(0, block)
    inside = d < width
    y = tl.load(grad + n * width + d, mask=inside, other=0.0).to(tl.float32)
    g = tl.load(x + n * 2 * width + d, mask=inside, other=0.0).to(tl.float32)
    u = tl.load(x + n * 2 * width + width + d, mask=inside, other=0.0).to(tl.float32)
    sigma = tl.sigmoid(g)
    slope = sigma * (1 + g * (1 - sigma))
    tl.store(dx + n * 2 * width + d, (y * u * slope).to(dx.dtype.element_ty), mask=inside)
    tl.store(dx + n * 2 * width + width + d, (y * g * sigma).to(dx.dtype.element_ty), mask=inside)


def turned_heads(
    x: Tensor, cos: Tensor, sin: Tensor, heads: Heads
) -> tuple[Tensor, Tensor, Tensor]:
    """x: [N, (Hq + 2 Hkv) D]; cos, sin: [N, D], the second half like the first.

    Returns q [1, Hq, N, D] and k, v [1, Hkv, N, D], a position's heads side by side in memory.
    """
    q, k, v = _TurnedHeads.apply(x, cos, sin, heads)  # type: ignore[no-untyped-call]  # torch's stub
    return tuple(part.transpose(0, 1)[None] for part in (q, k, v))


def gated(x: Tensor) -> Tensor:
    """[N, 2 F] of gate and up -> silu(gate) * up [N, F]."""
    out: Tensor = _Gated.apply(x)  # type: ignore[no-untyped-call]  # torch's stub
    return out


def _launch(kernel: Any, parts: tuple[Tensor, ...], turn: tuple[Tensor, Tensor], of: Heads) -> None:
    group = math.gcd(of.queries, of.keys)
    group = math.gcd(group, _AT_ONCE)  # a power of two, so that no program has heads of two kinds
    half = of.width // 2
    norms = turn if of.norms is None else of.norms  # any: they are not read
    grid = (len(turn[0]), (of.queries + 2 * of.keys) // group)
    kernel[grid](
        *parts, *turn, *norms, of.epsilon, of.queries, of.keys, half,
        has_norms=of.norms is not None, group=group, lanes=triton.next_power_of_2(half),
        num_warps=1 if group * half <= 512 else 2,
    )  # fmt: skip


class _TurnedHeads(torch.autograd.Function):
    """-> q [N, Hq, D], k [N, Hkv, D], v [N, Hkv, D]."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, cos: Tensor, sin: Tensor, heads: Heads
    ) -> tuple[Tensor, Tensor, Tensor]:
        x, cos, sin = x.contiguous(), cos.contiguous(), sin.contiguous()
        counts = (heads.queries, heads.keys, heads.keys)
        q, k, v = (x.new_empty(len(x), count, heads.width) for count in counts)
        _launch(_heads_kernel, (x, q, k, v), (cos, sin), heads)
        ctx.save_for_backward(x if heads.norms is not None else cos, cos, sin)
        ctx.heads = heads
        return q, k, v

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, cos, sin = ctx.saved_tensors
        n, of = len(cos), ctx.heads
        dx = grads[0].new_empty(n, (of.queries + 2 * of.keys) * of.width)
        parts = (dx, x, *(grad.contiguous() for grad in grads))
        _launch(_heads_backward_kernel, parts, (cos, sin), of)
        return dx, None, None, None


class _Gated(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        x = x.contiguous()
        ctx.save_for_backward(x)
        n, width = len(x), x.shape[1] // 2
        out = x.new_empty(n, width)
        _gate_kernel[(n, triton.cdiv(width, _BLOCK))](x, out, width, block=_BLOCK)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        (x,) = ctx.saved_tensors
        n, width = grad.shape
        dx = torch.empty_like(x)
        grid = (n, triton.cdiv(width, _BLOCK))
        _gate_backward_kernel[grid](grad.contiguous(), x, dx, width, block=_BLOCK)
        return (dx,)
