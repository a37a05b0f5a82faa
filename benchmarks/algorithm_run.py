"""One run of the comparison of algorithms, in a process of its own: a task, a contender, a seed.

In: a `Plan` as JSON on the command line. Out: a line for every step and one for the whole run in
the files of `Plan.out`, as they come; all else in the run's folder, from which an interrupted run
goes on. Left out: which runs there are, and what they say together (algorithms.py).
"""

from __future__ import annotations

import asyncio
import json
import shutil
import statistics
import sys
import time
import warnings
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

import art_core as art
from art_core.config import ModelConfig, SamplingConfig, TrainConfig
from art_core.rundir import RunDir
from art_core.runlog import summarize
from art_langgraph import SamplingOverridden
from art_langgraph.quickstart.journal import Journal
from art_langgraph.quickstart.recipe import Recipe
from art_langgraph.quickstart.score import Score
from art_langgraph.quickstart.session import run_session
from benchmarks import tool_task
from benchmarks.comparison import machine
from benchmarks.contenders import at_rate, contenders

Task = Literal["tool", "quickstart"]
STEPS_FILE, RESULTS_FILE = "steps.jsonl", "results.jsonl"
NAME, PROJECT = "agent", "algorithms"
_KEY = "algorithms"
_TRAINED = ("entropy", "clipped", "kl", "grad_norm", "learning_rate", "groups_trained")
"""Figures of a train call that are kept of every step."""


@dataclass(frozen=True)
class Run:
    """What is played."""

    task: Task
    contender: str
    rate: float
    """Factor of the quickstart's learning rate."""
    seed: int

    @property
    def id(self) -> str:
        """Names its folder and its lines."""
        return f"{self.task}-{self.contender}-x{self.rate:g}-s{self.seed}"


@dataclass(frozen=True)
class Plan:
    """How and where."""

    run: Run
    out: str
    """Folder of the two files."""
    runs: str
    """Folder of the runs' own folders."""
    model: str
    seconds: float
    """That learning may take, over all starts; then it is examined as it is."""
    until: float | None
    """`time.time()` at which it stops for this time, to go on at the next start."""
    steps: int | None
    """At most; None: the task's own number."""
    quick: bool

    @classmethod
    def from_json(cls, text: str) -> Plan:
        kept = json.loads(text)
        return cls(**{**kept, "run": Run(**kept["run"])})

    def recipe(self) -> Recipe:
        """The quickstart's, with the contender's settings."""
        bare = Recipe(seed=self.run.seed, base_model=self.model)
        train = at_rate(contenders(bare.train)[self.run.contender], self.run.rate)
        recipe = replace(bare, train=train)
        recipe = recipe.quick() if self.quick else recipe
        return replace(recipe, max_steps=self.steps or recipe.max_steps)


class OutOfTime(Exception):
    """The run's own time is up."""


class Interrupted(Exception):
    """It stops for this time."""


