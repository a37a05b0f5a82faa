"""Log-probabilities and entropies of a row's entries, with only their positions through the head.

In: a row's hidden states and its entries. Out: two vectors of one value per entry. Logits exist a
few entries at a time, and only in the forward pass: what a logprob and an entropy change by with
the hidden state they come from is worked out there and kept, two vectors of the hidden size.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from art_core.batch.forest import Row
from art_core.errors import GroupError
from art_core.nn.head import Head
from art_core.nn.lora import LoraModel
from art_core.nn.tree_row import TreeRow
from art_core.nn.triton_here import has_triton
from art_core.nn.upload import upload

EXTRA_MEMORY = 0.012
"""Of the logits of all of a row's positions: what the logits of a chunk may take. What is kept of
each entry adds to it; together they shall stay under 0.02."""
LEAST_CHUNK, LEAST_ON_GPU = 64, 512
"""Entries whose logits exist at once, at least: fewer waste the processor. A GPU reads the whole
output matrix for each chunk; 512 stay within the bound for rows of 32k."""
MOST_CHUNK = 1024


def tree_row(row: Row) -> TreeRow:
    """The row's attention: each segment sees itself, and what lies below sees all of it.

    A segment and its only heir are one, if nothing else hangs there.
    """
    start, end, below = row.segments.start, row.segments.end, row.segments.subtree_end
    goes_on = (end[:-1] == start[1:]) & (below[:-1] == below[1:]) & (below[:-1] > end[:-1])
    return TreeRow(
        start[np.append(True, ~goes_on)],
        end[np.append(~goes_on, True)],
        below[np.append(True, ~goes_on)],
        row.depth,
    )


def entry_logprobs(
    model: LoraModel, row: Row, *, entropy_gradient: bool = True
) -> tuple[Tensor, Tensor]:
    """(logprob, entropy) [E] of each entry under softmax(logits / its temperature), in nats.

    A greedy call (temperature 0) is read at temperature 1. Half-precision logits are summed up in
    float32, and so are the values.

    Args:
        entropy_gradient: without it entropies are constants, which saves a third of the head.

    Raises:
        GroupError: a sequence is longer than the model's context.
    """
    _check_depth(model, row)
    entries = row.entries
    columns = (row.ids, row.depth, entries.position, entries.target, entries.temperature)
    ids, depth, *rest = (upload(column, model.device) for column in columns)
    hidden = model.hidden(ids, depth, tree_row(row))
    return head_logprobs(model.head, hidden, *rest, entropy_gradient=entropy_gradient)


def head_logprobs(
    head: Head,
    hidden: Tensor,
    position: Tensor,
    target: Tensor,
    temperature: Tensor,
    *,
    entropy_gradient: bool = True,
) -> tuple[Tensor, Tensor]:
    """As `entry_logprobs`: hidden [N, H] of a row, and the entries' [E] positions and targets."""
    least = LEAST_CHUNK
    if _has_kernel(hidden):
        held, least = 1 + entropy_gradient, LEAST_ON_GPU // (1 + entropy_gradient)
    else:
        in_place = hidden.dtype in (torch.float32, torch.float64)
        held = 2 if in_place or not entropy_gradient else 3
    logprobs, entropies = _Entries.apply(  # type: ignore[no-untyped-call]  # torch's stub
        hidden[position],
        head,
        target,
        torch.where(temperature == 0, torch.ones_like(temperature), temperature),
        chunk_size(len(hidden), held, least),
        entropy_gradient,
    )
    return logprobs, entropies


