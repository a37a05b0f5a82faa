"""From logits to sampled ids, with the log-probability under the distribution sampled from.

In: logits of the sequences decoded together, each with its own settings, noise and mask. Out: one
id and one natural-log probability each. A token's noise is a function of (seed, index of the
token) alone, so a sequence does not depend on what it was batched with beyond float noise.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from art_core.calls import Sampling

_FOLD = 256
"""Vocabulary entries whose probability is summed before the choice among them."""


def uniform(seed: int, index: int) -> float:
    """The number in [0, 1) that decides token `index` of the sequence keyed by `seed`.

    Philox is counter-based (Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3").
    """
    bits = np.random.Philox(key=seed % 2**64, counter=index)
    return float(np.random.Generator(bits).random())


def sample(
    logits: Tensor,
    settings: Sequence[Sampling],
    noise: Sequence[float],
    allowed: Sequence[Tensor | None],
) -> tuple[list[int], list[float]]:
    """Sample one token for each of B sequences.

    Args:
        logits: [B, V] as the model gave them.
        settings: B; temperature 0 takes the most likely token.
        noise: B numbers in [0, 1).
        allowed: B; None, or a bool [V] that is True where a token may be chosen.

    Returns:
        B ids and B log-probabilities, of the distribution after temperature, top_k, top_p, min_p
        and the mask. A greedy token has the one of softmax(logits) under the mask.
    """
    logits = logits.float()
    for row, mask in enumerate(allowed):
        if mask is not None:
            logits[row] = logits[row].masked_fill(~mask, float("-inf"))
    temperature = torch.tensor([s.temperature or 1.0 for s in settings], device=logits.device)
    logprobs = torch.log_softmax(logits / temperature.unsqueeze(1), dim=-1)
    for row, setting in enumerate(settings):
        if setting.top_k or setting.top_p < 1.0 or setting.min_p:
            logprobs[row] = _truncate(logprobs[row], setting)
    ids = _inverse_cdf(logprobs.exp(), torch.tensor(noise, device=logits.device))
    greedy = torch.tensor([s.temperature == 0.0 for s in settings], device=logits.device)
    if greedy.any():
        ids = torch.where(greedy, logits.argmax(-1), ids)
    picked = logprobs.gather(1, ids.unsqueeze(1)).squeeze(1)
    return ids.tolist(), picked.tolist()


def _truncate(logprobs: Tensor, setting: Sampling) -> Tensor:
    """[V] -> [V]: the kept tokens' log-probabilities, renormalised; the rest -inf."""
    kept = torch.ones_like(logprobs, dtype=torch.bool)
    if setting.min_p:
        kept &= logprobs >= logprobs.max() + float(np.log(setting.min_p))
    ordered, order = logprobs.sort(descending=True)
    if setting.top_k:
        kept[order[setting.top_k :]] = False
    if setting.top_p < 1.0:
        before = ordered.exp().cumsum(0) - ordered.exp()  # mass of more likely tokens
        kept[order[before >= setting.top_p]] = False
    return torch.log_softmax(logprobs.masked_fill(~kept, float("-inf")), dim=-1)


def _inverse_cdf(probs: Tensor, noise: Tensor) -> Tensor:
    """[B, V], [B] -> [B]: the token at which the cumulated probability passes the noise.

    Summed by folds first: a running sum over 10^5 float32 would lose the tail's digits.
    """
    batch, vocab = probs.shape
    padded = torch.nn.functional.pad(probs, (0, -vocab % _FOLD)).view(batch, -1, _FOLD)
    folds = padded.sum(-1).double().cumsum(-1)  # [B, V / FOLD]
    point = noise.double() * folds[:, -1]
    fold = (folds <= point.unsqueeze(1)).sum(-1).clamp_(max=folds.shape[1] - 1)
    rows = torch.arange(batch, device=probs.device)
    before = torch.where(fold > 0, folds[rows, (fold - 1).clamp_(min=0)], 0.0)
    inside = padded[rows, fold].double().cumsum(-1)
    rest = (point - before).unsqueeze(1)
    at = (inside <= rest).sum(-1)
    # Rounding may put the point past the fold's end: take its last token of any probability.
    last = (padded[rows, fold] > 0).long().mul(torch.arange(_FOLD, device=probs.device)).amax(-1)
    return fold * _FOLD + torch.minimum(at, last)
