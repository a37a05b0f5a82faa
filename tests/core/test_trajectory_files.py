"""Trajectories as Parquet: what is written is read back, exactly."""

from __future__ import annotations

import math
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from openai.types.chat.chat_completion import Choice
from pydantic import BaseModel

from art_core.calls import ModelCall, Origin, Sampling
from art_core.errors import RolloutFailure, RunFolderError
from art_core.rundir import RunDir
from art_core.trajectories import History, Trajectory, TrajectoryGroup
from art_core.trajectory_files import read_trajectories, trajectory_path, write_trajectories
from tests.core.sample import make_call

pyarrow = pytest.importorskip("pyarrow", reason="art-langgraph[train] is not installed")


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    return RunDir.at(tmp_path, "p", "m")


def round_trip(run: RunDir, groups: list[TrajectoryGroup]) -> list[TrajectoryGroup]:
    return read_trajectories(write_trajectories(run, "train", 7, groups))


def assert_same_call(left: ModelCall, right: ModelCall) -> None:
    for field in fields(ModelCall):
        ours, theirs = getattr(left, field.name), getattr(right, field.name)
        if isinstance(ours, np.ndarray):
            assert theirs.dtype == ours.dtype
            assert theirs.tobytes() == ours.tobytes(), field.name
        else:
            assert theirs == ours, field.name


def assert_same(left: Trajectory, right: Trajectory) -> None:
    for ours, theirs in zip(left.calls, right.calls, strict=True):
        assert_same_call(ours, theirs)
    without = {"calls", "exception", "state"}
    assert right.model_dump(exclude=without) == left.model_dump(exclude=without)


