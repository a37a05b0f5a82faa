"""How a step's trajectories are dealt to its optimizer steps."""

import math
from typing import Any

import pytest

from art_core.batch.minibatches import minibatches
from art_core.batch.sample import Sample
from art_core.config import TrainConfig
from tests.core.samples import make_sample, random_calls


def dealt(count: int, key: tuple[int, int], **config: str) -> list[list[tuple[int, int]]]:
    """(trajectory, call) of each part; the calls are of ten trajectories."""
    settings = TrainConfig(minibatches=count, **config)
    parts = minibatches(random_calls(0, groups=2), settings, key=key)
    return [[(s.trajectory, s.call) for s in part] for part in parts]


@pytest.mark.parametrize("count", [1, 2, 3, 10])
def test_no_trajectory_is_split_and_none_is_lost(count: int) -> None:
    parts = dealt(count, (0, 0))
    owners = [{trajectory for trajectory, _ in part} for part in parts]
    assert len(parts) == count
    assert sum(len(owner) for owner in owners) == 10
    assert set.union(*owners) == set(range(10))
    assert max(map(len, owners)) - min(map(len, owners)) <= 1
    assert sorted(call for part in parts for _, call in part) == list(
        range(len(random_calls(0, groups=2)))
    )


def test_there_are_never_more_parts_than_trajectories() -> None:
    assert [len({t for t, _ in part}) for part in dealt(50, (0, 0))] == [1] * 10


def test_the_key_decides_who_is_dealt_where() -> None:
    assert dealt(2, (7, 1)) == dealt(2, (7, 1))
    assert dealt(2, (7, 1)) != dealt(2, (7, 2))
    assert dealt(2, (7, 1)) != dealt(2, (8, 1))
    assert dealt(1, (7, 1)) == dealt(1, (8, 2)), "one part keeps its order"


@pytest.mark.parametrize("aggregation", ["token", "sequence", "rollout"])
@pytest.mark.parametrize("count", [1, 3])
def test_the_weights_of_each_part_sum_to_one(count: int, aggregation: str) -> None:
    config = TrainConfig(minibatches=count, aggregation=aggregation)
    for part in minibatches(random_calls(1), config, key=(0, 0)):
        assert math.fsum(s.weight * len(s.sampled_ids) for s in part) == pytest.approx(1)


def test_a_part_without_an_advantage_is_no_update() -> None:
    """Rewards 1, .5, .5 and 0. Adam would move the weights by its momentum alone, twice."""
    samples = [
        make_sample([1], [2], advantage=advantage, call=i, trajectory=i)
        for i, advantage in enumerate([0.5, 0.0, 0.0, -0.5])
    ]

    def parts(samples: list[Sample], **config: Any) -> int:
        return len(minibatches(samples, TrainConfig(minibatches=4, **config), key=(0, 0)))

    assert parts(samples) == 2
    assert parts(samples, entropy_coef=0.1) == parts(samples, kl_penalty_coef=0.1) == 4
    assert parts(samples[1:3]) == 2, "something is left for who asks for no more"


def test_nothing_else_of_a_sample_changes() -> None:
    call = make_sample([1, 2], [3, 4, 5], advantage=0.5, logprobs=[-1, -2, -3], call=9)
    ((got,),) = minibatches([call], TrainConfig(), key=(0, 0))
    assert got.weight == 1 / 3
    assert (got.call, got.advantage, got.sampled_ids) == (9, 0.5, call.sampled_ids)
