"""A GPU kernel that joins two attentions over disjoint keys, in place.

In: outputs and log-sum-exps of the same queries. Out: those of both together, as `attention.merge`
gives them, in one pass over memory. Importing it needs Triton.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

_AT_ONCE = 8
"""Heads of a position that one program joins."""


@triton.jit  # type: ignore[untyped-decorator]  # Triton ships no types
def _join_kernel(  # type: ignore[no-untyped-def]  # Triton reads annotations itself
    out, lse, part, part_lse, heads, width,
    out_head, out_n, lse_head, part_head, part_n, part_lse_head,
    group: tl.constexpr, lanes: tl.constexpr,
):  # fmt: skip
    n = tl.program_id(0).to(tl.int64)
    h = tl.program_id(1) * group + tl.arange(0, group)
    d = tl.arange(0, lanes)
    inside = (h < heads)[:, None] & (d < width)[None, :]
    one = tl.load(lse + h * lse_head + n, mask=h < heads, other=0.0)
    other = tl.load(part_lse + h * part_lse_head + n, mask=h < heads, other=0.0)
    above = tl.maximum(one, other)
    total = above + tl.log(tl.exp(one - above) + tl.exp(other - above))
    at = h[:, None] * out_head + n * out_n + d[None, :]
    a = tl.load(out + at, mask=inside, other=0.0).to(tl.float32)
    of = h[:, None] * part_head + n * part_n + d[None, :]
    b = tl.load(part + of, mask=inside, other=0.0).to(tl.float32)
    both = a * tl.exp(one - total)[:, None] + b * tl.exp(other - total)[:, None]
    tl.store(out + at, both.to(out.dtype.element_ty), mask=inside)
    tl.store(lse + h * lse_head + n, total, mask=h < heads)


def join(out: Tensor, lse: Tensor, part: Tensor, part_lse: Tensor) -> None:
    """out, part: [heads, n, D], a head's D side by side; lse, part_lse: [heads, n] float32."""
    heads, n, width = out.shape
    _join_kernel[(n, triton.cdiv(heads, _AT_ONCE))](
        out, lse, part, part_lse, heads, width,
        out.stride(0), out.stride(1), lse.stride(0), part.stride(0), part.stride(1),
        part_lse.stride(0), group=_AT_ONCE, lanes=triton.next_power_of_2(width), num_warps=2,
    )  # fmt: skip
