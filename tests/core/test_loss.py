"""The loss of a row as settings put it together, on the toy; the forms have tests of their own."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from art_core.config import TrainConfig
from art_core.training.loss import LossParts, Tokens, row_loss
from tests.core.toy import (
    ADVANTAGE,
    CALL,
    NEW,
    OLD,
    REFERENCE,
    SAMPLER,
    vector,
    weights,
)

GRPO = {"epsilon_high": 0.2}
"""By token: .197331."""


def toy(**changes: Any) -> Tokens:
    plain = Tokens(
        new=NEW.clone().requires_grad_(),
        entropy=torch.zeros(5, dtype=torch.float64),
        old=OLD,
        advantage=ADVANTAGE,
        weight=weights(),
        call=CALL,
    )
    return replace(plain, **changes)


def loss(tokens: Tokens | None = None, **settings: Any) -> float:
    return float(row_loss(tokens or toy(), TrainConfig(**settings)).loss.detach())


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"loss_fn": "reinforce"}, -0.4),
        (GRPO, 0.197331),
        ({}, 0.181331),
        (
            {"epsilon_high": 0.2, "max_negative_advantage_importance_sampling_weight": 1.3},
            0.158966,
        ),
        ({"loss_fn": "cispo", "epsilon_high": 0.28}, -0.260778),
        ({"loss_fn": "cispo"}, -0.290434),
        ({"loss_fn": "cispo", "kimi_k2_tau": 0.1}, -0.300802),
        ({"loss_fn": "vespo"}, -0.51082),
        ({"loss_fn": "dppo"}, 0.100388),
        ({"loss_fn": "dppo", "epsilon": 0.08, "epsilon_high": 0.15}, 0.277447),
        ({"loss_fn": "spo"}, 0.425103),
        ({"loss_fn": "drpo"}, 0.192977),
        ({**GRPO, "off_policy_delta": 0.02}, -0.461034),
    ],
    ids=str,
)
def test_losses_by_token(settings: dict[str, Any], expected: float) -> None:
    assert loss(**settings) == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        (GRPO, -0.027655),
        ({"loss_fn": "cispo"}, -0.087771),
        ({"loss_fn": "gspo"}, -0.00035),
        ({"loss_fn": "gspo", "epsilon": 0.2, "epsilon_high": 0.28}, -0.156392),
        ({"loss_fn": "gspo_token", "epsilon": 0.2, "epsilon_high": 0.28}, -0.156392),
        ({"loss_fn": "luspo", "epsilon": 0.2, "epsilon_high": 0.28}, 0.170824),
        ({"loss_fn": "gmpo"}, -0.142013),
        ({"loss_fn": "sapo"}, -0.178888),
    ],
    ids=str,
)
def test_losses_by_sequence(settings: dict[str, Any], expected: float) -> None:
    tokens = toy(weight=weights("sequence"))
    assert loss(tokens, aggregation="sequence", **settings) == pytest.approx(expected, abs=1e-6)


def test_decoupled_reads_the_staleness() -> None:
    """2 steps: .108802; without any it is the clip at its own bounds, .181331."""
    stale = toy(staleness=torch.full_like(NEW, 2.0))
    settings: dict[str, Any] = {"loss_fn": "decoupled", "epsilon_high": 0.2}
    assert loss(stale, **settings) == pytest.approx(0.108802, abs=1e-6)
    assert loss(loss_fn="decoupled") == pytest.approx(0.181331, abs=1e-6)


@pytest.mark.parametrize(
    ("settings", "expected", "mean_weight"),
    [
        ({"mismatch": "none"}, 0.197331, None),
        # Mean of [.904837, 2, 1, 1.105171, 2]; of [.904837, 0, 1, 1.105171, 0]; ...
        ({"mismatch": "truncate"}, 0.318535, 1.402002),
        ({"mismatch": "mask", "mismatch_low": 0.5}, 0.163873, 0.602002),
        ({"mismatch": "mask", "mismatch_low": 0.5, "mismatch_high": 5}, 0.431257, 1.637579),
        ({"mismatch": "truncate", "mismatch_level": "sequence"}, 0.394662, 2.0),
        ({"mismatch": "mask", "mismatch_level": "sequence"}, 0.0, 0.0),
    ],
    ids=str,
)
def test_mismatch_weights(
    settings: dict[str, Any], expected: float, mean_weight: float | None
) -> None:
    """kl_sampler is k3 of the sampler and o: mean of exp(o - m) - (o - m) - 1,
    by hand [.004837, .559603, 0, .005171, .718282], mean .257579.
    """
    config = TrainConfig(old_logprobs="recomputed", **GRPO, **settings)
    parts = row_loss(toy(sampler=SAMPLER), config)
    assert float(parts.loss.detach()) == pytest.approx(expected, abs=1e-6)
    assert float(parts.sums["kl_sampler"]) == pytest.approx(0.257579, abs=1e-6)
    if mean_weight is not None:
        assert float(parts.sums["mismatch_weight"]) == pytest.approx(mean_weight, abs=1e-6)


@pytest.mark.parametrize(
    ("form", "mean"), [("k2", 0.017), ("k3", 0.017021), ("k3_weighted", 0.018105)]
)
def test_kl_in_the_loss(form: str, mean: float) -> None:
    tokens = toy(reference=REFERENCE)
    found = loss(tokens, kl_penalty=form, kl_penalty_coef=0.1, **GRPO)
    assert found == pytest.approx(0.197331 + 0.1 * mean, abs=1e-6)


def test_figures_to_log() -> None:
    """The clip took the gradient of the first entry (rho 1.49 > 1.2, A > 0) and of the third
    (rho .61 < .8, A < 0): 2 of 5. k3 of old against new is exp(n - o) - (n - o) - 1, by hand
    [.091825, .005171, .106531, 0, .091825], mean .059070. k3 to the reference is .017021.
    """
    parts = row_loss(toy(reference=REFERENCE), TrainConfig(**GRPO))
    sums = {name: float(value) for name, value in parts.sums.items()}
    assert sums == pytest.approx(
        {"entropy": 0.0, "clipped": 0.4, "kl": 0.059070, "kl_reference": 0.017021}, abs=1e-6
    )
    assert float(parts.ratio_min) == pytest.approx(0.606531, abs=1e-6)
    assert float(parts.ratio_max) == pytest.approx(1.491825, abs=1e-6)


def test_entropy_is_maximised() -> None:
    """Mean entropy (1 + 2 + 3 + 4 + 5) / 5 = 3, times .1, off the loss; gradient -.1 / 5 each."""
    entropy = vector(1, 2, 3, 4, 5).requires_grad_()
    parts = row_loss(toy(entropy=entropy), TrainConfig(entropy_coef=0.1, epsilon_high=0.2))
    assert float(parts.loss.detach()) == pytest.approx(0.197331 - 0.3, abs=1e-6)
    assert float(parts.sums["entropy"]) == pytest.approx(3.0, abs=1e-12)
    (gradient,) = torch.autograd.grad(parts.loss, entropy)
    assert gradient.tolist() == pytest.approx([-0.02] * 5, abs=1e-12)


def test_calls_left_out_may_be_as_far_as_they_like() -> None:
    """Mean o - n of the second call is (-800.9 + 2800.9) / 2 = 1000, so it is left out; its first
    ratio is exp(800.9), infinite, and times 0 it would be NaN, in the gradient too.
    """
    new = vector(-0.1, -0.1, -2801.0).requires_grad_()
    tokens = Tokens(
        new=new,
        entropy=torch.zeros(3, dtype=torch.float64),
        old=vector(-0.1, -801.0, -0.1),
        advantage=vector(1, -1, -1),
        weight=vector(1, 1, 1),
        call=torch.tensor([0, 1, 1]),
    )
    parts = row_loss(tokens, TrainConfig(off_policy_delta=0.5))
    (gradient,) = torch.autograd.grad(parts.loss, new)
    assert float(parts.loss.detach()) == -1.0
    assert gradient.tolist() == [-1.0, 0.0, 0.0]


def with_a_broken_one(advantage: float, settings: dict[str, Any]) -> tuple[LossParts, list[float]]:
    """The toy in float32 and a call of one token, n = -.5, that the sampler says it found at -900;
    and the gradient.
    """
    new = torch.cat([NEW, vector(-0.5)]).float().requires_grad_()
    tokens = Tokens(
        new=new,
        entropy=torch.zeros(6),
        old=torch.cat([OLD, vector(-900)]).float(),
        advantage=torch.cat([ADVANTAGE, vector(advantage)]).float(),
        weight=torch.cat([weights(), vector(0.2)]).float(),
        call=torch.cat([CALL, torch.tensor([9])]),
        staleness=torch.full((6,), 2.0),
    )
    parts = row_loss(tokens, TrainConfig(**settings))
    (gradient,) = torch.autograd.grad(parts.loss, new)
    return parts, gradient.tolist()


@pytest.mark.parametrize(
    ("advantage", "settings", "loss_of_it", "gradient_of_it", "beyond"),
    [
        # No bound: it would be infinite, and the step with it.
        (-1.0, {}, 0.0, 0.0, 1),
        *((a, {"loss_fn": name}, 0.0, 0.0, 1) for a in (1.0, -1.0) for name in ("dppo", "spo")),
        *((a, {"loss_fn": "decoupled"}, 0.0, 0.0, 1) for a in (1.0, -1.0)),
        *((a, {"loss_fn": "gspo", "aggregation": "sequence"}, 0.0, 0.0, 1) for a in (1.0, -1.0)),
        (-1.0, {"loss_fn": "gmpo", "aggregation": "sequence"}, 0.0, 0.0, 1),
        # The bound takes the gradient: -(1 + .28), 4, -exp(.4) and -4 / 1 times the weight .2.
        (1.0, {}, -0.256, 0.0, 0),
        (-1.0, {"max_negative_advantage_importance_sampling_weight": 4.0}, 0.8, 0.0, 0),
        (1.0, {"loss_fn": "gmpo", "aggregation": "sequence"}, -0.298365, 0.0, 0),
        (1.0, {"loss_fn": "sapo"}, -0.8, 0.0, 0),
        # The weight is bounded by 5, by W^2 exp(3 (1 - W)) = 0, or there is none: -w A n, -w A.
        (-1.0, {"loss_fn": "cispo"}, -0.5, 1.0, 0),
        (1.0, {"loss_fn": "vespo"}, 0.0, 0.0, 0),
        (-1.0, {"loss_fn": "reinforce"}, -0.1, 0.2, 0),
        # A - .1 * 899.5 is negative, so that the clip does not bound it.
        (1.0, {"kimi_k2_tau": 0.1}, 0.0, 0.0, 1),
    ],
    ids=str,
)
def test_a_ratio_no_float_can_hold_costs_one_token(
    advantage: float,
    settings: dict[str, Any],
    loss_of_it: float,
    gradient_of_it: float,
    beyond: int,
) -> None:
    """exp(899.5); the rest is trained as if it were not there."""
    parts, gradient = with_a_broken_one(advantage, settings)
    alone = toy(staleness=torch.full((5,), 2.0))
    plain = row_loss(alone, TrainConfig(**settings))
    (expected,) = torch.autograd.grad(plain.loss, alone.new)
    assert float(parts.loss.detach()) == pytest.approx(
        float(plain.loss.detach()) + loss_of_it, abs=1e-6
    )
    assert gradient == pytest.approx([*expected.tolist(), gradient_of_it], abs=1e-6)
    assert int(parts.beyond) == beyond
    assert all(bool(value.isfinite()) for value in (*parts.sums.values(), parts.ratio_max))


@pytest.mark.parametrize(("form", "beyond"), [("k2", 0), ("k3", 1), ("k3_weighted", 1)])
def test_a_reference_out_of_reach_is_left_out_of_the_kl(form: str, beyond: int) -> None:
    """The policy finds the first token at -200, the reference at -.7; exp(199.3) in float32. k2 is
    its square, 19860 (by hand: 199.3 ** 2 / 2), which a float holds.
    """
    new = torch.cat([vector(-200), NEW[1:]]).float().requires_grad_()
    tokens = toy(
        new=new,
        old=OLD.float(),
        reference=REFERENCE.float(),
        advantage=torch.zeros(5),
        weight=weights().float(),
        entropy=torch.zeros(5),
    )
    config = TrainConfig(kl_penalty=form, kl_penalty_coef=1.0)
    parts = row_loss(tokens, config)
    (gradient,) = torch.autograd.grad(parts.loss, new)
    rest = {"k2": 0.013 + 19860.245 / 5, "k3": 0.013275, "k3_weighted": 0.012517}[form]
    assert float(parts.loss.detach()) == pytest.approx(rest, rel=1e-4)
    assert bool(gradient.isfinite().all())
    assert (float(gradient[0]) == 0) is (beyond == 1)
    assert int(parts.beyond) == beyond
    assert bool(parts.sums["kl_reference"].isfinite())


def cut_into(sizes: list[int], config: TrainConfig) -> tuple[list[LossParts], Tensor]:
    """The toy's loss over rows that hold so many entries each, and its gradient."""
    new = NEW.clone().requires_grad_()
    parts, at = [], 0
    for size in sizes:
        row = slice(at, at + size)
        at += size
        whole = toy(weight=weights(config.aggregation), reference=REFERENCE)
        tokens = Tokens(
            new=new[row],
            entropy=whole.entropy[row],
            old=OLD[row],
            advantage=ADVANTAGE[row],
            weight=whole.weight[row],
            call=CALL[row],
            reference=REFERENCE[row],
        )
        parts.append(row_loss(tokens, config))
        parts[-1].loss.backward()
    assert new.grad is not None
    return parts, new.grad


