"""One run of the comparison of algorithms, in a process of its own: a task, a contender, a seed.

In: a `Plan` as JSON on the command line. Out: a line for every step and one for the whole run, as
they come; all else in the run's folder, from which an interrupted run goes on. Left out: which runs
there are, and what they say together (algorithms.py).
"""

from __future__ import annotations

import asyncio
import shutil
import statistics
import sys
import time
import warnings
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import asdict
from typing import Any, TypeAlias

import torch

import art_core as art
from art_core.rundir import RunDir
from art_core.runlog import summarize
from art_langgraph import SamplingOverridden
from art_langgraph.quickstart.journal import Journal
from art_langgraph.quickstart.score import Score
from art_langgraph.quickstart.session import run_session
from benchmarks import tool_task
from benchmarks.algorithm_diary import RESULTS_FILE, Diary, Interrupted, OutOfTime, Step
from benchmarks.algorithm_plan import NAME, PROJECT, Plan, Task
from benchmarks.comparison import machine
from benchmarks.tool_task import Wish

Model: TypeAlias = art.TrainableModel[Any]


class Listener:
    """Keeps what a session of the quickstart tells."""

    bars = False

    def __init__(self, diary: Diary) -> None:
        self._diary = diary

    def warmed_up(self, result: art.TrainResult, seconds: float) -> None: ...

    def first(self, group: art.TrajectoryGroup) -> None: ...

    def examined(self, when: str, score: Score, groups: Sequence[art.TrajectoryGroup]) -> None:
        self._diary.begin()

    def step(self, number: int, figures: Mapping[str, float], result: art.TrainResult) -> None:
        self._diary.note(figures, result)

    def checked(self, score: Score) -> None: ...


async def run_quickstart(
    plan: Plan, model: Model, backend: art.Backend, diary: Diary
) -> dict[str, Any]:
    """The whole session, or what is missing of it."""
    recipe = plan.recipe()
    journal = Journal(model, recipe)
    warnings.simplefilter("ignore", SamplingOverridden)  # the quickstart means it so
    try:
        await run_session(model, backend, recipe, journal, Listener(diary))
    except OutOfTime:
        journal.stopped = "time"
        await run_session(model, backend, recipe, journal, Listener(diary))
    return {
        "stopped": journal.stopped,
        "before": _plain(journal.before),
        "after": _plain(journal.after),
    }


def _plain(score: Score | None) -> dict[str, Any]:
    assert score is not None, "a session that is through has both"
    tools = {name: tool.success for name, tool in score.tools.items()}
    return _held_out(score.success, score.reward, tools)


async def run_tool_task(
    plan: Plan, model: Model, backend: art.Backend, diary: Diary
) -> dict[str, Any]:
    """The loop by hand: examine, learn, examine."""
    held_out = tool_task.make_wishes(plan.run.seed, "held-out", tool_task.HELD_OUT)
    await model.register(backend)
    if diary.before is None:
        diary.before = await _examine(model, held_out)
        diary.save()
    if diary.stopped is None:
        try:
            await _learn(plan, model, diary)
            diary.stopped = "max_steps"
        except OutOfTime:
            diary.stopped = "time"
        diary.save()
    after = await _examine(model, held_out)
    return {"stopped": diary.stopped, "before": diary.before, "after": after}


async def _learn(plan: Plan, model: Model, diary: Diary) -> None:
    """Under the quickstart's schedule of the learning rate."""
    recipe = plan.recipe()
    wishes = tool_task.make_wishes(plan.run.seed, "train", plan.planned * tool_task.GROUPS)
    diary.begin()
    for step in range(len(diary.steps), plan.planned):
        began = time.monotonic()
        groups = await art.gather_trajectory_groups(
            (
                art.TrajectoryGroup(
                    tool_task.fulfil(model, wish) for _ in range(tool_task.GROUP_SIZE)
                )
                for wish in tool_task.of_step(wishes, step)
            ),
            progress=False,
            key=f"step-{step}",
        )
        played = {"gather_seconds": time.monotonic() - began}
        result = await model.train(groups, recipe.train_config(step))
        diary.note(summarize(groups) | played, result)


async def _examine(model: Model, wishes: Sequence[Wish]) -> dict[str, Any]:
    """Each wish once, greedily."""
    groups = await art.gather_trajectory_groups(
        (art.TrajectoryGroup([tool_task.fulfil(model, wish, greedy=True)]) for wish in wishes),
        progress=False,
    )
    figures = summarize(groups)
    tools = {tool: figures[f"success/{tool}"] for tool in tool_task.TOOLS}
    return _held_out(figures["success"], figures["reward"], tools)


def _held_out(success: float, reward: float, tools: dict[str, float]) -> dict[str, Any]:
    weakest = min(tools.values())
    return {"success": success, "reward": reward, "weakest": weakest, "tools": tools}


PLAY: Mapping[Task, Callable[[Plan, Model, art.Backend, Diary], Awaitable[dict[str, Any]]]] = {
    "quickstart": run_quickstart,
    "tool": run_tool_task,
}


async def play(plan: Plan) -> None:
    """Do what is missing of the run, and tell its result.

    Raises:
        Interrupted: there was no time to end it.
    """
    model = plan.trainable()
    diary = Diary(plan, model)
    if diary.result is None:
        diary.check()
        async with art.LocalBackend(show_progress=False) as backend:
            found = await PLAY[plan.run.task](plan, model, backend, diary)
        diary.result = _line(plan, diary, found)
        diary.save()
    diary.tell(RESULTS_FILE, diary.result)
    folder = RunDir.at(model.base_path, PROJECT, NAME)
    shutil.rmtree(folder.checkpoints, ignore_errors=True)  # some 26 MB a step


def _line(plan: Plan, diary: Diary, found: Mapping[str, Any]) -> dict[str, Any]:
    """All figures of a run."""
    steps: Sequence[Step] = diary.steps
    return {
        "id": plan.run.id,
        **asdict(plan.run),
        **found,
        "planned": plan.planned,
        "steps": len(steps),
        "rewards": [round(step.reward, 4) for step in steps],
        "entropy": [step.entropy for step in steps],
        "clipped": [step.clipped for step in steps],
        "grad_norm": [step.grad_norm for step in steps],
        "failures": sum(step.failures for step in steps),
        "step_seconds": statistics.median(step.seconds for step in steps),
        "gather_seconds": sum(step.gather_seconds for step in steps),
        "train_seconds": sum(step.train_seconds for step in steps),
        "seconds": diary.wall,
        "settings": plan.recipe().train.model_dump(mode="json", exclude_defaults=True),
        "threads": torch.get_num_threads(),
        "machine": machine(),
    }


def main() -> None:
    """Play the run that the command line names."""
    plan = Plan.from_json(sys.argv[1])
    try:
        asyncio.run(play(plan))
    except Interrupted:
        print(f"{plan.run.id}: goes on at the next start", file=sys.stderr)


if __name__ == "__main__":
    main()
