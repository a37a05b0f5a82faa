"""Log-probabilities and entropies of a row's entries, with only their positions through the head.

In: a row's hidden states and its entries. Out: two vectors of one value per entry. Logits exist a
few entries at a time, and only in the forward pass: what a logprob and an entropy change by with
the hidden state they come from is worked out there and kept, two vectors of the hidden size.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from art_core.batch.forest import Row
from art_core.errors import GroupError
from art_core.nn.head import Head
from art_core.nn.lora import LoraModel
from art_core.nn.tree_row import TreeRow

EXTRA_MEMORY = 0.02
"""Of the logits of all of a row's positions, in the model's dtype: what the head may take."""
LEAST_CHUNK = 64
"""Entries whose logits exist at once, at least: fewer waste the processor."""
MOST_CHUNK = 1024
_BYTES_A_LOGIT = {torch.float64: 24, torch.float32: 12}
"""Held at the worst moment: logits, probabilities and the gradient of one of them."""
_BYTES_A_HALF_LOGIT = 12
"""bfloat16 and float16: logits in the model's dtype, then logits and probabilities in float32."""


def tree_row(row: Row) -> TreeRow:
    """The row's attention: each segment sees itself, and what lies below sees all of it."""
    segments = row.segments
    return TreeRow(segments.start, segments.end, segments.subtree_end, row.depth)


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
    device = model.device
    hidden = model.hidden(
        torch.from_numpy(row.ids).to(device), torch.from_numpy(row.depth).to(device), tree_row(row)
    )
    entries = row.entries
    temperature = torch.from_numpy(entries.temperature).to(device)
    logprobs, entropies = _Entries.apply(  # type: ignore[no-untyped-call]  # torch's stub
        hidden[torch.from_numpy(entries.position).to(device)],
        model.head,
        torch.from_numpy(entries.target).to(device),
        torch.where(temperature == 0, torch.ones_like(temperature), temperature),
        chunk_size(len(row), hidden.dtype),
        entropy_gradient,
    )
    return logprobs, entropies


def chunk_size(positions: int, dtype: torch.dtype) -> int:
    """Entries whose logits may exist at once in a row of `positions`."""
    held = _BYTES_A_LOGIT.get(dtype, _BYTES_A_HALF_LOGIT)
    fits = int(EXTRA_MEMORY * positions * dtype.itemsize / held)
    return min(max(fits // 8 * 8, LEAST_CHUNK), MOST_CHUNK)


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
                if whole is not None:
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
    logits = head.logits(hidden)
    slope = head.slope(logits)  # of z * temperature in what the matrix gave
    z = logits.to(temperature.dtype).div_(temperature.unsqueeze(1))
    normaliser = torch.logsumexp(z, dim=-1)
    picked = z.gather(1, target.unsqueeze(1)).squeeze(1)
    z -= normaliser.unsqueeze(1)  # log p
    p = z.exp()
    entropy = -torch.linalg.vecdot(p, z)
    by_logprob = by_entropy = None
    if needs_entropy:
        z += entropy.unsqueeze(1)
        z *= p
        by_entropy = -_pull(head, z, slope, temperature, hidden.dtype)
    if needs_logprob:
        del z
        p.scatter_add_(1, target.unsqueeze(1), -torch.ones_like(temperature).unsqueeze(1))
        by_logprob = -_pull(head, p, slope, temperature, hidden.dtype)
    return picked - normaliser, entropy, by_logprob, by_entropy


def _pull(
    head: Head, gradient: Tensor, slope: Tensor | float, temperature: Tensor, dtype: torch.dtype
) -> Tensor:
    """[n, V] gradient of z -> [n, H] gradient of the hidden state. Overwrites `gradient`."""
    gradient *= slope
    pulled = head.pull(gradient.to(dtype))
    return (pulled.to(temperature.dtype) / temperature.unsqueeze(1)).to(dtype)
