"""Policy losses that look at one token at a time. Pure functions.

In: vectors [E] of one value a token: the trainer's logprob n, the old logprob o, the advantage A.
rho = exp(n - o). Out: `Terms`, whose loss is to be summed with the tokens' weights and minimised.
Tokens keep their own advantage, so that two samples of one position never cancel before a clip.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from art_core.training.ratio import ratio as ratio_of


@dataclass(frozen=True)
class Terms:
    """A loss before it is summed."""

    loss: Tensor
    """[E], with gradient."""
    cut: Tensor
    """[E] bool: tokens that the form shut out, so that their gradient is 0 or that of a cap."""


def reinforce(new: Tensor, advantage: Tensor) -> Terms:
    """-A n (Williams 1992; for language models RLOO, arXiv:2402.14740)."""
    return Terms(-advantage * new, _none(new))


def clipped(
    new: Tensor,
    old: Tensor,
    advantage: Tensor,
    *,
    low: float,
    high: float,
    cap: float | None = None,
) -> Terms:
    """-min(rho A, clip(rho, 1 - low, 1 + high) A): PPO's clip (arXiv:1707.06347, eq. 7).

    high > low is DAPO's clip-higher (arXiv:2503.14476). `cap` bounds the ratio in the arm that is
    not clipped, against huge ratios where A < 0: the two-sided clip (INTELLECT-2,
    arXiv:2505.07291, there 4).
    """
    ratio = ratio_of(new, old)
    inside = torch.clamp(ratio, 1.0 - low, 1.0 + high)
    free = ratio if cap is None else torch.clamp(ratio, max=cap)
    gain = torch.minimum(free * advantage, inside * advantage)
    with torch.no_grad():
        cut = inside * advantage < free * advantage
        if cap is not None:
            cut = cut | ((advantage < 0) & (ratio > cap))
    return Terms(-gain, cut)


def cispo(new: Tensor, old: Tensor, advantage: Tensor, *, low: float, high: float) -> Terms:
    """-sg(clip(rho, 1 - low, 1 + high)) A n: CISPO (arXiv:2506.13585).

    No token loses its gradient, its weight is only bounded. ScaleRL (arXiv:2510.13786) and ART cap
    the ratio at 5 and leave it free below (low 1, high 4).
    """
    with torch.no_grad():
        ratio = ratio_of(new, old)
        weight = torch.clamp(ratio, 1.0 - low, 1.0 + high)
    return Terms(-weight * advantage * new, weight != ratio)


def sapo(new: Tensor, old: Tensor, advantage: Tensor, *, up: float, down: float) -> Terms:
    """-(4 / tau) sigmoid(tau (rho - 1)) A: SAPO's soft gate (arXiv:2511.20347).

    tau is `up` where A > 0 and `down` elsewhere (there 1 and 1.05).
    """
    ratio = ratio_of(new, old)
    tau = torch.where(advantage > 0, new.new_tensor(up), new.new_tensor(down))
    return Terms(-(4.0 / tau) * torch.sigmoid(tau * (ratio - 1.0)) * advantage, _none(new))


def dppo(
    new: Tensor, old: Tensor, advantage: Tensor, *, low: float, high: float, tau: float
) -> Terms:
    """-A rho + tau (n - o)^2, the first part only inside a trust region: DPPO (arXiv:2602.04879).

    With p = exp(n), q = exp(o), the binary total variation: a token is out where A > 0 and
    p - q > high, or A < 0 and p - q < -low. So a rare token may change by far in ratio, a frequent
    one not. (There .2 and .2; tau 1e-3 as in prime-rl.)
    """
    with torch.no_grad():
        moved = torch.exp(new) - torch.exp(old)
        out = ((advantage > 0) & (moved > high)) | ((advantage < 0) & (moved < -low))
    log_ratio = new - old
    ratio = torch.exp(torch.where(out, 0.0, log_ratio))  # what is out may not overflow
    gain = torch.where(out, 0.0, advantage * ratio)
    return Terms(tau * log_ratio * log_ratio - gain, out)


def spo(new: Tensor, old: Tensor, advantage: Tensor, *, epsilon: float) -> Terms:
    """-(rho A - |A| (rho - 1)^2 / (2 epsilon)): SPO's quadratic instead of a clip.

    Simple Policy Optimization, arXiv:2401.16025; best at rho = 1 +- epsilon, with gradient on both
    sides.
    """
    ratio = ratio_of(new, old)
    return Terms(_spo(ratio, advantage, epsilon, 1.0), _none(new))


def drpo(new: Tensor, old: Tensor, advantage: Tensor, *, epsilon: float) -> Terms:
    """As `spo`, the quadratic weighted by exp(o): DRPO (arXiv:2606.09821), read from its abstract.

    So rare tokens are held less.
    """
    ratio = ratio_of(new, old)
    return Terms(_spo(ratio, advantage, epsilon, torch.exp(old)), _none(new))


def decoupled(
    new: Tensor,
    old: Tensor,
    advantage: Tensor,
    staleness: Tensor,
    *,
    low: float,
    high: float,
) -> Terms:
    """-sg(exp(p - o)) min(u A, clip(u) A), u = exp(n - p): PPO about a proximal policy p.

    Decoupled PPO (arXiv:2110.00641) asks for p's logprobs; A-3PO (arXiv:2512.06547) puts p on the
    line from n to o, at o for calls of the step before and nearer to n the staler they are.

    Args:
        staleness: [E] steps; up to 1, p is o and the loss that of `clipped`.
    """
    near_old = 1.0 / torch.clamp(staleness, min=1.0)
    proximal = (near_old * old + (1.0 - near_old) * new).detach()
    terms = clipped(new, proximal, advantage, low=low, high=high)
    return Terms(ratio_of(proximal, old) * terms.loss, terms.cut)


def kimi_advantage(new: Tensor, old: Tensor, advantage: Tensor, *, tau: float) -> Tensor:
    """A - tau sg(n - o): Kimi K2's pull to the old policy (arXiv:2507.20534), as ART applies it."""
    return advantage - tau * (new - old).detach()


def _spo(ratio: Tensor, advantage: Tensor, epsilon: float, hold: Tensor | float) -> Tensor:
    return advantage.abs() * hold * (ratio - 1.0) ** 2 / (2.0 * epsilon) - ratio * advantage


def _none(new: Tensor) -> Tensor:
    return torch.zeros_like(new, dtype=torch.bool)
