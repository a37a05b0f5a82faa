"""Advantages against the published formulae; values computed by hand or in float64 from them."""

import math

import pytest

from art_core.algorithms import Baseline, Scale
from art_core.batch.advantages import advantages, decoupled_advantages
from art_core.batch.baselines import next_running
from art_core.batch.candidates import overlong_penalty
from art_core.batch.scales import Groups, are_equal
from art_core.errors import RewardError

ONE = [[1.0, 0.0, 0.0, 1.0]]
TWO = [[1.0, 0.0, 0.0, 1.0], [1.0, 1.0, 1.0, 0.0]]


@pytest.mark.parametrize(
    ("groups", "baseline", "scale", "expected"),
    [
        pytest.param(ONE, "group", "none", [0.5, -0.5, -0.5, 0.5], id="Dr. GRPO"),
        pytest.param(
            ONE, "group", "group", [0.999998, -0.999998, -0.999998, 0.999998], id="GRPO"
        ),
        pytest.param(
            ONE, "group", "group_sample", [0.865875, -0.865875, -0.865875, 0.865875],
            id="GRPO as in TRL",
        ),
        pytest.param(ONE, "leave_one_out", "none", [2 / 3, -2 / 3, -2 / 3, 2 / 3], id="RLOO"),
        pytest.param(ONE, "group", "mean", [1, -1, -1, 1], id="MaxRL"),
        pytest.param(
            TWO, "batch", "batch",
            [.774597, -1.290994, -1.290994, .774597, .774597, .774597, .774597, -1.290994],
            id="REINFORCE++",
        ),
        pytest.param(
            TWO, "group", "batch_centred",
            [1.069045, -1.069045, -1.069045, 1.069045, .534522, .534522, .534522, -1.603567],
            id="REINFORCE++-baseline",
        ),
        pytest.param(
            TWO, "group", "batch",
            [1.032796, -1.032796, -1.032796, 1.032796, .516398, .516398, .516398, -1.549193],
            id="Lite PPO",
        ),
        pytest.param(ONE, "length", "none", [0.4, -0.6, -0.6, 0.4], id="OPO, lengths 2, 3, 1, 4"),
        pytest.param(ONE, "running", "none", [1, -0.05, -0.0475, 0.954875], id="RAE"),
    ],
)  # fmt: skip
def test_published_forms(
    groups: Groups, baseline: Baseline, scale: Scale, expected: list[float]
) -> None:
    found = advantages(groups, baseline=baseline, scale=scale, lengths=[[2, 3, 1, 4]] * len(groups))
    assert [a for column in found for a in column] == pytest.approx(expected, abs=1e-6)


def test_the_running_baseline_goes_on() -> None:
    """RAE: b <- .95 b + .05 r from 0 over [1, 0, 0, 1] ends at .092869."""
    baseline = 0.0
    for reward in ONE[0]:
        baseline = next_running(baseline, reward)
    assert baseline == pytest.approx(0.092869, abs=5e-7)
    ((first, *_),) = advantages(ONE, baseline="running", running=baseline)
    assert first == pytest.approx(1 - 0.092869, abs=5e-7)


def test_parts_of_a_reward_are_normalised_by_themselves() -> None:
    """GDPO: a = [1, 0, 0, 1], b = [0, 0, 1, 1]: z(z(a) + z(b)) = [0, -sqrt 2, 0, sqrt 2]. However
    big a part is, it counts the same; one that is equal in the group adds nothing.
    """
    expected = [0, -1.414214, 0, 1.414214]
    for parts in (
        [[1, 0, 0, 1], [0, 0, 1, 1]],
        [[100, 0, 0, 100], [0, 0, 1, 1]],
        [[1, 0, 0, 1], [0, 0, 1, 1], [3, 3, 3, 3]],
    ):
        assert decoupled_advantages([parts])[0] == pytest.approx(expected, abs=1e-6)
    assert decoupled_advantages([]) == []


def test_three_of_four() -> None:
    """Rewards [1, 1, 1, 0]: mean .75, population std sqrt(.1875) = .433013."""
    assert advantages([[1, 1, 1, 0]]) == [[0.25, 0.25, 0.25, -0.75]]
    (got,) = advantages([[1, 1, 1, 0]], scale="group")
    assert got == pytest.approx([0.577349, 0.577349, 0.577349, -1.732047], abs=1e-6)


@pytest.mark.parametrize("scale", ["none", "group", "group_sample"])
def test_advantages_of_a_group_sum_to_nothing(scale: Scale) -> None:
    (got,) = advantages([[0.1, 0.25, -3.0, 1e6, 7.0]], scale=scale)
    assert abs(math.fsum(got)) < 1e-9


@pytest.mark.parametrize("scale", ["none", "group", "group_sample", "mean", "batch"])
@pytest.mark.parametrize("baseline", ["group", "leave_one_out", "length"])
def test_groups_with_nothing_to_compare_get_zeros(baseline: Baseline, scale: Scale) -> None:
    """Case 045: a std of one, with n - 1 in it, would be NaN. So would the mean of none."""
    groups = [[], [0.7], [0.5] * 4, [0.0] * 2]
    lengths = [[1] * len(rewards) for rewards in groups]
    found = advantages(groups, baseline=baseline, scale=scale, lengths=lengths)
    assert found == [[], [0.0], [0.0] * 4, [0.0] * 2]


def test_a_step_without_spread_is_measured_as_it_is() -> None:
    """The running mean before it is .5; a std of 0 as the unit would give .5 / 1e-8."""
    (found,) = advantages([[1.0, 1.0]], baseline="running", scale="batch", running=0.5)
    assert found == pytest.approx([0.5, 0.475])


def test_negative_rewards_have_no_rate_of_success() -> None:
    with pytest.raises(RewardError, match=r'got -1.*scale_rewards="group"'):
        advantages([[1, -1]], scale="mean")


@pytest.mark.parametrize(
    ("length", "penalty"), [(0, 0), (6, 0), (7, -0.25), (8, -0.5), (10, -1), (11, -1)]
)
def test_soft_overlong_penalty(length: int, penalty: float) -> None:
    """DAPO, limit 10 and buffer 4."""
    assert overlong_penalty(length, limit=10, buffer=4) == penalty


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
        # DAPO's dynamic sampling keeps the first and drops the others.
        ([1, 0, 0, 1], False),
        ([1, 1, 1, 1], True),
        ([0, 0, 0, 0], True),
    ],
)
def test_equal(rewards: list[float], equal: bool) -> None:
    assert are_equal(rewards) is equal