CHOICE = {
    "index": 0,
    "finish_reason": "tool_calls",
    "art_record_id": "r1",
    "message": {
        "role": "assistant",
        "content": None,
        "tool_calls": [
            {"id": "c1", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
        ],
    },
    "logprobs": {"content": [{"token": "x", "logprob": -0.5, "top_logprobs": []}]},
}


def test_everything_of_a_trajectory_comes_back(run: RunDir) -> None:
    rng = np.random.default_rng(0)
    calls = [
        make_call(
            record_id=f"r{i}",
            prompt_ids=rng.integers(0, 2**31 - 1, 50),
            sampled_ids=rng.integers(0, 2**31 - 1, 20),
            logprobs=-(rng.random(20).astype(np.float32) ** 9),
            response=bytes(range(256)),
            request={"messages": [{"role": "user", "content": "caf\u00e9 \ud83d"}], "n": 2},
            choice_index=i,
            sampling=Sampling(0.7, 0.9, 5, 0.1, 2, 99, ("a", "b"), 2**63 - 1, "tool_call"),
            origin=Origin("node", "ns|1", "('p', 2)", 3, 2, "planner", "run"),
            prompt_rendered=i == 1,
            reward=(None, 0.1, -2.0)[i],
        )
        for i in range(3)
    ]
    trajectory = Trajectory(
        messages_and_choices=[{"role": "user", "content": "Hi"}, Choice.model_validate(CHOICE)],
        tools=[{"type": "function", "function": {"name": "f"}}],
        additional_histories=[History(messages_and_choices=[Choice.model_validate(CHOICE)])],
        reward=0.1,
        metrics={"turns": 3, "won": True, "cost": 0.25},
        metadata={"scenario": {"id": 7, "names": ["a", None]}},
        logs=["one", "two\n\ud83d"],
        calls=calls,
        ended="recursion_limit",
        rollout_id="run/7.0.0",
        start_time=1234.5,
    )
    group = TrajectoryGroup(
        [trajectory], metadata={"scenario": 7}, metrics={"judge": 0.5}, logs=["fine"]
    )
    [back] = round_trip(run, [group])
    assert (back.metadata, back.metrics, back.logs) == (group.metadata, group.metrics, group.logs)
    assert_same(trajectory, back.trajectories[0])
    assert back.trajectories[0].chosen_records() == {("r1", 0)}
    assert back.trajectories[0].messages() == trajectory.messages()


def test_groups_failures_and_empty_ones_keep_their_places(run: RunDir) -> None:
    failure = RolloutFailure(
        "rollout 1 of group 0 ran past its limit of 3 s",
        trajectory=Trajectory(ended="timeout", calls=[make_call(record_id="late")], start_time=2.0),
    )
    groups = [
        TrajectoryGroup(
            [
                Trajectory(reward=1.0, start_time=0.5),
                failure,
                Trajectory(reward=0.0, calls=[make_call(record_id="a"), make_call(record_id="b")]),
                ValueError("odd"),
            ]
        ),
        TrajectoryGroup([], metadata={"empty": True}),
        TrajectoryGroup([Trajectory(calls=[make_call(record_id="c")])]),
    ]
    back = round_trip(run, groups)
    assert [[[c.record_id for c in t.calls] for t in group] for group in back] == [
        [[], ["a", "b"]],
        [],
        [["c"]],
    ]
    assert back[1].metadata == {"empty": True}
    assert back[2].trajectories[0].reward is None
    late, odd = back[0].exceptions
    assert isinstance(late, RolloutFailure)
    assert str(late) == str(failure)
    assert_same(failure.trajectory, late.trajectory)
    assert str(odd) == "ValueError: odd"
    assert round_trip(run, []) == []


def test_missing_and_empty_ids_are_told_apart(run: RunDir) -> None:
    none = make_call(record_id="n", prompt_ids=None, sampled_ids=None, logprobs=None, step=None)
    empty = make_call(
        record_id="e", sampled_ids=np.zeros(0, np.int32), logprobs=np.zeros(0, np.float32)
    )
    [group] = round_trip(run, [TrajectoryGroup([Trajectory(calls=[none, empty, make_call()])])])
    back = group.trajectories[0].calls
    for ours, theirs in zip([none, empty, make_call()], back, strict=True):
        assert_same_call(ours, theirs)
    assert [call.trainable for call in back] == [False, False, True]
    assert back[2].prompt_ids is not None
    assert back[2].prompt_ids.flags.writeable  # torch.from_numpy complains otherwise


def test_nonfinite_rewards_metrics_and_logprobs_come_back(run: RunDir) -> None:
    call = make_call(logprobs=np.array([math.nan, -math.inf, 0.0], np.float32))
    trajectory = Trajectory(
        reward=math.nan, metrics={"a": math.inf, "b": math.nan}, metadata={"x": math.inf}
    )
    trajectory.calls = [call]
    [group] = round_trip(run, [TrajectoryGroup([trajectory])])
    back = group.trajectories[0]
    assert back.reward is not None
    assert math.isnan(back.reward)
    assert back.metrics["a"] == math.inf
    assert math.isnan(back.metrics["b"])
    assert back.metadata == {"x": "Infinity"}  # JSON has no form for it; a text tells what it was
    assert_same_call(call, back.calls[0])


class Scenario(BaseModel):
    id: int


def test_objects_in_metadata_become_what_json_can_say(run: RunDir) -> None:
    metadata: dict[str, Any] = {
        "model": Scenario(id=3),
        "number": np.float32(0.5),
        "array": np.arange(2),
        "odd": 1j,
        "nested": {1: "a key", (1, 2): "a tuple"},
    }
    [group] = round_trip(run, [TrajectoryGroup([Trajectory(metadata=metadata)])])
    assert group.trajectories[0].metadata == {
        "model": {"id": 3},
        "number": 0.5,
        "array": [0, 1],
        "odd": "1j",
        "nested": {"1": "a key", "1,2": "a tuple"},
    }


def test_a_step_that_is_played_again_keeps_the_older_file_marked(run: RunDir) -> None:
    for reward in (1.0, 2.0, 3.0):
        write_trajectories(run, "train", 7, [TrajectoryGroup([Trajectory(reward=reward)])])
    found = {
        path.name: read_trajectories(path)[0].trajectories[0].reward
        for path in run.trajectories("train").iterdir()
    }
    assert found == {
        "0007.parquet": 3.0,
        "0007.replaced-1.parquet": 1.0,
        "0007.replaced-2.parquet": 2.0,
    }


def test_other_programs_read_the_columns(run: RunDir) -> None:
    """Plain Parquet: a row a call, rewards and ids as numbers."""
    group = TrajectoryGroup([Trajectory(reward=0.5, calls=[make_call(), make_call(record_id="b")])])
    path = write_trajectories(run, "val", 12345, [group])
    assert path == trajectory_path(run, "val", 12345)
    assert path.name == "12345.parquet"
    table = pyarrow.parquet.read_table(path)
    columns = ["group", "trajectory", "call", "reward", "node", "record_id", "step", "sampled_ids"]
    assert table.select(columns).to_pylist() == [
        {
            "group": 0,
            "trajectory": 0,
            "call": index,
            "reward": 0.5,
            "node": "agent",
            "record_id": record_id,
            "step": 2,
            "sampled_ids": [5, 6, 0],
        }
        for index, record_id in enumerate(["r0", "b"])
    ]


def test_what_can_not_be_read_is_refused(run: RunDir, tmp_path: Path) -> None:
    path = write_trajectories(run, "train", 1, [TrajectoryGroup([Trajectory(reward=1.0)])])
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(RunFolderError, match="can't be read"):
        read_trajectories(path)
    with pytest.raises(RunFolderError, match="can't be read"):
        read_trajectories(tmp_path / "none.parquet")
    foreign = tmp_path / "foreign.parquet"
    pyarrow.parquet.write_table(pyarrow.table({"a": [1]}), foreign)
    with pytest.raises(RunFolderError, match="version of the trajectory file"):
        read_trajectories(foreign)
