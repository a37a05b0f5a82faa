"""Weights for the gap between trainer and sampler, over the clipped loss (.2, by token .197331)."""

import pytest
import torch
from torch import Tensor

from art_core.training.mismatch import call_ratio, masked, token_ratio, truncated
from art_core.training.policy_losses import clipped
from tests.core.toy import ADVANTAGE, CALLS, OLD, SAMPLER, summed

TOKEN = [0.904837, 2.459603, 1.0, 1.105171, 2.718282]
"""exp(o - m)."""


def ratio(level: str) -> Tensor:
    if level == "token":
        return token_ratio(OLD, SAMPLER)
    return call_ratio(OLD, SAMPLER, CALLS, "sequence" if level == "sequence" else "geometric")


@pytest.mark.parametrize(
    ("level", "expected"),
    [
        ("token", TOKEN),
        ("sequence", [2.225541, 2.225541, *[3.004166] * 3]),
        ("geometric", [1.491825, 1.491825, *[1.442917] * 3]),
    ],
)
def test_ratios(level: str, expected: list[float]) -> None:
    assert ratio(level).tolist() == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize(
    ("weight", "expected", "loss"),
    [
        pytest.param(
            truncated(ratio("token"), high=2), [0.904837, 2, 1, 1.105171, 2], 0.318535, id="TIS"
        ),
        pytest.param(
            masked(ratio("token"), low=0.5, high=2), [0.904837, 0, 1, 1.105171, 0], 0.163873,
            id="MIS",
        ),
        pytest.param(masked(ratio("token"), low=0.5, high=5), TOKEN, 0.431257, id="IcePop"),
        pytest.param(
            truncated(ratio("sequence"), high=2), [2] * 5, 0.394662, id="TIS by sequence"
        ),
        pytest.param(masked(ratio("sequence"), low=0, high=2), [0] * 5, 0.0, id="MIS by sequence"),
    ],
)  # fmt: skip
def test_weights(weight: Tensor, expected: list[float], loss: float) -> None:
    assert weight.tolist() == pytest.approx(expected, abs=1e-6)
    value, _ = summed(lambda n: clipped(n, OLD, ADVANTAGE, low=0.2, high=0.2), by=weight)
    assert value == pytest.approx(loss, abs=1e-6)


def test_weights_carry_no_gradient() -> None:
    old = OLD.clone().requires_grad_()
    assert not token_ratio(old, SAMPLER).requires_grad
    assert not call_ratio(old, SAMPLER, CALLS, "sequence").requires_grad


def test_an_impossible_token_is_masked_like_any_other() -> None:
    """exp(800) is infinite; outside the bounds all the same."""
    far = token_ratio(torch.tensor([-1.0]), torch.tensor([-801.0]))
    assert masked(far, low=0.5, high=2).tolist() == [0.0]
