"""Attention over trees: every position of a row sees its own ancestors and nothing else.

In: where a row's segments begin and end, in depth-first order, and the depth of each position. Out:
attention, exact to float error, with its gradient. A tree's mask is a list of rectangles: each
segment sees itself causally, and everything below a segment sees all of it. So a shared stem is one
dense product for all its descendants, whatever their number. On a GPU the same mask goes through
FlexAttention (flex.py). Sliding windows are by depth: what a sequence alone would see.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from art_core.nn import flex, gpu_pieces
from art_core.nn.attention import (
    dense,
    dense_backward,
    group_heads,
    merge,
    rectangle,
    rectangle_backward,
    ungroup_heads,
)
from art_core.nn.gpu_plan import Piece, pieces
from art_core.nn.rows import Score

Int = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Block:
    """One rectangle of the mask: queries [q0, q1) see keys [k0, k1) of the row."""

    q0: int
    q1: int
    k0: int
    k1: int
    causal: bool
    """True where queries and keys are the same segment."""
    band: int | None = None
    """Query q0 + i sees key k0 + j only if j - i >= band; None: there is no such limit."""


@dataclass(frozen=True, eq=False)
class TreeRow:
    """A row of whole trees: keys come from the row itself; differentiable."""

    start: Int
    end: Int
    """[S] segment s holds the positions [start[s], end[s])."""
    subtree_end: Int
    """[S] what lies in [end[s], subtree_end[s]) sees all of segment s."""
    depth: Int
    """[N] place of each position in its sequence, from 0; it grows by one within a segment."""
    _blocks: dict[int | None, list[Block]] = field(default_factory=dict, repr=False)
    _masks: flex.Masks = field(default_factory=dict, repr=False)

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, score: Score) -> Tensor:
        """As `Row.attend`."""
        if q.device.type == "cuda":
            window = self._biting(score.window)
            if window is None and score.softcap is None and score.sinks is None:
                cut = self._pieces if gpu_pieces.has_kernels(q, v) else None
                if cut is not None:
                    return gpu_pieces.attend(q, k, v, score.scale, cut)
            mask = flex.mask(self._masks, self.visible_until, self.depth, window, q.device)
            return flex.attend(q, k, v, score, mask)
        return self.in_rectangles(q, k, v, score)

    def in_rectangles(self, q: Tensor, k: Tensor, v: Tensor, score: Score) -> Tensor:
        """As `attend`, on any device, without compiling anything."""
        grouped = group_heads(q, k.shape[1])
        blocks = self.blocks(self._biting(score.window))
        out: Tensor = _TreeAttention.apply(  # type: ignore[no-untyped-call]  # torch's stub
            grouped, k[0].contiguous(), v[0].contiguous(), blocks, score
        )
        return ungroup_heads(out)

    def blocks(self, window: int | None = None) -> Sequence[Block]:
        """The mask as rectangles; every position is a query of one at least."""
        if window not in self._blocks:
            self._blocks[window] = list(self._cut(window))
        return self._blocks[window]

    @cached_property
    def _pieces(self) -> list[Piece] | None:
        return pieces(self.blocks(), len(self.depth))

    @property
    def visible_until(self) -> Int:
        """[N] position k is seen by the positions q with k <= q < visible_until[k]."""
        return np.repeat(self.subtree_end, self.end - self.start)

    def _biting(self, window: int | None) -> int | None:
        """The window, if some position is deeper than it reaches."""
        return None if window is None or int(self.depth.max()) < window else window

    def _cut(self, window: int | None) -> Iterator[Block]:
        segments = np.stack([self.start, self.end, self.subtree_end], axis=1).tolist()
        for start, end, below in segments:
            if window is None or end - start <= window:
                yield Block(start, end, start, end, causal=True)
            else:
                yield Block(start, end, start, end, causal=True, band=1 - window)
            if below == end:
                continue
            deepest = int(self.depth[end:below].max())
            if window is None or deepest - int(self.depth[start]) < window:
                yield Block(end, below, start, end, causal=False)
                continue
            for q0, q1, _ in segments[np.searchsorted(self.start, end) :]:
                if q0 >= below:
                    break
                yield from self._windowed(q0, q1, start, end, window)

    def _windowed(self, q0: int, q1: int, k0: int, k1: int, window: int) -> Iterator[Block]:
        """What a segment [q0, q1) sees of a segment [k0, k1) above it."""
        q_depth, k_depth = int(self.depth[q0]), int(self.depth[k0])
        k0 += max(0, q_depth - window + 1 - k_depth)  # what its first position sees
        if k0 >= k1:
            return
        k_depth = int(self.depth[k0])
        q1 = min(q1, q0 + window + k_depth + (k1 - k0) - 1 - q_depth)  # the last that sees a key
        reaches = q_depth + (q1 - q0) - 1 - k_depth < window
        yield Block(q0, q1, k0, k1, False, None if reaches else q_depth - k_depth - window + 1)


class _TreeAttention(torch.autograd.Function):
    """q: [Hkv, N, G, D]; k, v: [Hkv, N, D] -> [Hkv, N, G, D]."""

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, blocks: Sequence[Block], score: Score
    ) -> Tensor:
        heads, n, group, _ = q.shape
        out = q.new_zeros(heads, n, group, v.shape[-1])
        exact = torch.promote_types(q.dtype, torch.float32)
        lse = q.new_full((heads, n, group), float("-inf"), dtype=exact)
        if score.sinks is not None:  # a key of value zero comes first
            lse = lse.copy_(score.sinks.view(heads, 1, group))
        for b in blocks:
            at = slice(b.q0, b.q1)
            part = _piece(q[:, at], k[:, b.k0 : b.k1], v[:, b.k0 : b.k1], b, score)
            out[:, at], lse[:, at] = merge(out[:, at], lse[:, at], *part)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.blocks, ctx.score = blocks, score
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, out, lse = ctx.saved_tensors
        dq, dk, dv = torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)
        for b in ctx.blocks:
            at, keys = slice(b.q0, b.q1), slice(b.k0, b.k1)
            through = (grad[:, at], q[:, at], k[:, keys], v[:, keys], out[:, at], lse[:, at])
            parts = _piece_backward(through, b, ctx.score)
            dq[:, at] += parts[0]
            dk[:, keys] += parts[1]
            dv[:, keys] += parts[2]
        return dq, dk, dv, None, None


def _piece(q: Tensor, k: Tensor, v: Tensor, block: Block, score: Score) -> tuple[Tensor, Tensor]:
    if _is_plain(block, score):
        return rectangle(q, k, v, score.scale, causal=block.causal)
    mask = _mask(block, q.device)
    return dense(q, k, v, score.scale, softcap=score.softcap, mask=mask)


def _piece_backward(
    through: tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor], block: Block, score: Score
) -> tuple[Tensor, Tensor, Tensor]:
    """`through`: the gradient, q, k, v, and the whole row's output and log-sum-exp there."""
    if _is_plain(block, score):
        return rectangle_backward(*through, score.scale, causal=block.causal)
    mask = _mask(block, through[0].device)
    return dense_backward(*through, score.scale, softcap=score.softcap, mask=mask)


def _is_plain(block: Block, score: Score) -> bool:
    return score.softcap is None and block.band is None


def _mask(block: Block, device: torch.device) -> Tensor | None:
    """[n, m] True where a query of the block sees a key; None: everywhere."""
    if not block.causal and block.band is None:
        return None
    shape = (block.q1 - block.q0, block.k1 - block.k0)
    mask = torch.ones(shape, dtype=torch.bool, device=device)
    if block.causal:
        mask.tril_()
    if block.band is not None:
        mask.triu_(block.band)
    return mask
