"""Tree attention on a GPU: the tree's mask as a BlockMask, through FlexAttention.

In: until where each position is seen, and its depth. Out: which blocks of 128 x 128 are seen in
part, in full or not at all, worked out from the segments without an N x N mask; and attention with
its gradient. Rows are padded to a few lengths inside attention alone, so that a kernel is compiled
once for each length; a pad sees itself only. FlexAttention: Dong et al. 2024, arXiv:2412.05496.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.nn.attention.flex_attention import AuxRequest, BlockMask, flex_attention

from art_core.nn.rows import Score

BLOCK = 128
"""Positions of a block, of queries and of keys."""
_LENGTHS_PER_OCTAVE = 2
_LEAST_WIDTH = 16
_KERNELS = 64
"""Compiled at most, over lengths, windows, soft caps and dtypes."""

Int = npt.NDArray[np.int64]
Masks: TypeAlias = dict[tuple[int | None, torch.device], BlockMask]
"""By window and device."""
_Modifier: TypeAlias = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]


def padded_length(n: int) -> int:
    """The length that a row of `n` positions is padded to: a few per doubling."""
    step = max(BLOCK, (1 << (n - 1).bit_length()) // 2 // _LENGTHS_PER_OCTAVE)
    return -(-n // step) * step


def mask(
    masks: Masks, visible_until: Int, depth: Int, window: int | None, device: torch.device
) -> BlockMask:
    """The row's mask, from `masks` if it was made before.

    visible_until, depth: [N], as in `TreeRow`.
    """
    if (window, device) not in masks:
        masks[window, device] = _make(visible_until, depth, window, device)
    return masks[window, device]


def attend(q: Tensor, k: Tensor, v: Tensor, score: Score, mask: BlockMask) -> Tensor:
    """q: [1, Hq, N, D]; k, v: [1, Hkv, N, D] -> [1, N, Hq, D]."""
    n, length, width = q.shape[2], mask.seq_lengths[0], v.shape[-1]
    q, k, v = (_padded(x, length) for x in (q, k, v))
    has_sinks = score.sinks is not None
    with torch._dynamo.config.patch(recompile_limit=_KERNELS):
        result: Any = _compiled()(
            q,
            k,
            v,
            score_mod=None if score.softcap is None else _softcap(score.softcap),
            block_mask=mask,
            scale=score.scale,
            enable_gqa=q.shape[1] != k.shape[1],
            return_aux=AuxRequest(lse=True) if has_sinks else None,
        )
    out: Tensor = result[0] if has_sinks else result
    if score.sinks is not None:  # a key of value zero takes its share of the sum
        kept = torch.sigmoid(result[1].lse - score.sinks.float().view(1, -1, 1))
        out = out * kept.unsqueeze(-1).to(out.dtype)
    return out[:, :, :n, :width].transpose(1, 2)


def _padded(x: Tensor, length: int) -> Tensor:
    """[1, heads, N, D] with zeros up to `length` and to the least width that kernels take."""
    more = (0, max(0, _LEAST_WIDTH - x.shape[-1]), 0, length - x.shape[2])
    return torch.nn.functional.pad(x, more) if any(more) else x


@lru_cache(maxsize=1)
def _compiled() -> Callable[..., Any]:
    """Without a graph break or not at all: uncompiled, it would hold every score."""
    return torch.compile(flex_attention, dynamic=False, fullgraph=True)


@lru_cache(maxsize=8)
def _softcap(cap: float) -> _Modifier:
    def modify(score: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return cap * torch.tanh(score / cap)

    return modify


def _make(visible_until: Int, depth: Int, window: int | None, device: torch.device) -> BlockMask:
    n, length = len(depth), padded_length(len(depth))
    pads = np.arange(n, length)
    until = np.concatenate([visible_until, pads + 1])
    deep = np.concatenate([depth, np.zeros_like(pads)])
    partly, wholly = _blocks(until, deep, window)
    until_t = torch.from_numpy(until.astype(np.int32)).to(device)
    deep_t = torch.from_numpy(deep.astype(np.int32)).to(device)

    reach = length if window is None else window

    def sees(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return (k <= q) & (q < until_t[k])

    def sees_near(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return (k <= q) & (q < until_t[k]) & (deep_t[q] - deep_t[k] < reach)

    return BlockMask.from_kv_blocks(
        *_ordered(partly, device),
        *_ordered(wholly, device),
        BLOCK_SIZE=BLOCK,
        mask_mod=sees if window is None else sees_near,
        seq_lengths=(length, length),
    )


def _blocks(
    until: Int, depth: Int, window: int | None
) -> tuple[npt.NDArray[np.bool_], npt.NDArray[np.bool_]]:
    """[blocks of queries, blocks of keys]: seen in part, and seen in full.

    A block may be called partly seen that is not seen at all; the mask is asked there. Key k is
    seen by the queries k to until[k], so all of a block's keys reach a query block if the least
    `until` does.
    """
    blocked = until.reshape(-1, BLOCK)
    first = np.arange(len(blocked)) * BLOCK
    above = first[:, None] > first[None, :]
    some = above & (blocked.max(1)[None, :] > first[:, None])
    whole = above & (blocked.min(1)[None, :] >= first[:, None] + BLOCK)
    if window is not None:
        deep = depth.reshape(-1, BLOCK)
        low, high = deep.min(1), deep.max(1)
        some &= low[:, None] - high[None, :] < window
        whole &= high[:, None] - low[None, :] < window
    np.fill_diagonal(some, True)
    return some & ~whole, whole


def _ordered(blocks: npt.NDArray[np.bool_], device: torch.device) -> tuple[Tensor, Tensor]:
    """(number of key blocks [1, 1, Q], their indices first [1, 1, Q, K]) of each query block."""
    count = blocks.sum(1).astype(np.int32)
    order = np.argsort(~blocks, axis=1, kind="stable").astype(np.int32)
    return (
        torch.from_numpy(count).to(device)[None, None],
        torch.from_numpy(order).to(device)[None, None],
    )
