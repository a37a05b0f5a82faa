"""What turns hidden states into logits: the output matrix and what a model does after it.

In: a loaded model's output matrix and config, and logits that the model itself gave. Out: a `Head`
that gives the same; some models scale their logits or cap them softly, under names of their own, so
the right way is found by comparing. It leaves out which positions are wanted.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn

from art_core.errors import BaseModelError
from art_core.nn.linear import input_gradient

_FACTORS = ("logit_scale", "logits_scaling", "lm_head_multiplier", "output_multiplier")
"""Settings by which models multiply or divide their logits."""
_CAPS = ("final_logit_softcapping", "logits_soft_cap", "softcap")


@dataclass(frozen=True, eq=False)
class Head:
    """logits = cap * tanh(scale * matrix(hidden) / cap); without a cap, scale * matrix(hidden)."""

    matrix: nn.Linear
    scale: float = 1.0
    cap: float | None = None

    @property
    def weight(self) -> Tensor:
        """[V, H]."""
        return self.matrix.weight

    def logits(self, hidden: Tensor) -> Tensor:
        """[n, H] -> [n, V]."""
        logits = cast(Tensor, self.matrix(hidden))
        if self.scale != 1.0:
            logits = logits * self.scale
        if self.cap is not None:
            logits = torch.tanh(logits / self.cap) * self.cap
        return logits

    def pull(self, gradient: Tensor) -> Tensor:
        """[n, V] gradient of what the matrix gave -> [n, H] gradient of the hidden states."""
        return input_gradient(self.matrix, gradient)


def find_head(
    matrix: nn.Linear, config: Any, hidden: Tensor, logits: Tensor, *, tolerance: float
) -> Head:
    """The head that makes the model's own `logits` [n, V] of `hidden` [n, H].

    tolerance: relative to the largest logit.

    Raises:
        BaseModelError: none does.
    """

    def miss(head: Head) -> float:
        return float((head.logits(hidden) - logits).abs().max() / logits.abs().max())

    candidates = [Head(matrix, scale, cap) for cap in _caps(config) for scale in _scales(config)]
    with torch.no_grad():
        best = min(candidates, key=miss)
        error = miss(best)
    if not error <= tolerance:
        raise BaseModelError(
            "the model makes its logits in a way that is not known here",
            got=f"{type(config).__name__}, {error:.1e} beside the nearest known way",
            expected="an output matrix, with a factor or a soft cap behind it",
            fix="Choose another base model.",
        )
    return best


def _scales(config: Any) -> Iterator[float]:
    for name in _FACTORS:
        value = getattr(config, name, None)
        if isinstance(value, (int, float)) and value not in (0, 1):
            yield 1 / value
            yield value
    yield 1.0


def _caps(config: Any) -> Iterator[float | None]:
    for name in _CAPS:
        value = getattr(config, name, None)
        if isinstance(value, (int, float)) and value > 0:
            yield value
    yield None
