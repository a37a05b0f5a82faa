"""Which calls of a step are trained, what is skipped, and what bad input gets."""

import math
from typing import Any

import numpy as np
import pytest
from openai.types.chat.chat_completion import Choice

from art_core.batch.select import Selection, select
from art_core.calls import ModelCall, Origin
from art_core.config import TrainConfig
from art_core.errors import (
    GroupError,
    NoTrainableTokens,
    RewardError,
    RolloutFailure,
    StaleCall,
    WrongModel,
)
from art_core.trajectories import Trajectory, TrajectoryGroup
from tests.core.sample import make_call

NO_IDS: dict[str, Any] = {"prompt_ids": None, "sampled_ids": None, "logprobs": None}


def played(reward: Any, *calls: ModelCall, **fields: Any) -> Trajectory:
    """A trajectory of these calls; without any, of one whole call."""
    trajectory = Trajectory(calls=list(calls) or [make_call()], **fields)
    trajectory.reward = reward
    return trajectory


def group(*rewards: Any) -> TrajectoryGroup:
    return TrajectoryGroup([played(reward) for reward in rewards])


def chosen(*groups: TrajectoryGroup, step: int = 2, **config: Any) -> Selection:
    return select(groups, model="agent", step=step, config=TrainConfig(**config))


def reasons(selection: Selection) -> list[tuple[int, str, int]]:
    return [(s.group, s.reason, s.trajectories) for s in selection.skipped]


def test_each_call_becomes_a_sample_with_its_trajectorys_advantage() -> None:
    """Rewards 1 and 0, mean .5; the first trajectory made two calls."""
    first = played(1, make_call(record_id="a"), make_call(record_id="b", logprobs=[-1, -2, -3]))
    selection = chosen(TrajectoryGroup([first, played(0, make_call(record_id="c"))]))
    got = [(s.call, s.trajectory, s.advantage) for s in selection.samples]
    assert got == [(0, 0, 0.5), (1, 0, 0.5), (2, 1, -0.5)]
    second = selection.samples[1]
    assert second.prompt_ids.tolist() == [1, 2, 3, 4]
    assert second.sampled_ids.tolist() == [5, 6, 0]
    assert second.logprobs.tolist() == [-1, -2, -3]
    assert (second.temperature, second.distorted) == (1.0, False)
    assert (selection.groups, selection.skipped) == (1, [])


def test_group_std_is_a_setting() -> None:
    """(1 - .5) / (.5 + 1e-6) = .999998, arXiv:2402.03300."""
    selection = chosen(group(1, 0), scale_rewards="group")
    assert [s.advantage for s in selection.samples] == pytest.approx([0.999998, -0.999998])


# --- groups with nothing to learn from -----------------------------------------------------------


def test_equal_rewards_are_skipped_and_do_not_dilute_the_others() -> None:
    """Case 043: the mixed group is as if it were alone, advantages [.75, -.25, -.25, -.25]."""
    equal, mixed = group(0.5, 0.5, 0.5, 0.5), group(1, 0, 0, 0)
    alone, both = chosen(mixed), chosen(equal, mixed)
    assert [s.advantage for s in both.samples] == [0.75, -0.25, -0.25, -0.25]
    assert len(both.samples) == len(alone.samples)
    for ours, expected in zip(both.samples, alone.samples, strict=True):
        assert (ours.call, ours.trajectory) == (expected.call, expected.trajectory)
    assert (both.groups, alone.groups) == (1, 1)
    assert reasons(both) == [(0, "all 4 rewards are equal (0.5): nothing to learn from", 4)]
    assert chosen(equal, equal).samples == []


def test_a_group_of_one_is_skipped() -> None:
    """Case 045, one_left: a std of one, with n - 1 in it, would be NaN."""
    lonely = TrajectoryGroup([played(0.7)], exceptions=[ValueError("a"), ValueError("b")])
    assert reasons(chosen(group(0.7), lonely)) == [
        (0, "one trajectory only: there is nothing to compare it with", 1),
        (
            1,
            "one trajectory only: there is nothing to compare it with (2 of its rollouts failed)",
            1,
        ),
    ]


