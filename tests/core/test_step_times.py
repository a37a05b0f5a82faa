"""Where a run's time went: read from its metrics, told, drawn."""

from __future__ import annotations

import json
from pathlib import Path
from xml.etree import ElementTree

import pytest

import art_core as art
from art_core.metrics import MetricsLog
from art_core.step_chart import HEIGHT, chart
from art_core.step_times import StepTimes, document, gather_seconds, times_of, told
from art_langgraph.cli import main

SECONDS = {"seconds/forward": 1.0, "seconds/backward": 2.0, "seconds/gather": 5.0}
SVG = "{http://www.w3.org/2000/svg}"


@pytest.fixture
def run(tmp_path: Path) -> Path:
    log = MetricsLog(tmp_path / "history.jsonl")
    log.append(0, "train", {**SECONDS, "reward": 0.5})
    log.append(1, "train", {**SECONDS, "seconds/backward": 4.0})
    log.append(1, "val", {"reward": 0.5})
    return tmp_path


def test_times_are_read_in_the_order_of_the_phases(run: Path) -> None:
    first, second = times_of(MetricsLog(run / "history.jsonl").read())
    assert list(first.seconds.items()) == [("gather", 5.0), ("forward", 1.0), ("backward", 2.0)]
    assert (second.step, second.split, second.seconds["backward"]) == (1, "train", 4.0)


def test_only_steps_have_times_and_none_is_below_zero(run: Path) -> None:
    """Users may log what they like: another split, a clock that was set back."""
    log = MetricsLog(run / "history.jsonl")
    log.append(2, "val", {"seconds/judge": 3.0})
    log.append(2, "sft", {"seconds/forward": 1.0, "seconds/mine": -7.0, "seconds/odd": "long"})
    *_, last = found = times_of(log.read())
    assert [(each.step, each.split) for each in found] == [(0, "train"), (1, "train"), (2, "sft")]
    assert dict(last.seconds) == {"forward": 1.0}


def test_medians_and_shares(run: Path) -> None:
    """18 seconds in all, of which backward has 2 + 4."""
    found = document(times_of(MetricsLog(run / "history.jsonl").read()))
    assert found["phases"]["backward"] == {"median_seconds": 3.0, "share": pytest.approx(6 / 18)}
    assert sum(phase["share"] for phase in found["phases"].values()) == pytest.approx(1.0)


def test_phases_in_words() -> None:
    assert told({**SECONDS, "seconds/pack": 0.001, "loss": 9.0}) == (
        "gather 5 s, backward 2 s, forward 1 s"
    )


def test_gathering_lasts_from_the_first_start_to_the_last_end() -> None:
    early = art.Trajectory(start_time=100.0, metrics={"duration": 3.0})
    late = art.Trajectory(start_time=102.0, metrics={"duration": 8.0})
    untimed = art.Trajectory(start_time=0.0)
    groups = [art.TrajectoryGroup([early, untimed]), art.TrajectoryGroup([late])]
    assert gather_seconds(groups) == {"seconds/gather": 10.0}
    assert gather_seconds([art.TrajectoryGroup([untimed])]) == {}
    next_day = art.Trajectory(start_time=86400.0, metrics={"duration": 5.0})
    later = [*groups, art.TrajectoryGroup([next_day])]  # the run was stopped between them
    assert gather_seconds(later) == {"seconds/gather": 15.0}


def test_bars_are_as_high_as_they_are_long() -> None:
    """Under a scale of 8 seconds, 4 take half of what is between the margins (30 and 44)."""
    drawn = chart([StepTimes(3, "train", {"forward": 4.0, "a<b": 4.0})])
    bars = {
        bar[0].text: float(bar.attrib["height"])
        for bar in ElementTree.fromstring(drawn).iter(f"{SVG}rect")
        if len(bar)
    }
    half = pytest.approx((HEIGHT - 30 - 44) / 2)
    assert bars == {"train step 3: forward 4 s": half, "train step 3: a<b 4 s": half}


def test_a_run_without_steps_is_drawn_too() -> None:
    assert "no step has been timed" in chart([])


def test_the_command(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    picture = run / "times.svg"
    assert main(["times", str(run), "--json", "--svg", str(picture)]) == 0
    assert json.loads(capsys.readouterr().out)["steps"][1]["seconds"]["backward"] == 4.0
    assert ElementTree.parse(picture).getroot().tag == f"{SVG}svg"
    assert main(["times", str(run)]) == 0
    out = capsys.readouterr().out
    assert "median of 2 steps" in out
    assert "backward" in out
    assert "33.3%" in out


def test_a_folder_that_is_no_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["times", str(tmp_path)]) == 1
    assert "no run is there" in capsys.readouterr().err
