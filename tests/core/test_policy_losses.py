"""Losses of single tokens on the toy: value and gradient, each as its paper has it."""

import math

import pytest
import torch
from torch import Tensor

from art_core.algorithms import Aggregation
from art_core.training.policy_losses import (
    Terms,
    cispo,
    clipped,
    decoupled,
    dppo,
    drpo,
    kimi_advantage,
    reinforce,
    sapo,
    spo,
)
from tests.core.toy import ADVANTAGE, NEW, OLD, Form, summed, tokens_cut, vector


def ppo(high: float, cap: float | None = None) -> Form:
    return lambda n: clipped(n, OLD, ADVANTAGE, low=0.2, high=high, cap=cap)


def soft(n: Tensor) -> Terms:
    return cispo(n, OLD, ADVANTAGE, low=1.0, high=4.0)


def kimi(n: Tensor) -> Terms:
    return cispo(n, OLD, kimi_advantage(n, OLD, ADVANTAGE, tau=0.1), low=1.0, high=4.0)


def total_variation(low: float, high: float) -> Form:
    return lambda n: dppo(n, OLD, ADVANTAGE, low=low, high=high, tau=1e-3)


def a3po(n: Tensor) -> Terms:
    return decoupled(n, OLD, ADVANTAGE, torch.full_like(n, 2.0), low=0.2, high=0.2)


@pytest.mark.parametrize(
    ("form", "aggregation", "loss", "gradient"),
    [
        pytest.param(
            lambda n: reinforce(n, ADVANTAGE), "token", -0.4, [-0.2, -0.2, 0.2, 0.2, 0.2],
            id="REINFORCE",
        ),
        pytest.param(
            ppo(0.2), "sequence", -0.027655, [0, -0.276293, 0, 0.166667, 0.248637], id="GRPO"
        ),
        pytest.param(
            ppo(0.2), "rollout", -0.027655, [0, -0.276293, 0, 0.166667, 0.248637],
            id="GRPO by rollout",
        ),
        pytest.param(
            ppo(0.2), "constant", 0.123332, [0, -0.138146, 0, 0.125, 0.186478],
            id="Dr. GRPO, H = 4",
        ),
        pytest.param(
            ppo(0.2), "token", 0.197331, [0, -0.221034, 0, 0.2, 0.298365], id="GRPO by token"
        ),
        pytest.param(
            ppo(0.28), "token", 0.181331, [0, -0.221034, 0, 0.2, 0.298365], id="DAPO"
        ),
        pytest.param(
            ppo(0.2, 1.3), "token", 0.158966, [0, -0.221034, 0, 0.2, 0], id="two-sided, 1.3"
        ),
        pytest.param(
            lambda n: cispo(n, OLD, ADVANTAGE, low=1.0, high=0.28), "token",
            -0.260778, [-0.256, -0.221034, 0.121306, 0.2, 0.256],
            id="CISPO, cap 1.28",
        ),
        pytest.param(
            soft, "token", -0.290434, [-0.298365, -0.221034, 0.121306, 0.2, 0.298365],
            id="CISPO, cap 5",
        ),
        pytest.param(
            soft, "sequence", -0.087771, [-0.372956, -0.276293, 0.101088, 0.166667, 0.248637],
            id="ART's default with its weights",
        ),
        pytest.param(
            kimi, "token", -0.300802, [-0.28643, -0.218824, 0.115241, 0.2, 0.3103],
            id="ART's kimi, tau .1",
        ),
        pytest.param(
            lambda n: sapo(n, OLD, ADVANTAGE, up=1.0, down=1.05), "sequence",
            -0.178888, [-0.351281, -0.27553, 0.096895, 0.166667, 0.23277],
            id="SAPO",
        ),
        pytest.param(
            total_variation(0.2, 0.2), "token",
            0.100388, [-0.298205, -0.220994, 0.121106, 0.2, 0.298525],
            id="DPPO, none dropped",
        ),
        pytest.param(
            total_variation(0.08, 0.15), "token",
            0.277447, [0.00016, -0.220994, -0.0002, 0.2, 0.298525],
            id="DPPO, the first of each call dropped",
        ),
        pytest.param(
            lambda n: spo(n, OLD, ADVANTAGE, epsilon=0.2), "token",
            0.425103, [0.435351, -0.104802, -0.117345, 0.2, 1.032081],
            id="SPO",
        ),
        pytest.param(
            lambda n: drpo(n, OLD, ADVANTAGE, epsilon=0.2), "token",
            0.192977, [-0.000058, -0.182344, 0.068056, 0.2, 0.4465],
            id="DRPO",
        ),
        pytest.param(
            a3po, "token", 0.108802, [0, -0.221034, 0, 0.2, 0.298365], id="A-3PO, staleness 2"
        ),
    ],
)  # fmt: skip
def test_toy(form: Form, aggregation: Aggregation, loss: float, gradient: list[float]) -> None:
    value, found = summed(form, aggregation)
    assert value == pytest.approx(loss, abs=1e-6)
    assert found == pytest.approx(gradient, abs=1e-6)


