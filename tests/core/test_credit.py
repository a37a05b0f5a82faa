"""Rewards of single calls: how they add to a trajectory's, and what they are compared with."""

from typing import Any

import pytest

from art_core.algorithms import Spread
from art_core.batch.credit import Worth, earned, places, worth
from art_core.batch.select import Selection, select
from art_core.calls import ModelCall, Origin
from art_core.config import TrainConfig
from art_core.errors import RewardError
from art_core.trajectories import Trajectory, TrajectoryGroup
from tests.core.sample import make_call


def played(reward: float, *nodes: str) -> Trajectory:
    """One call from each of these nodes, in turn."""
    calls = [
        make_call(record_id=f"r{i}", origin=Origin(node=node, graph_step=i + 1))
        for i, node in enumerate(nodes)
    ]
    return Trajectory(reward=reward, calls=calls)


def chosen(*trajectories: Trajectory, **config: Any) -> Selection:
    group = TrajectoryGroup(trajectories)
    return select([group], model="agent", step=2, config=TrainConfig(**config))


def advantages(*trajectories: Trajectory, **config: Any) -> list[float]:
    return [s.advantage for s in chosen(*trajectories, **config).samples]


@pytest.mark.parametrize(
    ("own", "spread", "calls", "whole"),
    [
        ([None, None], "own", (1, 1), 1),
        ([None, 0.5, None], "own", (1, 1.5, 1), 3.5 / 3),
        ([0.25, 0.5, -1], "to_go", (0.75, 0.5, 0), 1.25 / 3),
        ([], "own", (), 1),
    ],
)
def test_worth(
    own: list[float | None], spread: Spread, calls: tuple[float, ...], whole: float
) -> None:
    """The trajectory earned 1; "to_go": each call also has what the calls after it earned."""
    found = worth(1, earned(own, spread))
    assert found.calls == calls
    assert found.whole == pytest.approx(whole)


def test_without_rewards_of_calls_a_trajectory_is_worth_its_reward_to_the_bit() -> None:
    assert worth(0.1, earned([None] * 3, "own")) == Worth((0.1,) * 3, 0.1)


# --- setting them --------------------------------------------------------------------------------


def own(trajectory: Trajectory) -> list[float | None]:
    return [call.reward for call in trajectory.calls]


def test_a_node_is_rewarded_whole_for_each_of_its_calls() -> None:
    trajectory = played(1, "plan", "act", "plan")
    trajectory.add_reward(0.5, node="plan")
    assert own(trajectory) == [0.5, None, 0.5]


def test_a_single_call_and_the_nth_of_a_node_and_their_sum() -> None:
    trajectory = played(1, "plan", "act", "plan")
    trajectory.add_reward(0.5, call=trajectory.calls[1])
    trajectory.add_reward(0.25, node="plan", visit=2)
    trajectory.add_reward(-1, node="plan", visit=2)
    assert own(trajectory) == [None, 0.5, -0.75]


def test_nodes_of_subgraphs() -> None:
    trajectory = Trajectory(
        calls=[
            make_call(record_id=str(i), origin=Origin(node="model", namespace=namespace))
            for i, namespace in enumerate(["writer:1|model:2", "critic:3|model:4"])
        ]
    )
    trajectory.add_reward(1, node="critic")
    trajectory.add_reward(2, node="writer/model")
    trajectory.add_reward(0.5, node="model")
    assert own(trajectory) == [2.5, 1.5]


@pytest.mark.parametrize(
    ("reward", "whom", "message"),
    [
        (float("nan"), {"node": "plan"}, "got nan, expected a finite number"),
        ("much", {"node": "plan"}, "got 'much', expected a finite number"),
        (1, {}, "expected either call= or node="),
        (1, {"node": "plan", "call": make_call()}, "expected either call= or node="),
        (1, {"node": "elsewhere"}, r"\('elsewhere', None\).* one of \['act', 'plan'\]"),
        (1, {"node": "plan", "visit": 2}, r"\('plan', 2\)"),
        (1, {"node": "plan", "visit": 0}, r"\('plan', 0\)"),
        (1, {"call": make_call(record_id="other")}, "other"),
    ],
)
def test_a_reward_for_nothing_is_refused(reward: Any, whom: dict[str, Any], message: str) -> None:
    trajectory = played(1, "plan", "act")
    with pytest.raises(RewardError, match=message):
        trajectory.add_reward(reward, **whom)
    assert own(trajectory) == [None, None]


# --- what they become ----------------------------------------------------------------------------


