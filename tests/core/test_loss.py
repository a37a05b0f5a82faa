"""The policy loss on the toy of the algorithms page: two sequences, values by float64 autograd.

seq1: A = +1, n = [-.5, -1], o = [-.9, -1.1], so rho = [1.491825, 1.105171];
seq2: A = -1, n = [-2, -.3, -1.2], o = [-1.5, -.3, -1.6], so rho = [.606531, 1, 1.491825].
"""

import math
from typing import Literal, TypeAlias

import pytest
import torch
from torch import Tensor

from art_core.batch.advantages import entry_weights
from art_core.training.loss import LossParts, clipped_policy_loss

Aggregation: TypeAlias = Literal["token", "sequence", "rollout"]

NEW = [-0.5, -1.0, -2.0, -0.3, -1.2]
OLD = [-0.9, -1.1, -1.5, -0.3, -1.6]
ADVANTAGES = [1.0, 1.0, -1.0, -1.0, -1.0]
LENGTHS = [2, 3]


def vector(values: list[float]) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def toy(
    aggregation: Aggregation,
    epsilon_high: float,
    *,
    entropies: Tensor | None = None,
    coef: float = 0.0,
) -> tuple[LossParts, list[float]]:
    """The toy's loss and its gradient by n."""
    weights = entry_weights(LENGTHS, [0, 1], aggregation)
    spread = [w for w, n in zip(weights, LENGTHS, strict=True) for _ in range(n)]
    new = vector(NEW).requires_grad_()
    parts = clipped_policy_loss(
        new,
        torch.zeros(5, dtype=torch.float64) if entropies is None else entropies,
        vector(OLD),
        vector(ADVANTAGES),
        vector(spread),
        epsilon=0.2,
        epsilon_high=epsilon_high,
        entropy_coef=coef,
    )
    (gradient,) = torch.autograd.grad(parts.loss, new)
    return parts, gradient.tolist()


@pytest.mark.parametrize(
    ("aggregation", "epsilon_high", "loss", "gradient"),
    [
        pytest.param(
            "sequence",
            0.2,
            -0.027655,
            [0, -0.276293, 0, 0.166667, 0.248637],
            id="GRPO, by sequence",
        ),
        pytest.param("token", 0.2, 0.197331, [0, -0.221034, 0, 0.2, 0.298365], id="GRPO, by token"),
        pytest.param("token", 0.28, 0.181331, [0, -0.221034, 0, 0.2, 0.298365], id="DAPO"),
        pytest.param(
            "rollout", 0.2, -0.027655, [0, -0.276293, 0, 0.166667, 0.248637], id="GRPO, by rollout"
        ),
    ],
)
def test_toy(
    aggregation: Aggregation, epsilon_high: float, loss: float, gradient: list[float]
) -> None:
    parts, got = toy(aggregation, epsilon_high)
    assert float(parts.loss.detach()) == pytest.approx(loss, abs=5e-7)
    assert got == pytest.approx(gradient, abs=5e-7)


def test_figures_to_log() -> None:
    """The clip took the gradient of the first entry (rho 1.49 > 1.2, A > 0) and of the third
    (rho .61 < .8, A < 0): 2 of 5. k3 of old against new is exp(n - o) - (n - o) - 1, by hand
    [.091825, .005171, .106531, 0, .091825], mean .059070.
    """
    parts, _ = toy("token", 0.2)
    assert parts.clipped == pytest.approx(0.4, abs=1e-12)
    assert parts.kl == pytest.approx(0.059070, abs=5e-7)
    assert parts.entropy == 0.0


def test_entropy_is_maximised() -> None:
    """Mean entropy (1 + 2 + 3 + 4 + 5) / 5 = 3, times .1, off the loss; gradient -.1 / 5 each."""
    entropies = vector([1.0, 2.0, 3.0, 4.0, 5.0]).requires_grad_()
    parts, _ = toy("token", 0.2, entropies=entropies, coef=0.1)
    assert float(parts.loss.detach()) == pytest.approx(0.197331 - 0.3, abs=5e-7)
    assert parts.entropy == pytest.approx(3.0, abs=1e-12)
    fresh = vector([1.0, 2.0, 3.0, 4.0, 5.0]).requires_grad_()
    loss = clipped_policy_loss(
        vector(NEW), fresh, vector(OLD), vector(ADVANTAGES), vector([0.2] * 5),
        epsilon=0.2, epsilon_high=0.2, entropy_coef=0.1,
    ).loss  # fmt: skip
    (gradient,) = torch.autograd.grad(loss, fresh)
    assert gradient.tolist() == pytest.approx([-0.02] * 5, abs=1e-12)


def test_samples_on_one_position_never_cancel() -> None:
    """A = +1 and A = -1 on one token, ratio 1.5, clip .2: losses -1.2 (no gradient) and +1.5
    (gradient 1.5); with the advantages summed first there would be none at all.
    """
    shared = torch.tensor(math.log(1.5), dtype=torch.float64, requires_grad=True)
    parts = clipped_policy_loss(
        shared.expand(2), vector([0, 0]), vector([0, 0]), vector([1, -1]), vector([1, 1]),
        epsilon=0.2, epsilon_high=0.2, entropy_coef=0.0,
    )  # fmt: skip
    (gradient,) = torch.autograd.grad(parts.loss, shared)
    assert float(parts.loss.detach()) == pytest.approx(-1.2 + 1.5, abs=1e-12)
    assert float(gradient) == pytest.approx(1.5, abs=1e-12)


@pytest.mark.parametrize("cut", [[5], [2, 3], [1, 2, 2], [1, 1, 1, 1, 1]])
def test_the_sum_over_rows_is_the_loss(cut: list[int]) -> None:
    """Case 088: however the entries are dealt to rows, loss, figures and gradient are the same."""
    whole, expected = toy("token", 0.2)
    new = vector(NEW).requires_grad_()
    old, advantages, weights = vector(OLD), vector(ADVANTAGES), vector([0.2] * 5)
    total, clipped, kl, at = 0.0, 0.0, 0.0, 0
    for size in cut:
        row = slice(at, at + size)
        at += size
        parts = clipped_policy_loss(
            new[row], torch.zeros(size, dtype=torch.float64), old[row], advantages[row],
            weights[row], epsilon=0.2, epsilon_high=0.2, entropy_coef=0.0,
        )  # fmt: skip
        parts.loss.backward()
        total += float(parts.loss.detach())
        clipped += parts.clipped
        kl += parts.kl
    assert new.grad is not None
    assert total == pytest.approx(float(whole.loss.detach()), abs=1e-15)
    assert (clipped, kl) == pytest.approx((whole.clipped, whole.kl), abs=1e-15)
    assert new.grad.tolist() == pytest.approx(expected, abs=1e-15)