def test_an_empty_group_is_skipped() -> None:
    """Case 045, none_left."""
    failed = TrajectoryGroup([RolloutFailure("no", trajectory=Trajectory(calls=[make_call()]))])
    assert reasons(chosen(TrajectoryGroup(), failed)) == [
        (0, "the group is empty", 0),
        (1, "the group is empty (1 of its rollouts failed)", 0),
    ]


def test_no_groups_select_nothing() -> None:
    assert chosen() == Selection(samples=[], skipped=[], groups=0, share=0.0)


# --- rewards -------------------------------------------------------------------------------------


@pytest.mark.parametrize("bad", [None, "1.0", [1.0], np.array([1.0, 2.0]), 1j])
def test_a_missing_reward_is_named(bad: Any) -> None:
    """Case 045, none_reward: never 0 by default."""
    with pytest.raises(RewardError) as caught:
        chosen(group(0, 1), group(1.0, bad, 0.0))
    assert str(caught.value).startswith(
        f"reward of trajectory 1 of group 1: got {bad!r}, expected a finite number"
    )


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf, np.float32("nan")])
def test_a_reward_that_is_not_finite_leaves_its_trajectory_out(bad: float) -> None:
    """Case 045, nan_one and inf_one: it is told, and the other two stay finite, .5 and -.5."""
    selection = chosen(group(bad, 1.0, 0.0), group(0, 1))
    assert [s.advantage for s in selection.samples] == [0.5, -0.5, -0.5, 0.5]
    assert [s.trajectory for s in selection.samples] == [0, 1, 2, 3]
    assert reasons(selection) == [(0, f"trajectory 0: its reward is {float(bad)}", 1)]
    assert selection.share == 4 / 5


@pytest.mark.parametrize(("bad", "told"), [(1e308, ", 1e+308, is too l"), (10**400, " is inf")])
def test_a_reward_too_large_to_be_compared_is_left_out(bad: float, told: str) -> None:
    selection = chosen(group(bad, 1.0, 0.0))
    assert [s.advantage for s in selection.samples] == [0.5, -0.5]
    ((_, reason, _),) = reasons(selection)
    assert reason.startswith(f"trajectory 0: its reward{told}")


def test_a_group_that_is_left_with_one_is_skipped() -> None:
    selection = chosen(group(math.nan, 1.0))
    assert selection.samples == []
    assert [reason for _, reason, _ in reasons(selection)] == [
        "trajectory 0: its reward is nan",
        "one trajectory only: there is nothing to compare it with",
    ]


@pytest.mark.parametrize(
    "rewards", [(True, 0, 1, False), (np.float32(1), np.int64(0), np.bool_(True), 0.0)]
)
def test_any_number_will_do(rewards: tuple[Any, ...]) -> None:
    """Case 045, bool_int: mean .5."""
    assert [s.advantage for s in chosen(group(*rewards)).samples] == [0.5, -0.5, 0.5, -0.5]


# --- calls ---------------------------------------------------------------------------------------


def test_a_trajectory_without_trainable_tokens_names_the_nodes() -> None:
    foreign = [make_call(**NO_IDS, origin=Origin(node=node)) for node in ("writer", "planner")]
    with pytest.raises(NoTrainableTokens) as caught:
        chosen(TrajectoryGroup([played(1), played(0, *foreign)]))
    assert str(caught.value) == (
        "trajectory 1 of group 0 has no call whose sampled tokens are known; asked by planner, "
        "writer; left out: 2 no ids. Point those nodes at ChatArt, or at an "
        "endpoint that returns token ids."
    )


def test_a_trajectory_without_calls_names_the_nodes_that_ran() -> None:
    bare = Trajectory(reward=0.0, metadata={"graph": {"nodes": ["plan", "act"]}})
    with pytest.raises(NoTrainableTokens, match=r"made no call .* ran: \['plan', 'act'\]"):
        chosen(TrajectoryGroup([played(1), bare]))
    with pytest.raises(NoTrainableTokens, match=r"trajectory 1 of group 0 made no call to the m"):
        chosen(TrajectoryGroup([played(1), Trajectory(reward=0.0)]))


def test_a_call_that_sampled_nothing_is_not_trained() -> None:
    silent = make_call(sampled_ids=[], logprobs=[])
    selection = chosen(TrajectoryGroup([played(1), played(0, make_call(), silent)]))
    assert len(selection.samples) == 2


