"""The policy loss as a pure function of log-probabilities.

In: per entry the trainer's logprob n and entropy, the old logprob o, advantage A and weight w (the
entry's share of the step). Out: the loss to minimise and figures to log.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class LossParts:
    """Sums over the entries given; add the parts of all rows to get the step's figures."""

    loss: Tensor
    """Scalar with gradient."""
    entropy: float
    """Weighted, in nats."""
    clipped: float
    """Weighted share of entries whose gradient the clip removed."""
    kl: float
    """Weighted k3 estimate of KL(old || new): exp(n - o) - (n - o) - 1, in nats."""


def clipped_policy_loss(
    logprobs: Tensor,
    entropies: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    weights: Tensor,
    *,
    epsilon: float,
    epsilon_high: float,
    entropy_coef: float,
) -> LossParts:
    """Sum of w * (-min(rho A, clip(rho, 1 - epsilon, 1 + epsilon_high) A) - entropy_coef * H).

    rho = exp(n - o). PPO's clip (Schulman et al. 2017, arXiv:1707.06347, eq. 7) with GRPO's
    advantages (arXiv:2402.03300); epsilon_high > epsilon is DAPO's clip-higher (arXiv:2503.14476).
    Entries keep their own advantage: two samples of one position never cancel before the clip.

    Args:
        logprobs, entropies, old_logprobs, advantages, weights: [E].
    """
    ratio = torch.exp(logprobs - old_logprobs)
    clipped = torch.clamp(ratio, 1.0 - epsilon, 1.0 + epsilon_high)
    gain = torch.minimum(ratio * advantages, clipped * advantages)
    loss = -(weights * (gain + entropy_coef * entropies)).sum()
    with torch.no_grad():
        cut = (clipped * advantages < ratio * advantages).to(weights.dtype)
        log_ratio = logprobs - old_logprobs
        return LossParts(
            loss=loss,
            entropy=float((weights * entropies).sum()),
            clipped=float((weights * cut).sum()),
            kl=float((weights * (ratio - log_ratio - 1.0)).sum()),
        )
