"""How far the policy is from a reference: estimators of the KL, as a loss and in the advantage.

In: vectors [E] of the sampled tokens: n of the policy and f of the reference, d = n - f. Out: one
value a token. Estimators as in Schulman, "Approximating KL divergence" (joschu.net/blog/kl-approx).
"""

from __future__ import annotations

from torch import Tensor

from art_core.training.ratio import ratio


def k1(new: Tensor, reference: Tensor) -> Tensor:
    """d: unbiased in value. No loss: the expectation of its gradient is 0; it is for the reward."""
    return new - reference


def k2(new: Tensor, reference: Tensor) -> Tensor:
    """d^2 / 2: as a loss it has the reverse KL's own gradient where the data are on-policy."""
    return (new - reference) ** 2 / 2.0


def k3(new: Tensor, reference: Tensor) -> Tensor:
    """exp(-d) + d - 1: GRPO's (arXiv:2402.03300); never negative, its gradient is biased."""
    return ratio(reference, new) + new - reference - 1.0


def k3_weighted(new: Tensor, old: Tensor, reference: Tensor) -> Tensor:
    """rho k3, rho = exp(n - o) with its gradient: DeepSeek-V3.2's unbiased form (2512.02556)."""
    return ratio(new, old) * k3(new, reference)


def penalised(advantage: Tensor, gap: Tensor, *, coef: float) -> Tensor:
    """A - coef d: the KL in the reward (RLHF, arXiv:2203.02155).

    With A = 0 and coef 1 it is on-policy distillation, f - n, from the reference as teacher
    (thinkingmachines.ai/blog/on-policy-distillation).
    """
    return advantage - coef * gap


def centred(advantage: Tensor, gap: Tensor, mean_gap: Tensor | float, *, coef: float) -> Tensor:
    """A + coef (mean d - d): as `penalised`, but the step's sum of advantages stays. ART's form.

    Args:
        mean_gap: mean of d over all tokens of the step.
    """
    return advantage + coef * (mean_gap - gap)
