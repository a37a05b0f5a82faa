"""Shares of tokens in the loss, computed by hand."""

import math

import pytest

from art_core.algorithms import Aggregation
from art_core.batch.weights import entry_weights


def test_token_weights_give_every_token_the_same() -> None:
    """Two calls of 2 and 3 tokens: 1/5 each."""
    assert entry_weights([2, 3], [0, 1], "token") == [0.2, 0.2]


def test_sequence_weights_give_every_call_the_same() -> None:
    """1/2 a call, shared by its 2 or 3 tokens."""
    assert entry_weights([2, 3], [0, 0], "sequence") == [1 / 4, 1 / 6]


def test_rollout_weights_give_every_trajectory_the_same() -> None:
    """Trajectory 0 has calls of 2 and 3 tokens, trajectory 4 one of 1: 1/10, 1/10 and 1/2."""
    assert entry_weights([2, 1, 3], [0, 4, 0], "rollout") == [1 / 10, 1 / 2, 1 / 10]


@pytest.mark.parametrize("aggregation", ["token", "sequence", "rollout"])
def test_weights_sum_to_one(aggregation: Aggregation) -> None:
    lengths = [7, 1, 3, 12]
    weights = entry_weights(lengths, [0, 0, 1, 5], aggregation)
    total = math.fsum(w * n for w, n in zip(weights, lengths, strict=True))
    assert total == pytest.approx(1, rel=1e-15)


@pytest.mark.parametrize(
    ("aggregation", "mean"),
    [("token", 2.6), ("sequence", 2.0)],  # (2 * 1 + 8 * 3) / 10, and (1 + 3) / 2
)
def test_weighted_mean_of_two_calls(aggregation: Aggregation, mean: float) -> None:
    """Case 088: 2 tokens of loss 1 and 8 of loss 3; over how many rows is no matter."""
    weights = entry_weights([2, 8], [0, 1], aggregation)
    assert 2 * weights[0] * 1.0 + 8 * weights[1] * 3.0 == pytest.approx(mean, rel=1e-15)


def test_constant_weights_know_no_length() -> None:
    """Case 088: (2 * 1 + 8 * 3) / (2 calls * 16) = .8125."""
    weights = entry_weights([2, 8], [0, 0], "constant", horizon=16)
    assert weights == [1 / 32, 1 / 32]
    assert 2 * weights[0] * 1.0 + 8 * weights[1] * 3.0 == 0.8125


def test_arts_own_weights_are_by_sequence() -> None:
    """Lengths 2 and 3: token weights 1.25 and .833333 of the token mean's, 1/5."""
    weights = entry_weights([2, 3], [0, 1], "sequence")
    assert [5 * w for w in weights] == pytest.approx([1.25, 0.833333], abs=1e-6)


@pytest.mark.parametrize(
    ("aggregation", "mean"),
    [("token", 2.6), ("sequence", 2.0), ("rollout", 2.0), ("constant", 0.8125)],
)
def test_a_call_without_a_token_does_not_count(aggregation: Aggregation, mean: float) -> None:
    """Case 088: s1, an empty one, s2; the empty one is no call and no trajectory of the mean."""
    weights = entry_weights([2, 0, 8], [0, 1, 2], aggregation, horizon=16)
    assert weights[1] == 0.0
    assert 2 * weights[0] * 1.0 + 8 * weights[2] * 3.0 == pytest.approx(mean, rel=1e-15)