def two_planners() -> list[Trajectory]:
    """Trajectories that earned 1 and 0; the first one's plan earned .5 more."""
    first, second = played(1, "plan", "act"), played(0, "plan", "act")
    first.add_reward(0.5, node="plan")
    return [first, second]


def test_a_calls_reward_is_its_own() -> None:
    """Worth [1.5, 1] and [0, 0], by trajectory 1.25 and 0, mean .625."""
    assert advantages(*two_planners()) == [0.875, 0.375, -0.625, -0.625]


def test_a_calls_reward_counts_for_what_came_before() -> None:
    """The act earns 1: worth [1, 1] and [0, 0], whatever came later; mean .5."""
    first, second = played(0, "plan", "act"), played(0, "plan", "act")
    first.add_reward(1, node="act")
    assert advantages(first, second, call_rewards="to_go") == [0.5, 0.5, -0.5, -0.5]


def test_what_is_only_context_counts_for_what_came_before() -> None:
    """Another model's call earned 2 between two of ours: 1 + 2 + 4 = 7 and 4, by trajectory 5.5,
    against 0.
    """
    judged = Trajectory(
        reward=0,
        calls=[
            make_call(record_id="a", reward=1),
            make_call(record_id="b", model="other", reward=2),
            make_call(record_id="c", reward=4),
        ],
    )
    assert advantages(judged, played(0, "act"), call_rewards="to_go") == [4.25, 1.25, -2.75]


def test_the_std_is_that_of_the_trajectories() -> None:
    """1.25 and 0: std .625, eps 1e-6."""
    found = advantages(*two_planners(), scale_rewards="group")
    assert found == pytest.approx([1.4, 0.6, -1, -1], abs=1e-5)


def test_calls_are_compared_with_those_of_their_kind() -> None:
    """Plans 1.5 and 0, mean .75; acts 1 and 0, mean .5."""
    found = advantages(*two_planners(), call_baseline="visit")
    assert found == [0.75, 0.5, -0.75, -0.5]
    scaled = advantages(*two_planners(), call_baseline="visit", scale_rewards="group")
    assert scaled == pytest.approx([1, 1, -1, -1], abs=1e-5)
    others = advantages(*two_planners(), call_baseline="visit", baseline="leave_one_out")
    assert others == [1.5, 1.0, -1.5, -1.0]


def test_a_call_without_its_like_is_compared_with_the_trajectories() -> None:
    """A second plan was made in one trajectory only: 1 against the mean reward, .5."""
    found = advantages(played(1, "plan", "plan"), played(0, "plan"), call_baseline="visit")
    assert found == [0.5, 0.5, -0.5]


def test_equal_trajectories_differ_by_their_calls() -> None:
    """Both earned 1, and only the calls tell them apart: 1.5 and .5 beside 1 and 1, mean 1."""
    first, second = played(1, "plan", "act"), played(1, "plan", "act")
    first.add_reward(0.5, node="plan")
    first.add_reward(-0.5, node="act")
    assert advantages(first, second) == [0.5, -0.5, 0, 0]


@pytest.mark.parametrize("scale", ["group", "group_sample", "batch", "batch_centred"])
def test_equal_trajectories_have_the_std_of_their_calls(scale: str) -> None:
    """Worth [2, 0] and [0, 2], mean 1: the trajectories' std is 0, their calls' 1. Divided by the
    former, the advantages would be 1 / eps.
    """
    first, second = played(0, "plan", "act"), played(0, "plan", "act")
    first.add_reward(2, node="plan")
    second.add_reward(2, node="act")
    found = advantages(first, second, scale_rewards=scale)
    assert found == pytest.approx([1, -1, -1, 1], abs=2e-4)


def test_a_call_whose_reward_is_not_finite_leaves_its_trajectory_out() -> None:
    odd = Trajectory(reward=0.0, calls=[make_call(reward=float("inf"))])
    selection = chosen(odd, played(1, "act"), played(0, "act"))
    assert [s.advantage for s in selection.samples] == [0.5, -0.5]
    assert [s.reason for s in selection.skipped] == ["trajectory 0: its reward of a call is inf"]


def test_places() -> None:
    def at(node: str, namespace: str | None = None) -> Origin:
        return Origin(node=node, namespace=namespace)

    calls: list[ModelCall] = [
        make_call(origin=origin)
        for origin in (
            at("model", "writer:a|model:b"),
            at("model", "critic:c|model:d"),
            at("model", "writer:e|model:f"),
            Origin(role="judge"),
            Origin(),
        )
    ]
    assert places([call.origin for call in calls]) == [
        ("writer/model", 1),
        ("critic/model", 1),
        ("writer/model", 2),
        ("judge", 1),
        ("outside a graph", 1),
    ]
