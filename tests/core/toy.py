"""The toy of the published loss forms: two calls, their logprobs, and what a form makes of them.

seq1: A = +1, n = [-.5, -1], o = [-.9, -1.1], so rho = [1.491825, 1.105171];
seq2: A = -1, n = [-2, -.3, -1.2], o = [-1.5, -.3, -1.6], so rho = [.606531, 1, 1.491825].
Values and gradients that tests expect of it were computed from the papers' formulae in float64,
outside this repository.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from art_core.algorithms import Aggregation
from art_core.batch.weights import entry_weights
from art_core.training.policy_losses import Terms
from art_core.training.sequence_losses import Calls


def vector(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


NEW = vector(-0.5, -1.0, -2.0, -0.3, -1.2)
OLD = vector(-0.9, -1.1, -1.5, -0.3, -1.6)
SAMPLER = vector(-0.8, -2.0, -1.5, -0.4, -2.6)
REFERENCE = vector(-0.7, -0.8, -1.8, -0.5, -1.3)
ADVANTAGE = vector(1, 1, -1, -1, -1)
CALL = torch.tensor([7, 7, 3, 3, 3])
"""Numbers of a step's calls, in no order."""
CALLS = Calls.of(CALL, NEW)
LENGTHS = [2, 3]

Form = Callable[[Tensor], Terms]


def weights(aggregation: Aggregation = "token", horizon: int = 4) -> Tensor:
    """[5] share of each token."""
    found = entry_weights(LENGTHS, [0, 1], aggregation, horizon=horizon)
    return vector(*(w for w, n in zip(found, LENGTHS, strict=True) for _ in range(n)))


def gradient(loss: Callable[[Tensor], Tensor]) -> tuple[float, list[float]]:
    """The loss at NEW, and its gradient there."""
    new = NEW.clone().requires_grad_()
    value = loss(new)
    (found,) = torch.autograd.grad(value, new)
    return float(value.detach()), found.tolist()


def summed(
    form: Form, aggregation: Aggregation = "token", *, by: Tensor | None = None
) -> tuple[float, list[float]]:
    """The form's loss summed, and its gradient; `by` multiplies each token's."""
    factor = torch.ones(5, dtype=torch.float64) if by is None else by
    return gradient(lambda new: (weights(aggregation) * factor * form(new).loss).sum())


def tokens_cut(form: Form) -> Sequence[bool]:
    found: list[bool] = form(NEW).cut.tolist()
    return found