def test_a_rollout_that_ended_before_the_model_spoke_is_skipped_with_its_end() -> None:
    """Its reward still counts in the mean: (1 + 1 + 0) / 3."""
    early = Trajectory(reward=0.0, ended="context_overflow")
    selection = chosen(TrajectoryGroup([played(1), early, played(1)]))
    assert [s.advantage for s in selection.samples] == pytest.approx([1 / 3, 1 / 3])
    assert [s.trajectory for s in selection.samples] == [0, 1]
    assert reasons(selection) == [
        (0, "trajectory 1: it ended by context_overflow before the model said anything", 1)
    ]


def test_faults_of_the_policy_train() -> None:
    """Dropping them would be survivor bias."""
    cut_off = played(0, ended="recursion_limit")
    assert len(chosen(TrajectoryGroup([played(1), cut_off])).samples) == 2


def test_calls_of_another_model_are_refused_by_name() -> None:
    other = played(0, make_call(model="planner"))
    with pytest.raises(WrongModel, match=r"trajectory 1 of group 0: got \['planner'\], .*'agent'"):
        chosen(TrajectoryGroup([played(1), other]))


def test_of_several_models_only_ours_is_trained() -> None:
    both = played(0, make_call(model="planner"), make_call(record_id="ours"))
    selection = chosen(TrajectoryGroup([played(1), both]))
    assert [s.advantage for s in selection.samples] == [0.5, -0.5]


@pytest.mark.parametrize("step", [2, 4, 6])
def test_calls_may_be_as_old_as_allowed(step: int) -> None:
    """The calls are of step 2, max_staleness is 4."""
    assert len(chosen(group(1, 0), step=step).samples) == 2


def test_staler_calls_are_refused_by_name() -> None:
    with pytest.raises(StaleCall) as caught:
        chosen(group(1, 0), step=7)
    assert str(caught.value) == (
        "a call of trajectory 0 of group 0 was answered by step 2, 5 steps ago, expected at most "
        "max_staleness=4 steps behind step 7. "
        "Gather anew, or raise TrainConfig(max_staleness=...)."
    )
    assert len(chosen(group(1, 0), step=7, max_staleness=5).samples) == 2


def test_a_call_longer_than_a_row_is_named() -> None:
    """14 prompt ids and 4 sampled ones are 17 positions: the last one predicts nothing."""
    long = make_call(prompt_ids=[1] * 14, sampled_ids=[1] * 4, logprobs=[0] * 4)
    groups = TrajectoryGroup([played(1), played(0, long)])
    with pytest.raises(GroupError, match=r"trajectory 1 of group 0, asked by agent, .* got 17"):
        chosen(groups, max_tokens_per_row=16)
    assert len(chosen(groups, max_tokens_per_row=17).samples) == 2


def test_truncated_calls_train_unless_masked() -> None:
    cut = make_call(record_id="cut", finish_reason="length")
    groups = TrajectoryGroup([played(1, make_call(), cut), played(0, cut), played(0)])
    assert len(chosen(groups).samples) == 4
    masked = chosen(groups, mask_truncated=True)
    assert [s.trajectory for s in masked.samples] == [0, 1]
    assert [s.advantage for s in masked.samples] == pytest.approx([2 / 3, -1 / 3])
    assert reasons(masked) == [(0, "trajectory 1: its calls were all cut by their token limit", 1)]


def test_a_group_whose_every_call_is_masked_is_not_counted_as_trained() -> None:
    cut = make_call(finish_reason="length")
    selection = chosen(TrajectoryGroup([played(1, cut), played(0, cut)]), mask_truncated=True)
    assert (selection.samples, selection.groups, len(selection.skipped)) == ([], 0, 2)


# --- kept choices ----------------------------------------------------------------


def choice(record_id: str) -> Choice:
    return Choice.model_validate(
        {
            "index": 0,
            "finish_reason": "stop",
            "message": {"role": "assistant", "content": "Hello"},
            "art_record_id": record_id,
        }
    )


def test_kept_choices_say_which_calls_are_trained() -> None:
    calls = [make_call(record_id="a"), make_call(record_id="b")]
    picked = played(1, *calls, messages_and_choices=[choice("b")])
    selection = chosen(TrajectoryGroup([picked, played(0)]))
    assert len(selection.samples) == 2


