"""The metrics file: strict JSON, nothing lost, the newest value wins (case 096)."""

from __future__ import annotations

import json
import logging
import math
import threading
from collections.abc import Iterator
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from art_core.errors import ConfigError, RunFolderError
from art_core.metrics import MetricsLog, StepMetrics, best_step
from art_core.rundir import RunDir
from art_core.runlog import log_step, summarize
from art_core.trajectories import Trajectory, TrajectoryGroup
from art_core.trajectory_files import read_trajectories, trajectory_path
from tests.core.sample import make_call


@pytest.fixture
def log(tmp_path: Path) -> MetricsLog:
    return MetricsLog(tmp_path / "history.jsonl")


def strict_lines(log: MetricsLog) -> Iterator[dict[str, Any]]:
    """The file's lines, by a parser that refuses what JSON doesn't have."""

    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is not JSON")

    for line in log.path.read_text("ascii").splitlines():
        yield json.loads(line, parse_constant=refuse)


def test_a_line_is_in_arts_form(log: MetricsLog) -> None:
    log.append(3, "train", {"reward": 0.5, "train/loss": 1.5})
    [line] = strict_lines(log)
    assert line.pop("recorded_at").endswith("+00:00")
    assert line == {"step": 3, "train/reward": 0.5, "train/loss": 1.5}


@pytest.mark.parametrize(
    ("value", "kept"),
    [
        (True, 1),
        (np.bool_(False), 0),
        (np.float32(0.1), 0.10000000149011612),  # the float32 next to 0.1
        (np.int64(7), 7),
        (np.array([2.5]), 2.5),
        (Fraction(1, 4), 0.25),
        (12345678901234567890, 12345678901234567890),
        (1e-320, 1e-320),
        ("text", "text"),
        ("a\ud83db", "a?b"),
        (None, None),
    ],
    ids=repr,
)
def test_values_become_plain(log: MetricsLog, value: object, kept: object) -> None:
    log.append(1, "train", {"x": value})
    [line] = strict_lines(log)
    assert line["train/x"] == kept
    assert type(line["train/x"]) is type(kept)
    assert log.read() == [StepMetrics(1, "train", {"x": kept})]  # type: ignore[dict-item]  # plain


def test_a_tensor_of_one_element_is_a_number(log: MetricsLog) -> None:
    torch = pytest.importorskip("torch", reason="art-langgraph[train] is not installed")
    log.append(1, "train", {"x": torch.tensor(0.25, requires_grad=True), "y": torch.tensor([2])})
    assert log.read()[0].values == {"x": 0.25, "y": 2}


@pytest.mark.parametrize("value", [[1.0], {"a": 1}, np.array([1.0, 2.0]), 1j, object()], ids=repr)
def test_what_is_no_metric_is_refused_by_name_and_nothing_is_written(
    log: MetricsLog, value: object
) -> None:
    with pytest.raises(ConfigError, match="metric 'odd'"):
        log.append(1, "train", {"fine": 1.0, "odd": value})
    assert not log.path.exists()


def test_nonfinite_values_are_null_and_can_be_told_from_missing(log: MetricsLog) -> None:
    values = {"a": math.nan, "b": np.float32("inf"), "c": -math.inf, "d": None, "e": 1.0}
    log.append(1, "train", values)
    [line] = strict_lines(log)
    assert [line[f"train/{name}"] for name in "abcde"] == [None, None, None, None, 1.0]
    assert "train/a" in line["nonfinite"]
    [record] = log.read()
    assert record.values == {"a": None, "b": None, "c": None, "d": None, "e": 1.0}
    assert record.nonfinite == {"a": "NaN", "b": "Infinity", "c": "-Infinity"}


def test_any_name_of_a_metric_works(log: MetricsLog) -> None:
    names = ["a/b.c d", "\u00e9", "step", "nonfinite", "recorded_at", "", "x" * 1000]
    log.append(9, "train", dict.fromkeys(names, 1.0))
    assert log.read()[0].values == dict.fromkeys(names, 1.0)


def test_a_resumed_run_has_one_value_a_step_and_loses_none(log: MetricsLog) -> None:
    for step in range(1, 9):
        log.append(step, "train", {"reward": step / 10, "first": 1})
    for step in range(6, 10):
        log.append(step, "train", {"reward": step})
    log.append(5, "val", {"reward": 0.5})  # logged late
    records = {(r.step, r.split): r.values for r in log.read()}
    assert [step for step, split in records if split == "train"] == list(range(1, 10))
    assert [records[step, "train"]["reward"] for step in (5, 6, 8, 9)] == [0.5, 6, 8, 9]
    assert records[5, "val"] == {"reward": 0.5}
    assert records[8, "train"] == {"reward": 8, "first": 1}  # two writers: merged


def test_a_newer_number_clears_an_older_nan(log: MetricsLog) -> None:
    log.append(1, "train", {"reward": math.nan})
    log.append(1, "train", {"reward": 0.5})
    assert log.read() == [StepMetrics(1, "train", {"reward": 0.5})]


def test_a_line_that_a_kill_cut_is_skipped_said_and_not_glued(
    log: MetricsLog, caplog: pytest.LogCaptureFixture
) -> None:
    log.append(1, "train", {"reward": 0.1})
    log.append(2, "train", {"reward": 0.2})
    log.path.write_bytes(log.path.read_bytes()[:-10])
    log.append(3, "train", {"reward": 0.3})
    with caplog.at_level(logging.WARNING):
        assert [record.step for record in log.read()] == [1, 3]
    assert f"{log.path}, line 2 is skipped" in caplog.text