def test_each_term_of_the_clip() -> None:
    """-min(rho A, clip(rho) A) = [-1.2, -1.105171] and [.8, 1, 1.491825]; with DAPO's -1.28."""
    assert ppo(0.2)(NEW).loss.tolist() == pytest.approx(
        [-1.2, -1.105171, 0.8, 1.0, 1.491825], abs=1e-6
    )
    assert float(ppo(0.28)(NEW).loss[0]) == pytest.approx(-1.28)


@pytest.mark.parametrize(
    ("form", "cut"),
    [
        (ppo(0.2), [True, False, True, False, False]),
        (ppo(0.2, 1.3), [True, False, True, False, True]),
        (soft, [False] * 5),
        (lambda n: cispo(n, OLD, ADVANTAGE, low=1.0, high=0.28), [True, False, False, False, True]),
        (total_variation(0.08, 0.15), [True, False, True, False, False]),
        (lambda n: reinforce(n, ADVANTAGE), [False] * 5),
    ],
)
def test_tokens_that_a_form_shuts_out_are_told(form: Form, cut: list[bool]) -> None:
    assert tokens_cut(form) == cut


@pytest.mark.parametrize("staleness", [0.0, 1.0])
def test_fresh_calls_make_decoupled_ppo_plain(staleness: float) -> None:
    def form(n: Tensor) -> Terms:
        return decoupled(n, OLD, ADVANTAGE, torch.full_like(n, staleness), low=0.2, high=0.2)

    assert summed(form) == summed(ppo(0.2))


def test_what_is_out_of_the_trust_region_may_be_as_far_as_it_likes() -> None:
    """A ratio of exp(800) is infinite; times 0 it would be NaN, in the gradient too."""
    new = vector(-0.1, -0.5).requires_grad_()
    terms = dppo(new, vector(-800.0, -0.5), vector(1, 1), low=0.2, high=0.2, tau=0.0)
    terms.loss.sum().backward()
    assert terms.loss.tolist() == [0.0, -1.0]
    assert new.grad is not None
    assert new.grad.tolist() == [0.0, -1.0]


def test_samples_on_one_position_never_cancel() -> None:
    """A = +1 and A = -1 on one token, ratio 1.5, clip .2: losses -1.2 (no gradient) and +1.5
    (gradient 1.5); with the advantages summed first there would be none at all.
    """
    shared = torch.tensor(math.log(1.5), dtype=torch.float64, requires_grad=True)
    terms = clipped(shared.expand(2), vector(0, 0), vector(1, -1), low=0.2, high=0.2)
    (gradient,) = torch.autograd.grad(terms.loss.sum(), shared)
    assert terms.loss.tolist() == pytest.approx([-1.2, 1.5], abs=1e-12)
    assert float(gradient) == pytest.approx(1.5, abs=1e-12)