def test_a_choice_that_no_call_gave_is_refused() -> None:
    lost = played(1, make_call(record_id="a"), messages_and_choices=[choice("elsewhere")])
    with pytest.raises(NoTrainableTokens, match=r"0 of group 0 keeps choices that no captured"):
        chosen(TrajectoryGroup([lost, played(0)]))


def test_the_share_counts_trajectories_of_all_groups() -> None:
    """Three of the seven: the equal group and the lonely one are not trained."""
    assert chosen(group(0, 1, 1), group(1, 1, 1), group(0.5)).share == 3 / 7


# --- trajectories that can't be trained ----------------------------------------------------------

STALE = {"step": -3}
UNFIT = [
    pytest.param([make_call(model="planner")], "calls of trajectory 1", id="another model"),
    pytest.param([make_call(**STALE)], "5 steps ago", id="stale"),
    pytest.param([make_call(step=3)], "comes after step 2", id="of a step to come"),
    pytest.param([make_call(**NO_IDS)], "no call whose sampled tokens", id="without tokens"),
    pytest.param([make_call(prompt_ids=[1] * 5000)], "too long for a row: got 5002", id="too long"),
]


@pytest.mark.parametrize(("calls", "reason"), UNFIT)
def test_what_cannot_be_trained_is_refused_or_left_out(calls: list[ModelCall], reason: str) -> None:
    """Left out, its group is compared without it: 1 and 0, not 1, 7 and 0."""
    mixed = TrajectoryGroup([played(1), played(7, *calls), played(0)])
    with pytest.raises(GroupError, match=reason):
        chosen(mixed)
    selection = chosen(mixed, unfit="leave_out")
    assert [s.advantage for s in selection.samples] == [0.5, -0.5]
    ((at, why, count),) = reasons(selection)
    assert (at, count) == (0, 1)
    assert why.startswith("trajectory 1: ")
    assert reason in why


def test_a_missing_reward_is_never_left_out() -> None:
    with pytest.raises(RewardError):
        chosen(group(1, None, 0), unfit="leave_out")


# --- other baselines -----------------------------------------------------------------------------


def test_groups_compared_with_the_whole_step_need_not_differ() -> None:
    """REINFORCE++, arXiv:2501.03262: mean 2/3 of [1, 1, 1, 0, 1, 0]; a group of one counts too."""
    selection = chosen(group(1, 1, 1), group(0, 1), group(0), baseline="batch")
    third = 1 / 3
    assert [s.advantage for s in selection.samples] == pytest.approx(
        [third, third, third, -2 * third, third, -2 * third]
    )
    assert (selection.groups, selection.share) == (3, 1.0)


def test_a_step_without_any_advantage_is_skipped_whole() -> None:
    """An update without a gradient would drift on Adam's momentum."""
    why = "all advantages of the step are 0: nothing to learn from"
    both: list[dict[str, Any]] = [{"baseline": "batch"}, {"equal_groups": "keep"}]
    for settings in both:
        selection = chosen(group(1, 1), group(1, 1, 1), **settings)
        assert selection.samples == []
        assert reasons(selection) == [(0, why, 2), (1, why, 3)]


def test_rounding_is_no_advantage() -> None:
    """Three times .1 is not .3 in floats, nor are z-scores of opposite parts opposite to the bit.
    An update on such a rest would be as large as any: Adam divides by the gradient's size.
    """
    steps = [
        chosen(group(0.1, 0.1, 0.1), baseline="batch", scale_rewards="batch"),
        *(
            chosen(group(0.1, 0.1, 0.1), equal_groups="keep", baseline=baseline)
            for baseline in ("group", "leave_one_out", "length")
        ),
        chosen(
            TrajectoryGroup(
                [played(0, metrics={"a": a, "b": b}) for a, b in ((1, 0), (0, 1), (0, 1))]
            ),
            reward_parts=("a", "b"),
        ),
    ]
    for selection in steps:
        assert selection.samples == []
        assert reasons(selection) == [
            (0, "all advantages of the step are 0: nothing to learn from", 3)
        ]


