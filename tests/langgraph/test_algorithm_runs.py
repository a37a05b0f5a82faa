"""The comparison of algorithms, on a model of noise: its gate, its runs, how they go on.

Expected figures are counted by hand from the lines that are given.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from art_core.algorithms import PRESETS
from art_langgraph.quickstart.recipe import Recipe
from benchmarks.algorithm_diary import RESULTS_FILE, STEPS_FILE, Interrupted
from benchmarks.algorithm_gate import gate, tiny_base
from benchmarks.algorithm_plan import Plan, Run
from benchmarks.algorithm_run import play
from benchmarks.algorithms import all_runs, area, common_steps, read_results, steps_to_goal, verdict
from benchmarks.contenders import HELD, at_rate, contenders, own_rate, twins
from benchmarks.tool_task import TOOLS, WORDINGS, make_wishes

OWN = Recipe().train


def test_every_preset_is_there_and_keeps_what_is_held_equal() -> None:
    found = contenders(OWN)
    assert {*found, *twins(OWN)} == {"own", "default", *PRESETS}
    for name, config in found.items():
        for key in {*HELD} - {"entropy_coef", "minibatches"} - {*PRESETS.get(name, {})}:
            assert getattr(config, key) == getattr(OWN, key), (name, key)
        assert config.learning_rate == OWN.learning_rate
    assert len({c.model_dump_json() for c in found.values()}) == len(found)


def test_a_step_of_fewer_updates_gets_a_rate_of_its_own() -> None:
    found = contenders(OWN)
    assert (found["rloo"].minibatches, found["gspo"].minibatches, OWN.minibatches) == (1, 4, 2)
    assert own_rate(found["rloo"], OWN) == 2.0
    assert own_rate(found["gspo"], OWN) == 0.5
    assert at_rate(found["rloo"], 2.0).learning_rate == 2.0 * OWN.learning_rate
    runs = all_runs(["tool"], ["own", "rloo"], [1.0], [0, 1], own_rates=True)
    assert all_runs(["tool"], ["own", "rloo"], [1.0], [0, 1], own_rates=False) == runs[:4]
    assert [run.id for run in runs] == [
        "tool-own-x1-s0",
        "tool-rloo-x1-s0",
        "tool-own-x1-s1",
        "tool-rloo-x1-s1",
        "tool-rloo-x2-s0",
        "tool-rloo-x2-s1",
    ]


@pytest.mark.parametrize("name", [*contenders(OWN)])
def test_what_did_worse_weighs_less_at_first_in_the_quickstarts_own_way_alone(name: str) -> None:
    plan = Plan(Run("tool", name, 1.0, 0), "", "", "", 60.0, None, None, quick=False)
    weights = [plan.recipe().train_config(step).negative_weight for step in (0, 4, 5)]
    assert weights == ([0.0, 0.0, 1.0] if name == "own" else [1.0] * 3)  # five steady steps


def test_held_out_wishes_use_other_words() -> None:
    for tool in TOOLS:
        assert not {*WORDINGS["train"][tool]} & {*WORDINGS["held-out"][tool]}
    wishes = make_wishes(0, "train", 18)
    assert wishes == make_wishes(0, "train", 18)
    assert wishes != make_wishes(1, "train", 18)
    assert [wish.tool for wish in wishes] == [*TOOLS] * 6
    assert all(value in wish.message for wish in wishes for value in wish.arguments.values())


@pytest.mark.slow
def test_the_gate_holds() -> None:
    assert {*gate()} == {*contenders(OWN)}


def line(
    contender: str, seed: int, rewards: Sequence[float], *, stopped: str = "max_steps"
) -> dict[str, Any]:
    run = Run("tool", contender, 1.0, seed)
    shares = {"success": 1.0, "weakest": 1.0}
    return {
        "id": run.id, "task": "tool", "contender": contender, "rate": 1.0, "seed": seed,
        "stopped": stopped, "rewards": rewards, "planned": 4, "before": shares, "after": shares,
    }  # fmt: skip


def test_steps_are_counted_until_the_goal_and_a_run_that_stops_stays_as_it_was() -> None:
    learned = line("own", 0, [0.1, 0.5, 0.9], stopped="learned")
    assert steps_to_goal(learned, 4) == 2.0
    assert area(learned, 4) == pytest.approx((0.1 + 0.5 + 0.9 + 0.9) / 4)
    assert steps_to_goal(line("own", 0, [0.1, 0.89, 0.3, 0.2]), 4) == math.inf


def test_a_run_that_was_cut_by_time_is_compared_over_the_steps_that_it_has() -> None:
    cut = line("own", 0, [0.1, 0.2], stopped="time")
    whole = line("dppo", 0, [0.3, 0.5, 0.9, 0.9])
    assert common_steps([cut, whole]) == 2
    assert area(cut, 2) == pytest.approx(0.15)
    assert area(whole, 2) == pytest.approx(0.4)
    assert steps_to_goal(whole, 2) == math.inf
    found = verdict("tool", [cut, whole])
    assert found is not None
    assert (found.ours, found.peer) == (3.0, 3.0)  # neither got there in two steps


def test_the_verdict_is_of_the_seeds_that_both_have() -> None:
    results = [
        line("own", 0, [0.1, 0.9], stopped="learned"),  # 1 step before the goal: counts 2
        line("own", 1, [0.1, 0.1, 0.9], stopped="learned"),  # 3
        line("dppo", 0, [0.1, 0.1, 0.1, 0.9]),  # 4
        line("dppo", 1, [0.1, 0.1, 0.1, 0.1]),  # never: 5
        line("cispo", 0, [0.9], stopped="learned"),  # of one seed only, so it is not the best
    ]
    found = verdict("tool", results)
    assert found is not None
    assert (found.ours, found.peer) == (2.5, 4.5)
    assert found.ratio == pytest.approx((4 / 2 + 5 / 3) / 2, abs=1e-3)
    assert found.peer_name.startswith("dppo")
    assert verdict("quickstart", results) is None


def test_a_line_that_was_cut_short_is_none(tmp_path: Path) -> None:
    whole = line("own", 0, [1.0])
    (tmp_path / RESULTS_FILE).write_text(json.dumps(whole) + "\n" + json.dumps(whole)[:40])
    assert read_results(tmp_path) == [whole]
    assert read_results(tmp_path / "nothing") == []


async def test_an_interrupted_run_goes_on_and_a_finished_one_is_only_told_again(
    tmp_path: Path,
) -> None:
    plan = Plan(
        run=Run("tool", "dppo", 1.0, 0),
        out=str(tmp_path),
        runs=str(tmp_path / "runs"),
        model=str(tiny_base(tmp_path)),
        seconds=60.0,
        until=None,
        steps=3,
        quick=True,
    )
    with pytest.raises(Interrupted):
        await play(replace(plan, until=time.time() + 1e-3))  # over when it is loaded
    assert not (tmp_path / RESULTS_FILE).exists()
    await play(plan)
    await play(plan)
    results = [json.loads(text) for text in (tmp_path / RESULTS_FILE).read_text().splitlines()]
    assert results[0] == results[1]
    assert results[0]["steps"] == len(results[0]["rewards"]) == 3
    steps = [json.loads(text)["step"] for text in (tmp_path / STEPS_FILE).read_text().splitlines()]
    assert steps == [1, 2, 3]


async def test_a_run_whose_time_is_up_is_examined_as_it_is(tmp_path: Path) -> None:
    plan = Plan(
        run=Run("quickstart", "own", 1.0, 0),
        out=str(tmp_path),
        runs=str(tmp_path / "runs"),
        model=str(tiny_base(tmp_path)),
        seconds=0.0,
        until=None,
        steps=3,
        quick=True,
    )
    await play(plan)
    (result,) = read_results(tmp_path)
    assert (result["stopped"], result["steps"], result["planned"]) == ("time", 1, 3)
    assert set(result["after"]) == {"success", "reward", "weakest", "tools"}