@pytest.mark.parametrize(
    ("sizes", "settings"),
    [
        *(([2, 3], {"aggregation": a}) for a in ("token", "sequence", "rollout", "constant")),
        ([2, 3], {"loss_fn": "gspo", "aggregation": "sequence"}),
        ([2, 3], {"loss_fn": "vespo"}),
        ([1, 2, 2], {}),  # a form of single tokens may even part a call
        ([1, 1, 1, 1, 1], {"loss_fn": "cispo"}),
    ],
    ids=str,
)
def test_the_sum_over_rows_is_the_loss(sizes: list[int], settings: dict[str, Any]) -> None:
    """Case 088: however the entries are dealt to rows, loss, KL term, figures and gradient are the
    same.
    """
    config = TrainConfig(kl_penalty="k3", kl_penalty_coef=0.1, horizon=4, **settings)
    (whole,), expected = cut_into([5], config)
    parts, gradient = cut_into(sizes, config)
    total = sum(float(part.loss.detach()) for part in parts)
    assert total == pytest.approx(float(whole.loss.detach()), abs=1e-15)
    for name, value in whole.sums.items():
        assert sum(float(part.sums[name]) for part in parts) == pytest.approx(float(value))
    assert gradient.tolist() == pytest.approx(expected.tolist(), abs=1e-15)