def test_other_lines_are_read_as_far_as_they_can_be(log: MetricsLog) -> None:
    """Bare NaN is what ART's json.dumps wrote."""
    log.path.write_text(
        '{"step": 1, "val/reward": NaN}\n\n[]\n{"step": true}\n{"val/reward": 1}\n'
        '{"step": 2, "val/reward": 0.5, "training_step": 9}\n'
    )
    assert log.read() == [
        StepMetrics(1, "val", {"reward": None}, {"reward": "NaN"}),
        StepMetrics(2, "val", {"reward": 0.5}),
    ]
    assert MetricsLog(log.path.parent / "none.jsonl").read() == []


def test_writers_side_by_side_lose_nothing(log: MetricsLog) -> None:
    def write(split: str) -> None:
        for step in range(25):
            log.append(step, split, {"x": step})

    threads = [threading.Thread(target=write, args=(f"s{i}",)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [(r.step, r.split) for r in log.read()] == [
        (step, f"s{i}") for step in range(25) for i in range(4)
    ]


def test_a_bad_split_or_disk_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="split name"):
        MetricsLog(tmp_path / "history.jsonl").append(1, "a/b", {})
    (tmp_path / "file").write_text("")
    with pytest.raises(RunFolderError, match="can't be written"):
        MetricsLog(tmp_path / "file" / "history.jsonl").append(1, "train", {"x": 1})


def test_a_missing_value_is_never_the_best(log: MetricsLog) -> None:
    for step, reward in [(1, 0.2), (2, 0.9), (3, math.nan), (4, math.inf), (5, None), (6, "text")]:
        log.append(step, "val", {"reward": reward})
    log.append(7, "train", {"reward": 2.0})
    history = log.read()
    assert best_step(history, "val/reward", range(10)) == 2
    assert best_step(history, "val/reward", [1, 3, 4, 5, 6, 7]) == 1
    assert best_step(history, "val/reward", [3, 4, 5, 6]) is None
    assert best_step(history, "val/other", range(10)) is None
    assert best_step([], "reward", range(10)) is None


# --- what a step leaves


def failure() -> Exception:
    return RuntimeError("engine gone")


def test_a_step_is_summed_up() -> None:
    groups = [
        TrajectoryGroup(
            [
                Trajectory(reward=1.0, metrics={"turns": 2}, calls=[make_call()]),
                Trajectory(reward=0.0, metrics={"turns": 4}, ended="timeout"),
                failure(),
            ],
            metrics={"judge_cost": 0.5},
        ),
        TrajectoryGroup([Trajectory(reward=0.5, metrics={"won": True}), Trajectory()]),
    ]
    assert summarize(groups) == {
        "calls/answered": 0.25,  # one call of four trajectories
        "calls/seen": 0.25,
        "calls/kept": 0.25,
        "reward": 0.5,  # of 1, 0 and 0.5; the unset one does not count
        "reward_std_dev": 0.5,  # of the only group with two rewards: 1 and 0
        "trajectories": 4,
        "failures": 1,
        "exception_rate": 0.2,
        "completion_tokens": 0.75,  # three over four
        "ended/timeout": 0.25,
        "turns": 3,
        "won": 1,
        "judge_cost": 0.5,
    }
    assert summarize([TrajectoryGroup([])]) == {"trajectories": 0, "failures": 0}


def test_odd_rewards_and_metrics_are_summed_up_all_the_same() -> None:
    odd = [math.nan, math.inf, -math.inf]
    group = TrajectoryGroup([Trajectory(reward=r, metrics={"x": r}) for r in odd])
    group.trajectories[0].metrics["said"] = "text"  # type: ignore[assignment]  # it happens
    figures = summarize([group])
    assert math.isnan(figures["reward"])
    assert "said" not in figures


def test_a_reward_beyond_a_float_is_logged_as_infinite(tmp_path: Path) -> None:
    """It leaves its trajectory out of a step, and must not stop the step that it is logged with."""
    run = RunDir.at(tmp_path, "p", "m")
    huge = Trajectory()
    huge.reward = 10**400
    groups = [TrajectoryGroup([huge, Trajectory(reward=1.0)])]
    assert summarize(groups)["reward"] == math.inf
    log_step(run, "train", 1, groups)
    (group,) = read_trajectories(trajectory_path(run, "train", 1))
    assert [t.reward for t in group] == [math.inf, 1.0]


def test_a_logged_step_is_a_line_and_a_file(tmp_path: Path) -> None:
    run = RunDir.at(tmp_path, "p", "m")
    groups = [TrajectoryGroup([Trajectory(reward=1.0), failure()])]
    log_step(run, "val", 4, groups, {"loss": 0.1, "reward": 7.0})
    log_step(run, "val", 5, metrics={"loss": 0.2})
    log_step(run, "val", 6)
    first, second = MetricsLog(run.history).read()
    assert first.values["reward"] == 7.0  # given ones win
    assert first.values["exception_rate"] == 0.5
    assert second == StepMetrics(5, "val", {"loss": 0.2})
    assert len(read_trajectories(trajectory_path(run, "val", 4))[0]) == 1
    assert not trajectory_path(run, "val", 5).exists()