class Diary:
    """The steps of a run, kept in its folder and told as they come; stops a run in time."""

    def __init__(self, plan: Plan, model: art.TrainableModel[Any]) -> None:
        self._plan = plan
        self._model = model
        kept = (model.read_state() or {}).get(_KEY, {})
        self.steps: list[dict[str, Any]] = kept.get("steps", [])
        self.before: dict[str, Any] | None = kept.get("before")
        """As `Score`'s fields; the quickstart keeps its own."""
        self.stopped: str | None = kept.get("stopped")
        self.result: dict[str, Any] | None = kept.get("result")
        """The line of the whole run, once it is through."""
        self._since = time.monotonic()

    @property
    def seconds(self) -> float:
        """Of all steps."""
        return sum(step["seconds"] for step in self.steps)

    def note(self, figures: Mapping[str, float], result: art.TrainResult) -> None:
        """A step is through.

        Raises:
            OutOfTime, Interrupted: another one would take too long.
        """
        now = time.monotonic()
        step = {
            "number": len(self.steps) + 1,
            "reward": figures["reward"],
            "success": figures["success"],
            "spread": figures["reward_std_dev"],
            "failures": figures["failures"],
            "trained": result.trained,
            **{name: result.metrics.get(name) for name in _TRAINED},
            "gather_seconds": figures["gather_seconds"],
            "train_seconds": result.metrics.get("step_seconds", 0.0),
            "seconds": now - self._since,
        }
        self._since = now
        self.steps.append(step)
        self.save()
        self.tell(STEPS_FILE, {"id": self._plan.run.id, **step})
        if self.seconds + step["seconds"] > self._plan.seconds:
            raise OutOfTime
        self.check()

    def begin(self) -> None:
        """The next step begins now."""
        self._since = time.monotonic()

    def check(self) -> None:
        """Raise `Interrupted` if a step would end too late."""
        longest = max((step["seconds"] for step in self.steps[-3:]), default=0.0)
        if self._plan.until is not None and time.time() + longest > self._plan.until:
            raise Interrupted

    def save(self) -> None:
        """Write all that is known by now."""
        kept = {
            "steps": self.steps,
            "before": self.before,
            "stopped": self.stopped,
            "result": self.result,
        }
        self._model.merge_state({_KEY: kept})

    def tell(self, file: str, line: Mapping[str, Any]) -> None:
        """Append a line, in one write: other runs do the same."""
        with (Path(self._plan.out) / file).open("a", encoding="utf-8") as out:
            out.write(json.dumps(line) + "\n")


class QuickstartWatcher:
    """Keeps what a session tells."""

    bars = False

    def __init__(self, diary: Diary) -> None:
        self._diary = diary

    def first(self, group: art.TrajectoryGroup) -> None: ...

    def examined(self, when: str, score: Score, groups: Sequence[art.TrajectoryGroup]) -> None:
        self._diary.begin()

    def step(self, figures: Mapping[str, float], result: art.TrainResult) -> None:
        self._diary.note(figures, result)

    def checked(self, score: Score) -> None: ...


async def run_quickstart(
    plan: Plan, model: art.TrainableModel[Any], backend: art.Backend, diary: Diary
) -> dict[str, Any]:
    """The whole session, or what is missing of it."""
    recipe = plan.recipe()
    journal = Journal(model, recipe)
    watcher = QuickstartWatcher(diary)
    warnings.simplefilter("ignore", SamplingOverridden)  # the quickstart means it so
    try:
        await run_session(model, backend, recipe, journal, watcher)
    except OutOfTime:
        journal.stopped = "time"
        await run_session(model, backend, recipe, journal, watcher)
    return {
        "stopped": journal.stopped,
        "planned": recipe.max_steps,
        "before": _plain(journal.before),
        "after": _plain(journal.after),
    }


async def run_tool_task(
    plan: Plan, model: art.TrainableModel[Any], backend: art.Backend, diary: Diary
) -> dict[str, Any]:
    """The loop by hand: examine, learn, examine."""
    recipe = plan.recipe()
    steps = plan.steps or tool_task.STEPS
    training = tool_task.make_wishes(plan.run.seed, "train", steps * tool_task.GROUPS)
    held_out = tool_task.make_wishes(plan.run.seed, "held-out", tool_task.HELD_OUT)
    await model.register(backend)
    if diary.before is None:
        diary.before = await _examine(model, held_out)
        diary.save()
    diary.begin()
    try:
        for step in range(len(diary.steps), steps if diary.stopped is None else 0):
            began = time.monotonic()
            groups = await art.gather_trajectory_groups(
                [
                    art.TrajectoryGroup(
                        tool_task.fulfil(model, wish) for _ in range(tool_task.GROUP_SIZE)
                    )
                    for wish in tool_task.of_step(training, step)
                ],
                progress=False,
                key=f"step-{step}",
            )
            played = {"gather_seconds": time.monotonic() - began}
            result = await model.train(groups, recipe.train_config(step))
            diary.note(summarize(groups) | played, result)
        diary.stopped = diary.stopped or "max_steps"
    except OutOfTime:
        diary.stopped = "time"
    diary.save()
    after = await _examine(model, held_out)
    return {"stopped": diary.stopped, "planned": steps, "before": diary.before, "after": after}


