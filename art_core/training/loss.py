"""The loss of a row, put together as `TrainConfig` says.

In: `Tokens`, what is known of each sampled token of a row. Out: `LossParts`, the sum to minimise
and figures to log; the parts of all rows of an update add up, however the rows are cut. The forms
are in policy_losses.py, sequence_losses.py, mismatch.py and kl.py.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from art_core.config import TrainConfig
from art_core.training import kl, mismatch, policy_losses, sequence_losses
from art_core.training.policy_losses import Terms
from art_core.training.ratio import is_beyond
from art_core.training.ratio import ratio as ratio_of
from art_core.training.sequence_losses import Calls


@dataclass(frozen=True)
class Tokens:
    """Vectors [E] of one value per loss entry."""

    new: Tensor
    """The trainer's logprob, with gradient."""
    entropy: Tensor
    """Nats, with gradient."""
    old: Tensor
    """Logprob that the ratio is against."""
    advantage: Tensor
    weight: Tensor
    """Share in the step's loss."""
    call: Tensor
    """A number that is the call's own; all tokens of a call are here."""
    sampler: Tensor | None = None
    """Logprob of the sampler, `old` where none is to be weighted for the gap; None: as `old`."""
    reference: Tensor | None = None
    """Logprob of the reference policy; None: there is no KL in the loss."""
    staleness: Tensor | None = None
    """Steps; None: 0."""
    left_out: Tensor | None = None
    """bool: tokens that the policy loss does not look at; None: none."""

    @cached_property
    def calls(self) -> Calls:
        """Made when first asked for: most forms look at one token at a time."""
        return Calls.of(self.call, self.new)


@dataclass(frozen=True)
class LossParts:
    """Of the entries given."""

    loss: Tensor
    """Scalar with gradient."""
    sums: dict[str, Tensor]
    """Weighted sums to log, without gradient: "entropy" in nats; "clipped", entries that the form
    shut out; "kl", the k3 estimate of KL(old || new). Where they are computed: "kl_sampler", the
    same of KL(sampler || old), "kl_reference", of KL(new || reference), and "mismatch_weight".
    """
    ratio_min: Tensor
    ratio_max: Tensor
    """At most e^20."""
    beyond: Tensor
    """How many entries were left out of the policy loss or the KL for a ratio above e^20."""
    observed: Tensor | None = None
    """Scalar without gradient: the part of `loss` that is the cross-entropy of what was observed.
    None: nothing was."""


def row_loss(
    tokens: Tokens, config: TrainConfig, *, entropy_coef: float | None = None
) -> LossParts:
    """Sum of weight * (mismatch weight * policy loss - entropy_coef * H + kl_penalty_coef * KL).

    Args:
        entropy_coef: instead of that of `config`.
    """
    policy, sums, beyond = _policy(tokens, config)
    each = policy.loss
    coef = config.entropy_coef if entropy_coef is None else entropy_coef
    if coef:
        each = each - coef * tokens.entropy
    if tokens.reference is not None and config.kl_penalty_coef:
        penalty, far = _reference_kl(tokens, tokens.reference, config)
        each = each + config.kl_penalty_coef * penalty
        beyond = beyond | far
    loss = (tokens.weight * each).sum()
    with torch.no_grad():
        log_ratio = tokens.new - tokens.old
        ratio = ratio_of(tokens.new, tokens.old)
        sums |= {
            "entropy": tokens.entropy,
            "clipped": policy.cut.to(tokens.weight.dtype),
            "kl": ratio - log_ratio - 1.0,
        }
        if tokens.reference is not None:
            sums["kl_reference"] = kl.k3(tokens.new, tokens.reference)
        return LossParts(
            loss=loss,
            sums={name: (tokens.weight * value).sum() for name, value in sums.items()},
            ratio_min=ratio.min(),
            ratio_max=ratio.max(),
            beyond=beyond.sum(),
        )


def cross_entropy(logprobs: Tensor, weight: Tensor) -> Tensor:
    """-sum(weight * n): of what the environment said, ECHO's second loss (arXiv:2605.24517)."""
    return -(weight * logprobs).sum()


def _policy(tokens: Tokens, config: TrainConfig) -> tuple[Terms, dict[str, Tensor], Tensor]:
    """The policy loss, weighted for the sampler's gap; vectors to log; and which entries are left
    out for their ratio.
    """
    out = _out_by_choice(tokens, config)
    beyond = _unbounded(tokens, config) & ~out
    out = out | beyond
    # At the old policy nothing is too big to be multiplied by 0.
    terms = _form(replace(tokens, new=torch.where(out, tokens.old, tokens.new)), config)
    terms = Terms(torch.where(out, 0.0, terms.loss), terms.cut | out)
    if tokens.sampler is None:
        return terms, {}, beyond
    sums = {"kl_sampler": kl.k3(tokens.sampler, tokens.old)}
    if config.mismatch != "none":
        weight = _mismatch(tokens, tokens.sampler, config)
        terms = Terms(weight * terms.loss, terms.cut | (weight == 0))
        sums["mismatch_weight"] = weight
    return terms, sums, beyond


