"""A GPU kernel for what the loss wants of logits: log-probability, entropy, and their slopes.

In: what the output matrix gave for a few entries, on a GPU. Out: two numbers an entry, and the
logits overwritten by the gradient of the log-probability, in one pass that reads them and one that
writes: so a chunk's logits exist once. Values are added up in float32. Importing it needs Triton.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

_BLOCK = 2048
_LEAST = -1.0e30
"""Below every logit; minus infinity would make NaN of differences."""


@triton.jit  # type: ignore[untyped-decorator]  # Triton ships no types
def _score(  # type: ignore[no-untyped-def]  # Triton reads annotations itself
    x, scale, cap, inverse, has_cap: tl.constexpr
):
    """z and its slope in the raw logit x."""
    z = x.to(tl.float32) * scale
    slope = tl.full(z.shape, 1.0, tl.float32) * scale * inverse
    if has_cap:
        tanh = 2 * tl.sigmoid(2 * z / cap) - 1
        slope *= 1 - tanh * tanh
        z = cap * tanh
    return z * inverse, slope


@triton.jit  # type: ignore[untyped-decorator]  # Triton ships no types
def _measure_kernel(  # type: ignore[no-untyped-def]  # Triton reads annotations itself
    raw, spread, target, temperature, logprobs, entropies, vocab, scale, cap,
    has_cap: tl.constexpr, needs_slope: tl.constexpr, needs_spread: tl.constexpr,
    least: tl.constexpr, block: tl.constexpr,
):  # fmt: skip
    n = tl.program_id(0)
    row = raw + n.to(tl.int64) * vocab
    inverse = 1 / tl.load(temperature + n)
    wanted = tl.load(target + n)
    picked, _slope = _score(tl.load(row + wanted + tl.arange(0, 1)), scale, cap, inverse, has_cap)
    lanes = tl.arange(0, block)
    most = tl.full([block], least, tl.float32)
    total = tl.zeros([block], tl.float32)  # sum of exp(z - most)
    moment = tl.zeros([block], tl.float32)  # sum of (z - most) exp(z - most)
    for start in range(0, vocab, block):
        inside = start + lanes < vocab
        x = tl.load(row + start + lanes, mask=inside, other=0.0)
        z, _slopes = _score(x, scale, cap, inverse, has_cap)
        z = tl.where(inside, z, least)
        above = tl.maximum(most, z)
        kept = tl.exp(most - above)
        share = tl.where(inside, tl.exp(z - above), 0.0)
        moment = kept * (moment + (most - above) * total) + (z - above) * share
        total = kept * total + share
        most = above
    peak = tl.max(most, 0)
    kept = tl.exp(most - peak)
    moment = tl.sum(kept * (moment + (most - peak) * total), 0)
    total = tl.sum(kept * total, 0)
    entropy = tl.log(total) - moment / total
    normaliser = peak + tl.log(total)
    tl.store(logprobs + n + tl.arange(0, 1), picked - normaliser)
    tl.store(entropies + n, entropy)
    if needs_slope:
        for start in range(0, vocab, block):
            at = start + lanes
            x = tl.load(row + at, mask=at < vocab, other=0.0)
            z, slope = _score(x, scale, cap, inverse, has_cap)
            p = tl.exp(z - normaliser)
            falling = (tl.where(at == wanted, 1.0, 0.0) - p) * slope
            tl.store(row + at, falling.to(raw.dtype.element_ty), mask=at < vocab)
            if needs_spread:
                spreading = -p * (z - normaliser + entropy) * slope
                to = spread + n.to(tl.int64) * vocab + at
                tl.store(to, spreading.to(spread.dtype.element_ty), mask=at < vocab)


def measure(
    raw: Tensor,
    target: Tensor,
    temperature: Tensor,
    scale: float,
    cap: float | None,
    *,
    needs_logprob: bool,
    needs_entropy: bool,
) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
    """From what the output matrix gave, [n, V], which is overwritten; temperature [n] float32.

    With z = cap * tanh(scale * raw / cap) / T, or scale * raw / T, and p = softmax(z).

    Returns:
        log p of the target, and the entropy [n]; their gradients in raw [n, V], in its dtype, the
        first of them where `raw` was. The entropy's needs the other's.
    """
    n, vocab = raw.shape
    logprobs, entropies = raw.new_empty(2, n, dtype=torch.float32)
    spread = torch.empty_like(raw) if needs_entropy else raw
    _measure_kernel[(n,)](
        raw, spread, target, temperature, logprobs, entropies, vocab, scale,
        0.0 if cap is None else cap, has_cap=cap is not None, needs_slope=needs_logprob,
        needs_spread=needs_entropy, least=_LEAST, block=_BLOCK, num_warps=8,
    )  # fmt: skip
    falling = raw if needs_logprob else None
    return logprobs, entropies, falling, spread if needs_entropy else None
