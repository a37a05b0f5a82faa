"""Weights for the gap between the trainer and the sampler, whose numbers differ a little.

In: logprobs [E] of one policy, recomputed by the trainer (o) and as the sampler gave them (m). Out:
stop-gradient weights [E] that multiply the loss, from w = exp(o - m): of a token, of a call
(exp(sum)), or of a call by its mean token (exp(mean)).
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from art_core.training.sequence_losses import Calls


def token_ratio(old: Tensor, sampler: Tensor) -> Tensor:
    """w of each token (fengyao.notion.site/off-policy-rl)."""
    return torch.exp((old - sampler).detach())


def call_ratio(
    old: Tensor, sampler: Tensor, calls: Calls, level: Literal["sequence", "geometric"]
) -> Tensor:
    """w of each call, the same for all its tokens (yingru.notion.site): exp(sum) or exp(mean)."""
    gap = (old - sampler).detach()
    of_call = calls.sums(gap) if level == "sequence" else calls.means(gap)
    return calls.spread(torch.exp(of_call))


def truncated(ratio: Tensor, *, high: float) -> Tensor:
    """min(w, high): truncated importance sampling, TIS (high 2 to 10)."""
    return torch.clamp(ratio, max=high)


def masked(ratio: Tensor, *, low: float, high: float) -> Tensor:
    """w inside [low, high], else 0: MIS; with [.5, 5] on tokens IcePop (arXiv:2510.18855).

    TRL masks whole calls above 3, without a lower bound.
    """
    return torch.where((ratio >= low) & (ratio <= high), ratio, 0.0)