def _out_by_choice(tokens: Tokens, config: TrainConfig) -> Tensor:
    """[E] bool: entries that the settings leave out of the policy loss."""
    out = tokens.left_out
    if out is None:
        out = torch.zeros_like(tokens.new, dtype=torch.bool)
    if config.off_policy_delta is not None:
        far = sequence_losses.drifted(
            tokens.new, tokens.old, tokens.advantage, tokens.calls, delta=config.off_policy_delta
        )
        out = out | far
    return out


def _unbounded(t: Tokens, config: TrainConfig) -> Tensor:
    """[E] bool: entries whose ratio is above e^20 and counts in full, so that they would be the
    whole gradient, or make it infinite. Where the form bounds the ratio, they are trained.
    """
    far = is_beyond(t.new, t.old)
    match config.loss_fn:
        case "reinforce" | "cispo" | "sapo" | "vespo":
            return torch.zeros_like(far)
        case "ppo" if config.max_negative_advantage_importance_sampling_weight is not None:
            return torch.zeros_like(far)
        case "ppo" | "gmpo":  # where the advantage is positive, the bound takes their gradient
            return far & (_advantage(t, config) < 0)
        case _:
            return far


def _advantage(t: Tokens, config: TrainConfig) -> Tensor:
    """With what comes off each token's for its own ratio."""
    if config.kimi_k2_tau is None:
        return t.advantage
    return policy_losses.kimi_advantage(t.new, t.old, t.advantage, tau=config.kimi_k2_tau)


def _form(t: Tokens, config: TrainConfig) -> Terms:
    """The policy loss that `config.loss_fn` names."""
    low, high = config.bounds
    a = _advantage(t, config)
    match config.loss_fn:
        case "ppo":
            cap = config.max_negative_advantage_importance_sampling_weight
            return policy_losses.clipped(t.new, t.old, a, low=low, high=high, cap=cap)
        case "reinforce":
            return policy_losses.reinforce(t.new, a)
        case "cispo":
            return policy_losses.cispo(t.new, t.old, a, low=low, high=high)
        case "sapo":
            up, down = config.sapo_tau
            return policy_losses.sapo(t.new, t.old, a, up=up, down=down)
        case "dppo":
            tau = config.dppo_tau
            return policy_losses.dppo(t.new, t.old, a, low=low, high=high, tau=tau)
        case "spo":
            return policy_losses.spo(t.new, t.old, a, epsilon=low)
        case "drpo":
            return policy_losses.drpo(t.new, t.old, a, epsilon=low)
        case "decoupled":
            stale = torch.zeros_like(t.new) if t.staleness is None else t.staleness
            return policy_losses.decoupled(t.new, t.old, a, stale, low=low, high=high)
        case "gspo":
            return sequence_losses.gspo(t.new, t.old, a, t.calls, low=low, high=high)
        case "gspo_token":
            return sequence_losses.gspo_token(t.new, t.old, a, t.calls, low=low, high=high)
        case "luspo":
            return sequence_losses.luspo(t.new, t.old, a, t.calls, low=low, high=high)
        case "gmpo":
            return sequence_losses.gmpo(t.new, t.old, a, t.calls, low=low, high=high)
        case "vespo":
            up_shape, down_shape = config.vespo_shape
            return sequence_losses.vespo(t.new, t.old, a, t.calls, up=up_shape, down=down_shape)


def _mismatch(tokens: Tokens, sampler: Tensor, config: TrainConfig) -> Tensor:
    level = config.mismatch_level
    if level == "token":
        ratio = mismatch.token_ratio(tokens.old, sampler)
    else:
        ratio = mismatch.call_ratio(tokens.old, sampler, tokens.calls, level)
    if config.mismatch == "truncate":
        return mismatch.truncated(ratio, high=config.mismatch_high)
    return mismatch.masked(ratio, low=config.mismatch_low, high=config.mismatch_high)


def _reference_kl(tokens: Tokens, reference: Tensor, config: TrainConfig) -> tuple[Tensor, Tensor]:
    """The KL to the reference [E], and which entries are left out for a ratio in it."""
    new, old = tokens.new, tokens.old
    far = is_beyond(reference, new)
    match config.kl_penalty:
        case "k2":
            return kl.k2(new, reference), torch.zeros_like(far)
        case "k3":
            penalty = kl.k3(new, reference)
        case "k3_weighted":
            far = far | is_beyond(new, old)
            penalty = kl.k3_weighted(new, old, reference)
        case _:
            raise AssertionError(f"{config.kl_penalty} counts in the advantage")
    return torch.where(far, 0.0, penalty), far