def test_equal_groups_may_be_kept() -> None:
    """Their tokens count in the means then; alone they are trained only where a KL or the entropy
    acts on them.
    """
    both = chosen(group(1, 1), group(1, 0), equal_groups="keep")
    assert [s.advantage for s in both.samples] == [0, 0, 0.5, -0.5]
    terms: list[dict[str, Any]] = [{"kl_penalty_coef": 0.1}, {"entropy_coef": 0.01}]
    for term in terms:
        alone = chosen(group(1, 1), equal_groups="keep", **term)
        assert [s.advantage for s in alone.samples] == [0, 0]


def test_calls_without_an_advantage_may_be_left_out() -> None:
    """Rewards 1, .5 and 0: the second is the mean."""
    found = {
        setting: [s.advantage for s in chosen(group(1, 0.5, 0), zero_advantages=setting).samples]
        for setting in ("count", "leave_out")
    }
    assert found == {"count": [0.5, 0, -0.5], "leave_out": [0.5, -0.5]}
    assert chosen(group(1, 0.5, 0)).share == 1.0
    assert chosen(group(1, 0.5, 0), zero_advantages="leave_out").share == 2 / 3


def test_what_did_worse_may_weigh_less() -> None:
    """Rewards 1, 1, 0 and 0 with mean .5, and .3 or nothing of what is below it."""
    four = group(1, 1, 0, 0)
    weighed = chosen(four, negative_weight=0.3)
    assert [s.advantage for s in weighed.samples] == pytest.approx([0.5, 0.5, -0.15, -0.15])
    better = chosen(four, negative_weight=0.0, zero_advantages="leave_out")
    assert [s.advantage for s in better.samples] == [0.5, 0.5]
    assert better.share == 0.5


def test_the_running_baseline_goes_on_from_step_to_step() -> None:
    """RAE, arXiv:2506.24119: [1, -.05, -.0475, .954875] from 0, ending at .092869."""
    first = chosen(group(1, 0), group(0, 1), baseline="running")
    assert [s.advantage for s in first.samples] == pytest.approx([1, -0.05, -0.0475, 0.954875])
    assert first.running == pytest.approx(0.092869, abs=5e-7)
    config = TrainConfig(baseline="running")
    second = select([group(1)], model="agent", step=2, config=config, running=first.running)
    assert second.samples[0].advantage == pytest.approx(1 - first.running)


def test_long_rollouts_are_punished_softly() -> None:
    """DAPO: limit 10, buffer 4; trajectories of 3 and of 9 tokens: 0 and (6 - 9) / 4 = -.75."""
    long = played(1, *(make_call(record_id=str(i)) for i in range(3)))
    settings = {"overlong_limit": 10, "overlong_buffer": 4}
    selection = chosen(TrajectoryGroup([played(1), long]), **settings)
    assert [s.advantage for s in selection.samples] == [0.375, *[-0.375] * 3]


def test_a_baseline_by_length() -> None:
    """OPO, arXiv:2505.23585: rewards 1 and 0 of 3 and 6 tokens, baseline 3 / 9."""
    long = played(0, make_call(record_id="a"), make_call(record_id="b"))
    selection = chosen(TrajectoryGroup([played(1), long]), baseline="length")
    assert [s.advantage for s in selection.samples] == pytest.approx([2 / 3, -1 / 3, -1 / 3])


def test_parts_of_the_reward() -> None:
    """GDPO: [0, -1.414214, 0, 1.414214]; the third group's parts are equal."""

    def parted(*parts: tuple[float, float]) -> TrajectoryGroup:
        return TrajectoryGroup([played(0, metrics={"a": a, "b": b}) for a, b in parts])

    names = ("a", "b")
    groups = parted((1, 0), (0, 0), (0, 1), (1, 1)), parted((1, 1), (1, 1))
    selection = chosen(*groups, reward_parts=names)
    assert [s.advantage for s in selection.samples] == pytest.approx(
        [0, -1.414214, 0, 1.414214], abs=1e-6
    )
    assert reasons(selection) == [
        (1, "all 2 have equal parts of the reward: nothing to learn from", 2)
    ]
    with pytest.raises(RewardError, match=r"metrics\['b'\] of trajectory 1 of group 0: got None"):
        chosen(
            TrajectoryGroup([played(1, metrics={"a": 1, "b": 1}), played(1, metrics={"a": 1})]),
            reward_parts=names,
        )


def test_how_old_a_call_is_goes_with_it() -> None:
    assert [s.staleness for s in chosen(group(1, 0), step=5).samples] == [3, 3]
