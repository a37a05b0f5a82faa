"""Losses of whole calls on the toy: value and gradient, each as its paper has it."""

import pytest
import torch
from torch import Tensor

from art_core.algorithms import Aggregation
from art_core.training.policy_losses import Terms, clipped
from art_core.training.sequence_losses import (
    Calls,
    drifted,
    gmpo,
    gspo,
    gspo_token,
    luspo,
    vespo,
)
from tests.core.toy import ADVANTAGE, CALL, CALLS, NEW, OLD, Form, summed, tokens_cut, vector


def masked(n: Tensor) -> Terms:
    """The clip without the calls that drifted."""
    terms = clipped(n, OLD, ADVANTAGE, low=0.2, high=0.2)
    out = drifted(n, OLD, ADVANTAGE, CALLS, delta=0.02)
    return Terms(torch.where(out, 0.0, terms.loss), terms.cut | out)


@pytest.mark.parametrize(
    ("form", "aggregation", "loss", "gradient"),
    [
        pytest.param(
            lambda n: gspo(n, OLD, ADVANTAGE, CALLS, low=3e-4, high=4e-4), "sequence",
            -0.00035, [0, 0, 0, 0, 0],
            id="GSPO, 3e-4 and 4e-4",
        ),
        pytest.param(
            lambda n: gspo(n, OLD, ADVANTAGE, CALLS, low=0.2, high=0.28), "sequence",
            -0.156392, [0, 0, 0.161203, 0.161203, 0.161203],
            id="GSPO",
        ),
        pytest.param(
            lambda n: gspo_token(n, OLD, ADVANTAGE, CALLS, low=0.2, high=0.28), "sequence",
            -0.156392, [0, 0, 0.161203, 0.161203, 0.161203],
            id="GSPO-token",
        ),
        pytest.param(
            lambda n: luspo(n, OLD, ADVANTAGE, CALLS, low=0.2, high=0.28), "sequence",
            0.170824, [0, 0, 0.483608, 0.483608, 0.483608],
            id="LUSPO",
        ),
        pytest.param(
            lambda n: gmpo(n, OLD, ADVANTAGE, CALLS, low=0.4, high=0.4), "sequence",
            -0.142013, [-0.321006, -0.321006, 0, 0.166667, 0.166667],
            id="GMPO; the first token is on the very cap, and its gradient passes",
        ),
        pytest.param(
            lambda n: vespo(n, OLD, ADVANTAGE, CALLS, up=(2, 3), down=(3, 2)), "token",
            -0.51082, [-0.077645, -0.077645, 0.179225, 0.179225, 0.179225],
            id="VESPO",
        ),
        pytest.param(
            masked, "token", -0.461034, [0, -0.221034, 0, 0, 0],
            id="off-policy sequence mask, .02, over the clip",
        ),
    ],
)  # fmt: skip
def test_toy(form: Form, aggregation: Aggregation, loss: float, gradient: list[float]) -> None:
    value, found = summed(form, aggregation)
    assert value == pytest.approx(loss, abs=1e-6)
    assert found == pytest.approx(gradient, abs=1e-6)


def test_the_ratio_of_a_call() -> None:
    """exp(mean(n - o)) = 1.284025 and .967216; 1.28 where it is clipped."""
    terms = gspo(NEW, OLD, ADVANTAGE, CALLS, low=0.2, high=0.28)
    assert terms.loss.tolist() == pytest.approx([-1.28, -1.28, *[0.967216] * 3], abs=1e-6)
    assert terms.cut.tolist() == [True, True, False, False, False]


def test_the_weight_of_a_call() -> None:
    """VESPO: W = exp(sum(n - o)) = 1.648721 and .904837, phi = .388227 and .896125."""
    terms = vespo(NEW, OLD, vector(1, 1, -1, -1, -1), CALLS, up=(2, 3), down=(3, 2))
    phi = (terms.loss / -(ADVANTAGE * NEW)).tolist()
    assert phi == pytest.approx([0.388227, 0.388227, *[0.896125] * 3], abs=1e-6)


def test_a_token_may_have_an_advantage_of_its_own_in_gspo_token() -> None:
    """Its gradient is then that of its own advantage: -A s_t / (2 calls * n tokens)."""
    own = vector(1, 0, -1, -1, -1)
    _, found = summed(lambda n: gspo_token(n, OLD, own, CALLS, low=0.9, high=0.9), "sequence")
    assert found[:2] == pytest.approx([-1.284025 / 4, 0.0], abs=1e-6)


def test_drift_is_that_of_calls_to_be_made_rarer() -> None:
    """mean(o - n) = -.25 and .033333; a call with A > 0 is never left out."""
    assert drifted(NEW, OLD, ADVANTAGE, CALLS, delta=0.02).tolist() == [False, False, *[True] * 3]
    assert not drifted(NEW, OLD, ADVANTAGE, CALLS, delta=0.04).any()
    assert not drifted(NEW, OLD, ADVANTAGE.abs(), CALLS, delta=0.02).any()


def test_tokens_of_a_call_need_not_stand_together() -> None:
    order = torch.tensor([3, 0, 4, 1, 2])
    mixed = Calls.of(CALL[order], NEW)
    found = gspo(NEW[order], OLD[order], ADVANTAGE[order], mixed, low=0.2, high=0.28).loss
    assert found.tolist() == pytest.approx(
        gspo(NEW, OLD, ADVANTAGE, CALLS, low=0.2, high=0.28).loss[order].tolist()
    )


def test_cut_tokens_of_the_geometric_mean() -> None:
    """Log-ratios [.4, .1] are at most .4; [-.5, 0, .4] at least -.4."""
    cut = tokens_cut(lambda n: gmpo(n, OLD, ADVANTAGE, CALLS, low=0.4, high=0.4))
    assert cut[1:] == [False, True, False, False]
