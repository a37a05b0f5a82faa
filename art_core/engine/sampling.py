"""From logits to sampled ids, with the log-probability under the distribution sampled from.

In: logits of the sequences decoded together, each with its own settings, noise and mask. Out: one
id and one natural-log probability each. A token's noise is a function of (seed, index of the
token) alone, so a sequence does not depend on what it was batched with beyond float noise.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from art_core.calls import Sampling
from art_core.errors import EngineError

_FOLD = 256
"""Vocabulary entries whose probability is summed before the choice among them."""
_NUCLEUS = 1024
"""Most likely tokens that are looked at first where top_p is asked for: sorting all is slow."""
_COLDEST = 1e-6
"""Lower temperatures count as this one; logits divided by less would overflow."""


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
        B ids and B log-probabilities, of the distribution after the mask, temperature, min_p,
        top_k and top_p, each over what the one before it left. A greedy token has the one of
        softmax(logits) under the mask.

    Raises:
        EngineError: logits are not finite, or a mask allows nothing.
    """
    scores = _masked(logits, allowed)
    probs = torch.softmax(_tempered(scores, settings), dim=-1)
    greedy = [setting.temperature == 0.0 for setting in settings]
    for row, setting in enumerate(settings):
        if not greedy[row]:
            _truncate(probs[row], setting)
    ids = _inverse_cdf(probs, torch.tensor(noise, dtype=torch.float64, device=logits.device))
    if any(greedy):
        ids = torch.where(torch.tensor(greedy, device=logits.device), scores.argmax(-1), ids)
    picked: list[float] = probs.gather(1, ids.unsqueeze(1)).squeeze(1).log().tolist()
    if not all(map(math.isfinite, picked)):
        raise EngineError(
            "the model's logits are not finite, or no token is allowed",
            got=[value for value in picked if not math.isfinite(value)],
            expected="finite log-probabilities",
            fix="Check the adapter's weights; a lower learning rate keeps them finite.",
        )
    return ids.tolist(), picked


def _masked(logits: Tensor, allowed: Sequence[Tensor | None]) -> Tensor:
    """[B, V] -> [B, V] in at least single precision, -inf where a token may not be chosen."""
    scores = logits if logits.dtype == torch.float64 else logits.float()
    if any(mask is not None for mask in allowed):
        scores = scores.clone()
        for row, mask in enumerate(allowed):
            if mask is not None:
                scores[row].masked_fill_(~mask, -math.inf)
    return scores


def _tempered(scores: Tensor, settings: Sequence[Sampling]) -> Tensor:
    """[B, V] -> [B, V]; greedy rows stay as they are."""
    temperatures = [max(s.temperature, _COLDEST) if s.temperature else 1.0 for s in settings]
    if all(temperature == 1.0 for temperature in temperatures):
        return scores
    return scores / scores.new_tensor(temperatures).unsqueeze(1)


def _truncate(probs: Tensor, setting: Sampling) -> None:
    """Leave min_p, top_k and top_p of probs [V], in place and renormalised; the rest is 0."""
    if setting.min_p:
        probs.masked_fill_(probs < probs.max() * setting.min_p, 0.0)
    if 0 < setting.top_k < len(probs):
        _keep(probs, probs.topk(setting.top_k).indices)
    if setting.top_p < 1.0:
        _keep(probs, _nucleus(probs / probs.sum(), setting.top_p))
    if setting.min_p or setting.top_k or setting.top_p < 1.0:
        probs.div_(probs.sum())


def _keep(probs: Tensor, tokens: Tensor) -> None:
    kept = probs[tokens]
    probs.zero_()
    probs[tokens] = kept


def _nucleus(probs: Tensor, top_p: float) -> Tensor:
    """[V] -> the most likely tokens, up to and with the one at which their mass reaches top_p."""
    size = min(_NUCLEUS, len(probs))
    while True:
        mass, tokens = probs.topk(size)
        above = mass.cumsum(0, dtype=torch.float64) - mass  # mass of the more likely tokens
        if size == len(probs) or above[-1] >= top_p:
            return tokens[above < top_p]
        size = min(8 * size, len(probs))


def _inverse_cdf(probs: Tensor, noise: Tensor) -> Tensor:
    """[B, V], [B] -> [B]: the token at which the cumulated probability passes the noise.

    Summed by folds first: a running sum over 10^5 float32 would lose the tail's digits.
    """
    batch, vocab = probs.shape
    padded = torch.nn.functional.pad(probs, (0, -vocab % _FOLD)).view(batch, -1, _FOLD)
    folds = padded.sum(-1).cumsum(-1, dtype=torch.float64)  # [B, V / FOLD]
    point = noise * folds[:, -1]
    fold = _passing(folds, point)
    rows = torch.arange(batch, device=probs.device)
    before = torch.where(fold > 0, folds[rows, (fold - 1).clamp_(min=0)], 0.0)
    inside = padded[rows, fold].cumsum(-1, dtype=torch.float64)
    return fold * _FOLD + _passing(inside, point - before)


def _passing(sums: Tensor, point: Tensor) -> Tensor:
    """[B, n], [B] -> [B]: where the running sums pass the point.

    Rounding may put the point past their end: then it is the last place that adds anything.
    """
    passed = (sums <= point.unsqueeze(1)).sum(-1)
    return torch.minimum(passed, (sums < sums[:, -1:]).sum(-1))
