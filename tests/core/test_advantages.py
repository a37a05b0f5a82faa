"""Advantages and entry weights against the published formulae, computed by hand."""

import math
from typing import Literal, TypeAlias

import pytest

from art_core.batch.advantages import are_equal, entry_weights, group_advantages

Scale: TypeAlias = Literal["none", "group"]
Aggregation: TypeAlias = Literal["token", "sequence", "rollout"]


def test_group_mean_alone() -> None:
    """Dr. GRPO (arXiv:2503.20783): r - mean, mean of [1, 0, 0, 1] is .5."""
    assert group_advantages([1, 0, 0, 1], scale="none") == [0.5, -0.5, -0.5, 0.5]


def test_group_std() -> None:
    """GRPO (arXiv:2402.03300), population std .5, eps 1e-6: .5 / (.5 + 1e-6) = .999998."""
    got = group_advantages([1, 0, 0, 1], scale="group")
    assert got == pytest.approx([0.999998, -0.999998, -0.999998, 0.999998], abs=1e-6)
    assert got[0] == pytest.approx(0.5 / (0.5 + 1e-6), rel=1e-12)


def test_three_of_four() -> None:
    """Rewards [1, 1, 1, 0]: mean .75, population std sqrt(.1875) = .433013."""
    assert group_advantages([1, 1, 1, 0], scale="none") == [0.25, 0.25, 0.25, -0.75]
    got = group_advantages([1, 1, 1, 0], scale="group")
    assert got == pytest.approx([0.577349, 0.577349, 0.577349, -1.732047], abs=1e-6)


@pytest.mark.parametrize("scale", ["none", "group"])
def test_advantages_of_a_group_sum_to_nothing(scale: Scale) -> None:
    got = group_advantages([0.1, 0.25, -3.0, 1e6, 7.0], scale=scale)
    assert abs(math.fsum(got)) < 1e-9


@pytest.mark.parametrize("scale", ["none", "group"])
def test_groups_with_nothing_to_compare_get_zeros(scale: Scale) -> None:
    """A std of one, with n - 1 in it, would be NaN."""
    assert group_advantages([], scale=scale) == []
    assert group_advantages([0.7], scale=scale) == [0.0]
    assert group_advantages([0.5] * 4, scale=scale) == [0.0] * 4


@pytest.mark.parametrize(
    ("rewards", "equal"),
    [
        ([], True),
        ([0.7], True),
        ([0.5, 0.5], True),
        ([0.1 + 0.2, 0.3], True),  # differ in the last bit only
        ([1e9, 1e9 + 1e-7], True),
        ([0, 1e-9], False),
        ([-1.0, 1.0], False),
        ([True, 0, 1, False], False),
    ],
)
def test_equal(rewards: list[float], equal: bool) -> None:
    assert are_equal(rewards) is equal


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
