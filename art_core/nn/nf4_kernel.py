"""A GPU kernel that writes weights of 4 bits (NF4) out as dense ones, in one pass over memory.

In: a weight as bitsandbytes packs it, two numbers a byte, the first in the upper half; each block
of them has a scale, which is a number of 8 bits of a code of its own. Out: the weight in a place
that is there already. bitsandbytes' own way makes the scales first, in two passes of their own.
Importing it needs Triton.
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl
from torch import Tensor

_BYTES = 1024
"""That one program unpacks."""


@triton.jit  # type: ignore[untyped-decorator]  # Triton ships no types
def _unpack_kernel(  # type: ignore[no-untyped-def]  # Triton reads annotations itself
    packed, place, code, scales, scale_code, scale_scales, offset, total,
    block: tl.constexpr, scale_block: tl.constexpr, bytes_: tl.constexpr,
):  # fmt: skip
    first = tl.program_id(0).to(tl.int64) * bytes_
    at = first + tl.arange(0, bytes_)
    inside = at < total
    pair = tl.load(packed + at, mask=inside, other=0).to(tl.int32)
    of = 2 * at // block
    kept = tl.load(scales + of, mask=inside, other=0).to(tl.int32)
    outer = tl.load(scale_scales + of // scale_block, mask=inside, other=0.0)
    scale = tl.load(scale_code + kept) * outer + tl.load(offset)
    numbers = tl.interleave(
        tl.load(code + (pair >> 4)) * scale, tl.load(code + (pair & 15)) * scale
    )
    to = 2 * first + tl.arange(0, 2 * bytes_)
    tl.store(place + to, numbers.to(place.dtype.element_ty), mask=to < 2 * total)


def can_unpack(state: Any) -> bool:
    """Whether a weight with this `QuantState` is packed as described above."""
    return bool(state.nested and state.quant_type == "nf4")


def unpack(packed: Tensor, state: Any, place: Tensor) -> None:
    """packed: bytes; state: bitsandbytes' `QuantState`; place: [o, i], contiguous."""
    total = packed.numel()
    _unpack_kernel[(triton.cdiv(total, _BYTES),)](
        packed, place, state.code, state.absmax, state.state2.code, state.state2.absmax,
        state.offset, total, block=state.blocksize, scale_block=state.state2.blocksize,
        bytes_=_BYTES,
    )  # fmt: skip
