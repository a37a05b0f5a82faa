"""A tree's attention on a GPU in a few large pieces, through the kernels made for plain attention.

In: a row's rectangles, where they are few and their scores are plain. Out: attention with its
gradient. Short segments see themselves in one FlashAttention call of many sequences; long segments
and stems go through cuDNN, whose kernels do half as much again on a Hopper GPU as a kernel that
asks a mask (seen: 465 to 625 TFLOP/s beside 350 to 390). Pieces are joined by their log-sum-exp as
on the CPU (attention.py). How a row is cut is in gpu_plan.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from art_core.nn.gpu_plan import Piece
from art_core.nn.triton_here import has_triton
from art_core.nn.upload import upload

_UNSEEN = 1e30
"""A log-sum-exp by which a query's probabilities, and its gradients, are zero."""
_WIDTHS = (64, 96, 128)


def has_kernels(q: Tensor, v: Tensor) -> bool:
    """True if the kernels take such heads, and are the faster way."""
    return (
        q.dtype in (torch.bfloat16, torch.float16)
        and q.shape[-1] == v.shape[-1]
        and q.shape[-1] in _WIDTHS
        and torch.cuda.get_device_capability(q.device) >= (9, 0)
        and has_triton()
    )


def attend(q: Tensor, k: Tensor, v: Tensor, scale: float, pieces: Sequence[Piece]) -> Tensor:
    """q: [1, Hq, N, D]; k, v: [1, Hkv, N, D] -> [1, N, Hq, D]."""
    out: Tensor = _Pieces.apply(q, k, v, pieces, scale)  # type: ignore[no-untyped-call]  # torch's stub
    return out.transpose(1, 2)


class _Pieces(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, pieces: Sequence[Piece], scale: float
    ) -> Tensor:
        from art_core.nn.join_kernel import join

        _, heads, n, width = q.shape
        if _is_whole(pieces, n):
            out, lse, state = _forward(pieces[0], q, k, v, scale)
            ctx.save_for_backward(q, k, v, out, lse)
            ctx.pieces, ctx.scale, ctx.states = pieces, scale, [state]
            return out
        out = q.new_empty(1, n, heads, width).transpose(1, 2)
        lse = torch.empty(1, heads, n, dtype=torch.float32, device=q.device)
        states: list[tuple[Any, ...]] = []
        for p in pieces:
            part, part_lse, state = _forward(p, q, k, v, scale)
            states.append(state)
            at = slice(p.q0, p.q1)
            if p.causal:
                out[:, :, at], lse[:, :, at] = part, part_lse
            else:
                join(out[0, :, at], lse[0, :, at], part[0], part_lse[0])
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.pieces, ctx.scale, ctx.states = pieces, scale, states
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, out, lse = ctx.saved_tensors
        if _is_whole(ctx.pieces, q.shape[2]):
            dq, dk, dv = _backward(
                ctx.pieces[0], (grad, out, lse), (q, k, v), ctx.states[0], ctx.scale
            )
            return dq, dk, dv, None, None
        dq, dk, dv = (torch.empty_like(x) for x in (q, k, v))
        for p, state in zip(ctx.pieces, ctx.states, strict=True):
            at, keys = slice(p.q0, p.q1), slice(p.k0, p.k1)
            parts = _backward(p, (grad, out, lse), (q, k, v), state, ctx.scale)
            places = (dq[:, :, at], dk[:, :, keys], dv[:, :, keys])
            for place, part in zip(places, parts, strict=True):
                if p.causal:
                    place.copy_(part)
                else:
                    place.add_(part)
        return dq, dk, dv, None, None


def _is_whole(pieces: Sequence[Piece], positions: int) -> bool:
    """Whether the row is one sequence, so that nothing has to be put together."""
    return len(pieces) == 1 and pieces[0].q0 == 0 and pieces[0].q1 == positions


