"""A tree's attention on a GPU in a few large pieces, through the kernels made for plain attention.

In: a row's rectangles, where they are few and their scores are plain. Out: attention with its
gradient. Short segments see themselves in one FlashAttention call of many sequences; long segments
and stems go through cuDNN, whose kernels do half as much again on a Hopper GPU as a kernel that
asks a mask (seen: 465 to 625 TFLOP/s beside 350 to 390), and nothing is compiled. Pieces are joined
by their log-sum-exp as on the CPU (attention.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Protocol

import torch
from torch import Tensor

LONG = 2048
"""A segment of this length is worth a call of its own."""
_WIDTHS = (64, 96, 128)
_ROWS_A_CALL = 2048
"""A row may have a call for so many positions each, and a few besides."""


class Rectangle(Protocol):
    """As `tree_row.Block`."""

    @property
    def q0(self) -> int: ...
    @property
    def q1(self) -> int: ...
    @property
    def k0(self) -> int: ...
    @property
    def k1(self) -> int: ...
    @property
    def causal(self) -> bool: ...


@dataclass(frozen=True)
class Piece:
    """One kernel call: queries [q0, q1) over keys [k0, k1)."""

    q0: int
    q1: int
    k0: int
    k1: int
    causal: bool
    cuts: tuple[int, ...] = ()
    """Where sequences begin and end that see themselves only, counted from q0; empty: one."""


def pieces(blocks: Sequence[Rectangle], positions: int) -> list[Piece] | None:
    """The calls for a row, segments first; None if they are too many to be worth it."""
    found: list[Piece] = []
    short: list[int] = []  # cuts of a run of short segments
    for b in sorted((b for b in blocks if b.causal), key=lambda b: b.q0):
        if b.q1 - b.q0 >= LONG:
            found.append(Piece(b.q0, b.q1, b.k0, b.k1, causal=True))
        elif short and short[-1] == b.q0:
            short.append(b.q1)
        else:
            found += _together(short)
            short = [b.q0, b.q1]
    found += _together(short)
    found += [Piece(b.q0, b.q1, b.k0, b.k1, causal=False) for b in blocks if not b.causal]
    return found if len(found) <= 4 + positions // _ROWS_A_CALL else None


def _together(cuts: Sequence[int]) -> list[Piece]:
    if not cuts:
        return []
    a, b = cuts[0], cuts[-1]
    return [Piece(a, b, a, b, causal=True, cuts=tuple(cut - a for cut in cuts))]


def has_kernels(q: Tensor, v: Tensor) -> bool:
    """True if the kernels take such heads, and are the faster way."""
    return (
        q.dtype in (torch.bfloat16, torch.float16)
        and q.shape[-1] == v.shape[-1]
        and q.shape[-1] in _WIDTHS
        and torch.cuda.get_device_capability(q.device) >= (9, 0)
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
        _, heads, n, width = q.shape
        out = q.new_empty(1, n, heads, width).transpose(1, 2)
        lse = torch.empty(1, heads, n, dtype=torch.float32, device=q.device)
        states: list[tuple[Any, ...]] = []
        for p in pieces:
            part, part_lse, state = _forward(p, *_slices(p, q, k, v), scale)
            states.append(state)
            at = slice(p.q0, p.q1)
            if p.causal:
                out[:, :, at], lse[:, :, at] = part, part_lse
                continue
            total = torch.logaddexp(lse[:, :, at], part_lse)
            kept = (lse[:, :, at] - total).exp_().unsqueeze(-1)
            added = (part_lse - total).exp_().unsqueeze(-1)
            out[:, :, at] = out[:, :, at] * kept + part * added
            lse[:, :, at] = total
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.pieces, ctx.scale, ctx.states = pieces, scale, states
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, out, lse = ctx.saved_tensors
        dq, dk, dv = (torch.empty_like(x) for x in (q, k, v))
        for p, state in zip(ctx.pieces, ctx.states, strict=True):
            at, keys = slice(p.q0, p.q1), slice(p.k0, p.k1)
            whole = (grad[:, :, at], out[:, :, at], lse[:, :, at])
            parts = _backward(p, *whole, *_slices(p, q, k, v), state, ctx.scale)
            places = (dq[:, :, at], dk[:, :, keys], dv[:, :, keys])
            for place, part in zip(places, parts, strict=True):
                if p.causal:
                    place.copy_(part)
                else:
                    place.add_(part)
        return dq, dk, dv, None, None


def _slices(p: Piece, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    return q[:, :, p.q0 : p.q1], k[:, :, p.k0 : p.k1], v[:, :, p.k0 : p.k1]


def _forward(
    p: Piece, q: Tensor, k: Tensor, v: Tensor, scale: float
) -> tuple[Tensor, Tensor, tuple[Any, ...]]:
    """Output [1, Hq, n, D], log-sum-exp [1, Hq, n], and what the backward pass wants to know."""
    if p.cuts:
        cuts = _cuts(p.cuts, q.device)
        longest = max(b - a for a, b in zip(p.cuts, p.cuts[1:], strict=False))
        out, lse, seed, offset, _ = torch.ops.aten._flash_attention_forward(
            *(_packed(x) for x in (q, k, v)),
            cuts, cuts, longest, longest, 0.0, True, False, scale=scale,
        )  # fmt: skip
        return out.transpose(0, 1)[None], lse.view(1, q.shape[1], -1), (cuts, longest, seed, offset)
    out, lse, cq, ck, nq, nk, seed, offset, _ = torch.ops.aten._scaled_dot_product_cudnn_attention(
        q, k, v, None, True, 0.0, p.causal, False, scale=scale
    )
    return out, lse.view(1, q.shape[1], -1), (seed, offset, cq, ck, nq, nk)


def _backward(
    p: Piece,
    grad: Tensor,
    out: Tensor,
    lse: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    state: tuple[Any, ...],
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of q, k, v through one piece, given the whole row's output and log-sum-exp."""
    if p.cuts:
        cuts, longest, seed, offset = state
        parts = torch.ops.aten._flash_attention_backward(
            *(_packed(x) for x in (grad, q, k, v, out)),
            lse[0].contiguous(), cuts, cuts, longest, longest, 0.0, True, seed, offset, scale=scale,
        )  # fmt: skip
        dq, dk, dv = (part.transpose(0, 1)[None] for part in parts)
        return dq, dk, dv
    seed, offset, cq, ck, nq, nk = state
    found: tuple[Tensor, Tensor, Tensor] = (
        torch.ops.aten._scaled_dot_product_cudnn_attention_backward(
            grad, q, k, v, out, lse.contiguous().unsqueeze(-1), seed, offset, None,
            cq, ck, nq, nk, 0.0, p.causal, scale=scale,
        )
    )  # fmt: skip
    return found


@lru_cache(maxsize=64)
def _cuts(cuts: tuple[int, ...], device: torch.device) -> Tensor:
    """On the GPU, once for all layers."""
    return torch.tensor(cuts, dtype=torch.int32, device=device)


def _packed(x: Tensor) -> Tensor:
    """[1, heads, n, D] -> [n, heads, D]."""
    return x[0].transpose(0, 1).contiguous()