async def _examine(
    model: art.TrainableModel[Any], wishes: Sequence[tool_task.Wish]
) -> dict[str, Any]:
    """Each wish once, greedily."""
    groups = await art.gather_trajectory_groups(
        [art.TrajectoryGroup([tool_task.fulfil(model, wish, greedy=True)]) for wish in wishes],
        progress=False,
    )
    figures = summarize(groups)
    tools = {tool: figures[f"success/{tool}"] for tool in tool_task.TOOLS}
    return {
        "success": figures["success"],
        "reward": figures["reward"],
        "weakest": min(tools.values()),
        "tools": tools,
    }


def _plain(score: Score | None) -> dict[str, Any]:
    assert score is not None, "a session that is through has both"
    tools = {name: tool.success for name, tool in score.tools.items()}
    return {
        "success": score.success,
        "reward": score.reward,
        "weakest": score.weakest,
        "tools": tools,
    }


PLAY: Mapping[Task, Callable[..., Awaitable[dict[str, Any]]]] = {
    "quickstart": run_quickstart,
    "tool": run_tool_task,
}


def model_of(plan: Plan) -> art.TrainableModel[Any]:
    """All runs' models have one name, each in a folder of its own: the noise is then the same."""
    recipe = plan.recipe()
    settings = recipe.model_config()
    if plan.run.task == "tool":
        settings = ModelConfig(
            sampling=SamplingConfig(temperature=recipe.sampling.temperature),
            lora=recipe.lora,
            seed=plan.run.seed,
        )
    return art.TrainableModel(
        name=NAME,
        project=PROJECT,
        base_model=plan.model,
        base_path=str(Path(plan.runs) / plan.run.id),
        art_config=settings,
    )


async def play(plan: Plan) -> None:
    """Do what is missing of the run, and tell its result.

    Raises:
        Interrupted: there was no time to end it.
    """
    model = model_of(plan)
    diary = Diary(plan, model)
    if diary.result is None:
        diary.check()
        async with art.LocalBackend(show_progress=False) as backend:
            found = await PLAY[plan.run.task](plan, model, backend, diary)
        diary.result = _line(plan, diary.steps, found)
        diary.save()
    diary.tell(RESULTS_FILE, diary.result)
    folder = RunDir.at(model.base_path, PROJECT, NAME)
    shutil.rmtree(folder.checkpoints, ignore_errors=True)  # some 26 MB a step


def _line(plan: Plan, steps: Sequence[dict[str, Any]], found: Mapping[str, Any]) -> dict[str, Any]:
    """All figures of a run."""
    import torch

    return {
        "id": plan.run.id,
        **asdict(plan.run),
        **found,
        "steps": len(steps),
        "rewards": [round(step["reward"], 4) for step in steps],
        **{name: [step[name] for step in steps] for name in ("entropy", "clipped", "grad_norm")},
        "failures": sum(step["failures"] for step in steps),
        "step_seconds": statistics.median(step["seconds"] for step in steps),
        "gather_seconds": sum(step["gather_seconds"] for step in steps),
        "train_seconds": sum(step["train_seconds"] for step in steps),
        "seconds": sum(step["seconds"] for step in steps),
        "settings": changed(plan.recipe().train),
        "threads": torch.get_num_threads(),
        "machine": machine(),
    }


def changed(config: TrainConfig) -> dict[str, Any]:
    """Settings that are not `TrainConfig`'s own."""
    return config.model_dump(mode="json", exclude_defaults=True)


def main() -> None:
    """Play the run that the command line names."""
    try:
        asyncio.run(play(Plan.from_json(sys.argv[1])))
    except Interrupted:
        print(f"{Plan.from_json(sys.argv[1]).run.id}: goes on at the next start", file=sys.stderr)


if __name__ == "__main__":
    main()