def chunk_size(positions: int, held: int = 2, least: int = LEAST_CHUNK) -> int:
    """Entries whose logits may exist at once in a row of `positions`, `held` times over."""
    fits = int(EXTRA_MEMORY * positions / held)
    return min(max(fits // 8 * 8, least), MOST_CHUNK)


def _check_depth(model: LoraModel, row: Row) -> None:
    deepest = int(row.depth.max()) + 1
    if deepest > model.context_length:
        raise GroupError(
            "a call is longer than the model's context",
            got=f"{deepest} tokens",
            expected=f"at most {model.context_length}",
            fix="Leave it out, or train a model with a longer context.",
        )


class _Entries(torch.autograd.Function):
    """hidden [E, H], target [E], temperature [E] -> logprob, entropy [E].

    With z = logits / T and p = softmax(z): d logprob / dz = onehot - p, and
    d entropy / dz = -p * (log p + entropy).
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        head: Head,
        target: Tensor,
        temperature: Tensor,
        chunk: int,
        entropy_gradient: bool,
    ) -> tuple[Tensor, Tensor]:
        exact = torch.promote_types(hidden.dtype, torch.float32)
        logprobs, entropies = torch.empty(2, len(hidden), dtype=exact, device=hidden.device)
        needs = (ctx.needs_input_grad[0], ctx.needs_input_grad[0] and entropy_gradient)
        slopes = [torch.empty_like(hidden) if need else None for need in needs]
        for a in range(0, len(hidden), chunk):
            at = slice(a, a + chunk)
            logprobs[at], entropies[at], *parts = _chunk(
                head, hidden[at], target[at], temperature[at].to(exact), *needs
            )
            for whole, part in zip(slopes, parts, strict=True):
                if whole is not None and part is not None:
                    whole[at] = part
        ctx.save_for_backward(*slopes)
        return logprobs, entropies

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        through = [
            slope * grad.unsqueeze(1).to(slope.dtype)
            for slope, grad in zip(ctx.saved_tensors, grads, strict=True)
            if slope is not None
        ]
        return sum(through[1:], through[0]), None, None, None, None, None


def _chunk(
    head: Head,
    hidden: Tensor,
    target: Tensor,
    temperature: Tensor,
    needs_logprob: bool,
    needs_entropy: bool,
) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
    """Logprob and entropy [n], and the gradient [n, H] of each, where it is needed."""
    raw = head.matrix(hidden)
    if _has_kernel(raw):
        from art_core.nn.head_kernel import measure

        logprob, entropy, slope, spreading = measure(
            raw, target, temperature, head.scale, head.cap,
            needs_logprob=needs_logprob, needs_entropy=needs_entropy,
        )  # fmt: skip
        by_logprob = None if slope is None else head.pull(slope)
    else:
        logprob, entropy, picked_slope, falling, spreading = _measure(
            raw, target, temperature, head.scale, head.cap, needs_logprob, needs_entropy
        )
        by_logprob = None
        if falling is not None:
            by_logprob = picked_slope.unsqueeze(1) * head.weight[target] - head.pull(falling)
    by_entropy = None if spreading is None else head.pull(spreading)
    return logprob, entropy, by_logprob, by_entropy


def _has_kernel(x: Tensor) -> bool:
    return x.device.type == "cuda" and x.dtype != torch.float64 and has_triton()


def _measure(
    raw: Tensor,
    target: Tensor,
    temperature: Tensor,
    scale: float,
    cap: float | None,
    needs_logprob: bool,
    needs_entropy: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor | None]:
    """From what the output matrix gave, [n, V], which is overwritten.

    Returns:
        logprob and entropy [n]; the slope [n] of the target's z in its own raw value; p times each
        z's slope [n, V], and the gradient of the entropy [n, V], both in raw's dtype.
    """
    z = raw.to(temperature.dtype)
    z *= scale
    slope: Tensor | float = scale
    if cap is not None:
        z = torch.tanh(z / cap)
        slope = (1 - z.square()) * scale
        z *= cap
    inverse = 1 / temperature.unsqueeze(1)
    z *= inverse
    normaliser = torch.logsumexp(z, dim=-1)
    at = target.unsqueeze(1)
    logprob = z.gather(1, at).squeeze(1) - normaliser
    picked_slope = inverse * (slope if isinstance(slope, float) else slope.gather(1, at))
    z -= normaliser.unsqueeze(1)  # log p
    p = z.exp()
    entropy = -torch.linalg.vecdot(p, z)
    slope = slope * inverse
    spreading = falling = None
    if needs_entropy:
        z += entropy.unsqueeze(1)
        z *= p
        z *= -slope
        spreading = z.to(raw.dtype)
    if needs_logprob:
        p *= slope
        falling = p.to(raw.dtype)
    return logprob, entropy, picked_slope.squeeze(1), falling, spreading
