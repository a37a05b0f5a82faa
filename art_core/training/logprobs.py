"""Log-probabilities and entropies of a row's entries, with only their positions through the head.

In: a row's hidden states and its entries. Out: two vectors of one value per entry. Logits are
computed a chunk at a time and again in the backward pass, so that no full logits tensor is held.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from art_core.batch.forest import Row
from art_core.nn.attention import Block, TreeRow
from art_core.nn.lora import LoraModel

HEAD_CHUNK = 512
"""Entries whose logits exist at once."""


def tree_row(row: Row) -> TreeRow:
    """The row's attention: each segment sees itself, and what lies below sees all of it."""
    blocks: list[Block] = []
    segments = row.segments
    for start, end, below in zip(
        segments.start.tolist(), segments.end.tolist(), segments.subtree_end.tolist(), strict=True
    ):
        blocks.append(Block(start, end, start, end, causal=True))
        if below > end:
            blocks.append(Block(end, below, start, end, causal=False))
    return TreeRow(blocks)


def entry_logprobs(model: LoraModel, row: Row) -> tuple[Tensor, Tensor]:
    """(logprob, entropy) [E] of each entry under softmax(logits / its temperature), in nats.

    Entropy carries a gradient too. A greedy call (temperature 0) is read at temperature 1.
    """
    device = model.device
    hidden = model.hidden(
        torch.from_numpy(row.ids).to(device), torch.from_numpy(row.depth).to(device), tree_row(row)
    )
    position = torch.from_numpy(row.entries.position).to(device)
    target = torch.from_numpy(row.entries.target).to(device)
    temperature = torch.from_numpy(row.entries.temperature).to(device, hidden.dtype)
    temperature = torch.where(temperature == 0, torch.ones_like(temperature), temperature)
    parts: list[tuple[Tensor, Tensor]] = []
    for a in range(0, len(position), HEAD_CHUNK):
        chunk = slice(a, a + HEAD_CHUNK)
        parts.append(
            checkpoint(
                _head,
                model,
                hidden[position[chunk]],
                target[chunk],
                temperature[chunk],
                use_reentrant=False,
            )
        )
    return torch.cat([p[0] for p in parts]), torch.cat([p[1] for p in parts])


def _head(
    model: LoraModel, hidden: Tensor, target: Tensor, temperature: Tensor
) -> tuple[Tensor, Tensor]:
    logits = model.logits(hidden) / temperature.unsqueeze(1)
    normaliser = torch.logsumexp(logits, dim=-1)
    picked = logits.gather(1, target.unsqueeze(1)).squeeze(1)
    probs = torch.softmax(logits, dim=-1)
    entropy = normaliser - (probs * logits).sum(-1)
    return picked - normaliser, entropy
