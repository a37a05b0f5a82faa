"""Policy losses that look at a call as a whole, which is what the papers call a sequence.

In: vectors [E] as in policy_losses.py, and `Calls`, which tokens are of one call. A call is never
parted over two rows, so that its means and sums are whole here. Out: `Terms`; each token of a call
carries the call's value, so that weights by sequence (`entry_weights`) give the mean over calls.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from art_core.training.policy_losses import Terms


@dataclass(frozen=True)
class Calls:
    """Which of E tokens belong together."""

    index: Tensor
    """[E] which call, 0..C-1."""
    lengths: Tensor
    """[C] tokens of each, 1 or more; of the loss's dtype."""

    @classmethod
    def of(cls, names: Tensor, like: Tensor) -> Calls:
        """names: [E] any number that is a call's own; like: of the dtype to compute in."""
        _, index, counts = torch.unique(names, return_inverse=True, return_counts=True)
        return cls(index, counts.to(like.dtype))

    def sums(self, values: Tensor) -> Tensor:
        """[E] -> [C]."""
        return torch.zeros_like(self.lengths).index_add(0, self.index, values)

    def means(self, values: Tensor) -> Tensor:
        """[E] -> [C]."""
        return self.sums(values) / self.lengths

    def spread(self, values: Tensor) -> Tensor:
        """[C] -> [E]: each token gets its call's value."""
        return values[self.index]


def gspo(
    new: Tensor, old: Tensor, advantage: Tensor, calls: Calls, *, low: float, high: float
) -> Terms:
    """-min(s A, clip(s, 1 - low, 1 + high) A), s = exp(mean(n - o)) of the call.

    GSPO (arXiv:2507.18071; there 3e-4 and 4e-4, since s moves far less than a token's ratio).
    """
    ratio = calls.spread(torch.exp(calls.means(new - old)))
    return _clipped(ratio, advantage, low, high)


def gspo_token(
    new: Tensor, old: Tensor, advantage: Tensor, calls: Calls, *, low: float, high: float
) -> Terms:
    """As `gspo`, with s_t = sg(s) exp(n - sg(n)): its section 4.3, for advantages of a token's own.

    Where all tokens of a call have one advantage, it is `gspo`, in value and gradient.
    """
    ratio = calls.spread(torch.exp(calls.means(new - old))).detach()
    return _clipped(ratio * torch.exp(new - new.detach()), advantage, low, high)


def luspo(
    new: Tensor, old: Tensor, advantage: Tensor, calls: Calls, *, low: float, high: float
) -> Terms:
    """`gspo` times the call's length, so that long calls are not favoured.

    LUSPO (arXiv:2602.05261; there 2e-3 and 2.5e-3).
    """
    terms = gspo(new, old, advantage, calls, low=low, high=high)
    return Terms(calls.spread(calls.lengths) * terms.loss, terms.cut)


def gmpo(
    new: Tensor, old: Tensor, advantage: Tensor, calls: Calls, *, low: float, high: float
) -> Terms:
    """-A exp(mean(d)), d = n - o, at most `high` where A > 0 and at least -`low` where A < 0.

    GMPO, the geometric mean of clipped ratios (arXiv:2507.20673; there .4). On the very bound the
    gradient passes, as torch.clamp's does.
    """
    log_ratio = new - old
    held = torch.where(
        advantage > 0, torch.clamp(log_ratio, max=high), torch.clamp(log_ratio, min=-low)
    )
    ratio = calls.spread(torch.exp(calls.means(held)))
    return Terms(-advantage * ratio, held.detach() != log_ratio.detach())


def vespo(
    new: Tensor,
    old: Tensor,
    advantage: Tensor,
    calls: Calls,
    *,
    up: tuple[float, float],
    down: tuple[float, float],
) -> Terms:
    """-sg(W^k exp(l (1 - W))) A n, W = exp(sum(n - o)) of the call: VESPO (arXiv:2602.10693).

    (k, l) are `up` where A > 0 and `down` elsewhere (there 2, 3 and 3, 2). Smooth, and falling for
    calls that have become likelier or unlikelier by far.
    """
    with torch.no_grad():
        log_w = calls.spread(calls.sums(new - old))
        power = torch.where(advantage > 0, new.new_tensor(up[0]), new.new_tensor(down[0]))
        fall = torch.where(advantage > 0, new.new_tensor(up[1]), new.new_tensor(down[1]))
        weight = torch.exp(power * log_w + fall * (1.0 - torch.exp(log_w)))
    return Terms(-weight * advantage * new, torch.zeros_like(new, dtype=torch.bool))


def drifted(new: Tensor, old: Tensor, advantage: Tensor, calls: Calls, *, delta: float) -> Tensor:
    """[E] bool: tokens of calls with A < 0 that the policy has left: mean(o - n) > delta.

    The off-policy sequence mask of DeepSeek-V3.2 (arXiv:2512.02556): pushing such calls down
    further teaches nothing and breaks things.
    """
    with torch.no_grad():
        far = calls.means(old - new) > delta
        return calls.spread(far) & (advantage < 0)


def _clipped(ratio: Tensor, advantage: Tensor, low: float, high: float) -> Terms:
    inside = torch.clamp(ratio, 1.0 - low, 1.0 + high)
    gain = torch.minimum(ratio * advantage, inside * advantage)
    with torch.no_grad():
        cut = inside * advantage < ratio * advantage
    return Terms(-gain, cut)
