"""Trajectories and groups: what they hold and derive."""

from __future__ import annotations

import time
from typing import Any

import pytest
from openai.types.chat.chat_completion import Choice

import art_core as art
from tests.core.sample import make_call


def choice(record_id: str | None = "r0", index: int = 0, text: str = "Hello") -> Choice:
    fields: dict[str, Any] = {
        "index": index,
        "finish_reason": "stop",
        "message": {"role": "assistant", "content": text},
    }
    if record_id is not None:
        fields["art_record_id"] = record_id
    return Choice.model_validate(fields)


async def rollout() -> art.Trajectory:
    return art.Trajectory(reward=1.0)


def test_a_reward_that_was_never_set_is_none_and_not_zero() -> None:
    assert art.Trajectory().reward is None
    assert art.Trajectory(messages_and_choices=[], reward=0.0).reward == 0.0


def test_trajectories_do_not_share_their_lists() -> None:
    first, second = art.Trajectory(), art.Trajectory()
    first.messages_and_choices.append({"role": "user", "content": "Hi"})
    first.log("a line")
    first.metrics["x"] = 1
    assert second.messages_and_choices == []
    assert second.logs == []
    assert second.metrics == {}


def test_messages_are_the_users_or_else_the_last_calls() -> None:
    user = {"role": "user", "content": "Hi"}
    kept = art.Trajectory(messages_and_choices=[user, choice()], calls=[make_call()])
    assert kept.messages() == [user, {"role": "assistant", "content": "Hello"}]
    captured = art.Trajectory(
        calls=[make_call(), make_call(message={"role": "assistant", "content": "Bye"})]
    )
    assert captured.messages() == [user, {"role": "assistant", "content": "Bye"}]
    assert art.Trajectory().messages() == []


def test_kept_choices_say_which_calls_are_trained() -> None:
    trajectory = art.Trajectory(
        messages_and_choices=[{"role": "user", "content": "Hi"}, choice("r1", 1)],
        additional_histories=[art.History(messages_and_choices=[choice("r2")])],
    )
    assert trajectory.chosen_records() == {("r1", 1), ("r2", 0)}
    assert art.Trajectory(messages_and_choices=[choice(None)]).chosen_records() == {("", 0)}
    assert art.Trajectory(calls=[make_call()]).chosen_records() is None


def test_tokens_are_those_that_were_sampled() -> None:
    foreign = make_call(prompt_ids=None, sampled_ids=None, logprobs=None)
    assert art.Trajectory(calls=[make_call(), foreign, make_call()]).completion_tokens == 6


async def test_durations_are_measured_and_never_negative() -> None:
    trajectory = art.Trajectory()
    async with trajectory.track_duration("search"):
        time.sleep(0.01)  # noqa: ASYNC251  # a blocking search
    async with trajectory.track_duration("search"):
        pass
    assert 0.01 <= trajectory.metrics["search_duration"] < 1
    assert trajectory.finish() is trajectory
    assert 0 <= trajectory.metrics["duration"] < 1
    back = art.Trajectory(start_time=time.time() + 3600)  # the clock was put back meanwhile
    assert back.finish().metrics["duration"] == 0


def test_for_logging_is_plain() -> None:
    logged = art.Trajectory(reward=0.5, logs=["x"], calls=[make_call()]).for_logging()
    assert logged["reward"] == 0.5
    assert logged["messages"][-1] == {"role": "assistant", "content": "Hello"}
    assert logged["ended"] == "completed"


def test_a_group_is_always_a_group() -> None:
    done, fault = art.Trajectory(reward=1.0), ValueError("x")
    pending = rollout()
    group = art.TrajectoryGroup([done, fault, pending], metadata={"scenario": 1})
    assert isinstance(group, art.TrajectoryGroup)
    assert (list(group), group.exceptions, group.pending) == ([done], [fault], [pending])
    assert len(group) == 1
    assert repr(group) == "TrajectoryGroup(1 trajectories, 1 exceptions, 1 pending)"
    pending.close()


def test_a_group_refuses_what_is_no_rollout() -> None:
    with pytest.raises(TypeError, match=r"got 7.*Return an art\.Trajectory"):
        art.TrajectoryGroup([7])  # type: ignore[list-item]  # the fault under test


async def test_a_group_can_be_awaited_again() -> None:
    group = art.TrajectoryGroup([rollout()])
    assert len(await group) == 1
    group.add(rollout())
    assert len(await group) == 2
    assert len(await group) == 2