def _forward(
    p: Piece, q: Tensor, k: Tensor, v: Tensor, scale: float
) -> tuple[Tensor, Tensor, tuple[Any, ...]]:
    """Output [1, Hq, n, D], log-sum-exp [1, Hq, n], and what the backward pass wants to know."""
    if p.window is None:
        state = _bounds(p, q.device)
        out, lse, seed, offset, _ = torch.ops.aten._flash_attention_forward(
            _packed(q, p.q0, p.q1), _packed(k, p.k0, p.k1), _packed(v, p.k0, p.k1),
            *state, 0.0, p.causal, False, scale=scale,
        )  # fmt: skip
        return out.transpose(0, 1)[None], lse.view(1, q.shape[1], -1), (*state, seed, offset)
    out, lse, cq, ck, nq, nk, seed, offset, _ = torch.ops.aten._scaled_dot_product_cudnn_attention(
        *_seen(p, p.window, q, k, v), None, True, 0.0, p.causal, False, scale=scale
    )
    lse = lse.view(1, q.shape[1], -1)
    at = slice(p.q0 - p.window[0], p.q1 - p.window[0])
    return out[:, :, at], lse[:, :, at], (seed, offset, cq, ck, nq, nk)


def _backward(
    p: Piece,
    whole: tuple[Tensor, Tensor, Tensor],
    qkv: tuple[Tensor, Tensor, Tensor],
    state: tuple[Any, ...],
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of q, k, v through one piece.

    whole: gradient, output and log-sum-exp of the row.
    """
    grad, out, lse = whole
    if p.window is None:
        *bounds, seed, offset = state
        q, k, v = qkv
        parts = torch.ops.aten._flash_attention_backward(
            _packed(grad, p.q0, p.q1), _packed(q, p.q0, p.q1),
            _packed(k, p.k0, p.k1), _packed(v, p.k0, p.k1), _packed(out, p.q0, p.q1),
            lse[0, :, p.q0 : p.q1].contiguous(), *bounds, 0.0, p.causal, seed, offset, scale=scale,
        )  # fmt: skip
        dq, dk, dv = (part.transpose(0, 1)[None] for part in parts)
        return dq, dk, dv
    seed, offset, cq, ck, nq, nk = state
    q, k, v = _seen(p, p.window, *qkv)
    at = slice(p.q0 - p.window[0], p.q1 - p.window[0])
    rates = lse.new_full((1, lse.shape[1], q.shape[2], 1), _UNSEEN)
    rates[:, :, at, 0] = lse[:, :, p.q0 : p.q1]
    grad, out = (_within(x, *p.window) for x in (grad, out))
    dq, dk, dv = torch.ops.aten._scaled_dot_product_cudnn_attention_backward(
        grad, q, k, v, out, rates, seed, offset, None, cq, ck, nq, nk, 0.0, p.causal, scale=scale
    )
    keys = p.k1 - p.k0
    return dq[:, :, at], dk[:, :, :keys], dv[:, :, :keys]


def _seen(
    p: Piece, window: tuple[int, int], q: Tensor, k: Tensor, v: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """What cuDNN sees of a piece."""
    keys = window if p.causal else (p.k0, p.k1)
    return _within(q, *window), _within(k, *keys), _within(v, *keys)


def _within(x: Tensor, start: int, end: int) -> Tensor:
    """[1, heads, end - start, D], zeros where the row ends.

    Its strides say nothing of how long the row is: cuDNN's plans are kept by strides too.
    """
    part = x[0, :, start:end]
    heads, has, width = part.shape
    if has < end - start or part.stride() != (width, heads * width, 1):
        whole = x.new_zeros(end - start, heads, width).transpose(0, 1)
        whole[:, :has] = part
        part = whole
    return part[None]


def _bounds(p: Piece, device: torch.device) -> tuple[Tensor, Tensor, int, int]:
    """Where FlashAttention's sequences lie among queries and keys, and the longest of each."""
    if p.cuts:
        longest = max(b - a for a, b in zip(p.cuts, p.cuts[1:], strict=False))
        return _on(p.cuts, device), _on(p.cuts, device), longest, longest
    n, keys = p.q1 - p.q0, p.k1 - p.k0
    return _on((0, n), device), _on((0, keys), device), n, keys


@lru_cache(maxsize=64)
def _on(cuts: tuple[int, ...], device: torch.device) -> Tensor:
    """On the GPU, once for all layers."""
    return upload(np.array(cuts, np.int32), device)


def _packed(x: Tensor, start: int, end: int) -> Tensor:
    """[1, heads, N, D] -> [n, heads, D]."""
    return x[0, :, start:end].transpose(0, 1).contiguous()
