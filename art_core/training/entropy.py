"""The policy's entropy: the bonus that holds it at a target, and the tokens where it is high.

In: entropies in nats. Out: the bonus's next weight; which tokens are left out.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from art_core.batch.forest import Float


@dataclass(frozen=True)
class EntropyBonus:
    """The weight of the bonus between two updates."""

    coef: float
    acts: bool
    """False: the entropy is above its target."""

    @property
    def weight(self) -> float:
        """What multiplies the mean entropy in the update to come."""
        return self.coef if self.acts else 0.0

    def after(self, entropy: float, *, target: float, step: float) -> EntropyBonus:
        """Having seen an update's mean entropy: Skywork-OR1 (arXiv:2505.22312, section 4).

        c <- c + step where the entropy is below the target, else c - step, never below 0; it acts
        while the entropy is not above.
        """
        change = step if entropy < target else -step
        return EntropyBonus(max(0.0, self.coef + change), entropy <= target)


def least_of_top(entropies: Float, share: float) -> float:
    """The entropy from which on a token is of the top `share` of all: 80/20 (arXiv:2506.01939)."""
    kept = max(1, round(share * len(entropies)))
    return float(np.partition(entropies, len(entropies) - kept)[len(entropies) - kept])
