"""The figures of a run as one JSON-ready record, and the report folder that shows them.

In: the journal, the metrics and the trajectories of a run folder. Out: `report.json`, `reward.png`,
`index.html`. It needs no model, so that the report of a finished run can be made again. Left out:
how the curve and the page look (plot.py, page.py).
"""

from __future__ import annotations

import math
import os
import platform
import sys
from collections.abc import Sequence
from dataclasses import asdict
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from art_core.errors import ConfigError
from art_core.files import replace_file, write_object
from art_core.metrics import MetricsLog, StepMetrics
from art_core.rundir import RunDir
from art_core.trajectories import TrajectoryGroup
from art_core.trajectory_files import read_trajectories, trajectory_path
from art_langgraph.quickstart.baseline import constant_answer
from art_langgraph.quickstart.clientele import make_clientele
from art_langgraph.quickstart.customers import PARTS
from art_langgraph.quickstart.journal import Journal
from art_langgraph.quickstart.page import Encounter, page
from art_langgraph.quickstart.plot import draw_curve
from art_langgraph.quickstart.recipe import Recipe
from art_langgraph.quickstart.score import Score

Report = dict[str, Any]

_PACKAGES = ("art-langgraph", "langgraph", "langchain", "openai", "torch", "transformers", "peft")
_STEP_FIGURES = ("reward", "entropy", "kl", "grad_norm", "failures", "gather_seconds",
                 "step_seconds")  # fmt: skip


def write_report(out: Path, run: RunDir, recipe: Recipe, journal: Journal) -> Report:
    """Write the report folder `out` of a finished run; return what `report.json` says.

    Raises:
        ConfigError: the run is not finished, or `out` can't be a folder.
        RunFolderError: a file of the run can't be read, or the report can't be written.
    """
    before, after = _finished(journal)
    report = make_report(recipe, journal, MetricsLog(run.history).read())
    html = page(report, _encounters(run, recipe, before, after))
    write_object(out / "report.json", report)
    replace_file(out / "reward.png", lambda aside: draw_curve(report, aside))
    replace_file(out / "index.html", lambda aside: aside.write_bytes(html.encode()))
    return report


def make_report(recipe: Recipe, journal: Journal, history: Sequence[StepMetrics]) -> Report:
    """What `report.json` says of a finished run. Strict JSON: what is not finite is null.

    Returns:
        "reward_first" and "reward_last": mean reward of the first and the last training step's
        rollouts. "heldout_before" and "heldout_after": share of the held-out customers who were
        served right, greedily. "warm_up": the supervised step on labelled examples, which all these
        come after. "steps": how often something was learned by reinforcement. "seconds": of all
        phases over all starts, download apart. "checkpoint": the last one's number; like the steps
        of "checks" it counts the warm-up. "per_tool", "constant_answer_baseline", "entropy" (nats a
        token, by step), "curve" (by step), and what is needed to judge them.
    """
    before, after = _finished(journal)
    curve = [_step(record, recipe) for record in history if record.split == "train"]
    rewards = [point["reward"] for point in curve if point["reward"] is not None]
    constant = constant_answer(make_clientele(recipe).held_out)
    report = {
        "reward_first": rewards[0] if rewards else None,
        "reward_last": rewards[-1] if rewards else None,
        "heldout_before": before.success,
        "heldout_after": after.success,
        "heldout_reward_before": before.reward,
        "heldout_reward_after": after.reward,
        "heldout_customers": after.customers,
        "seconds": journal.seconds,
        "first_reward_seconds": journal.first_reward_seconds,
        "steps": after.step - recipe.warm_up_steps,
        "checkpoint": after.step,
        "warm_up": {
            "examples": recipe.lessons,
            "steps": recipe.warm_up_steps,
            "seconds": journal.phases.get("warm_up", 0.0),
        },
        "stopped": journal.stopped,
        "per_tool": _per_tool(before, after),
        "constant_answer_baseline": asdict(constant),
        "entropy": [point["entropy"] for point in curve],
        "curve": curve,
        "checks": [
            {"step": r.step, "success": r.values.get("success"), "reward": r.values.get("reward")}
            for r in history
            if r.split == "val"
        ],
        "failures": before.failures
        + after.failures
        + sum(int(r.values.get("failures") or 0) for r in history if r.split in ("train", "val")),
        "reward_parts": dict(PARTS),
        "phases": journal.phases,
        "tokens_per_second": _tokens_per_second(history),
        "seed": recipe.seed,
        "settings": {**recipe.settings(), "max_steps": recipe.max_steps},
        "machine": machine(),
        "versions": versions(),
    }
    return {name: _strict(value) for name, value in report.items()}


def machine() -> dict[str, Any]:
    """What it ran on."""
    usable = len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count()
    return {
        "cores": os.cpu_count(),
        "usable_cores": usable,
        "system": platform.system(),
        "architecture": platform.machine(),
        "python": platform.python_version(),
    }


def versions() -> dict[str, str | None]:
    """Of the packages that matter; None where one is missing."""
    found: dict[str, str | None] = {}
    for name in _PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = None
    return found


def _finished(journal: Journal) -> tuple[Score, Score]:
    if journal.before is None or journal.after is None:
        raise ConfigError(
            "a report is made of a finished run", got=journal.stopped, fix="Let the run end first."
        )
    return journal.before, journal.after


def _step(record: StepMetrics, recipe: Recipe) -> dict[str, Any]:
    """One point of the curve. Its step is how many the policy that played had learned."""
    names = [*_STEP_FIGURES, *PARTS, *(n for n in record.values if n.startswith("success"))]
    learned = record.step - recipe.warm_up_steps
    return {"step": learned, **{name: record.values.get(name) for name in names}}


def _per_tool(before: Score, after: Score) -> dict[str, dict[str, float]]:
    earned = sum(t.reward * t.customers for t in after.tools.values())
    return {
        name: {
            "customers": tool.customers,
            "before": before.tools[name].success,
            "after": tool.success,
            "reward_before": before.tools[name].reward,
            "reward_after": tool.reward,
            "reward_share": tool.reward * tool.customers / earned if earned else 0.0,
            "customer_share": tool.customers / after.customers,
        }
        for name, tool in after.tools.items()
    }


def _tokens_per_second(history: Sequence[StepMetrics]) -> float | None:
    """Sampled tokens a second while training rollouts were played."""
    tokens = seconds = 0.0
    for record in history:
        took = record.values.get("gather_seconds")
        if record.split == "train" and isinstance(took, float | int):
            number = float(record.values.get("trajectories") or 0)
            tokens += float(record.values.get("completion_tokens") or 0.0) * number
            seconds += took
    return tokens / seconds if seconds else None


def _encounters(run: RunDir, recipe: Recipe, before: Score, after: Score) -> list[Encounter]:
    """Each held-out customer with the trajectories before and after."""
    customers = make_clientele(recipe).held_out
    return [
        Encounter(customer, *pair)
        for customer, *pair in zip(
            customers,
            _played(run, before.step),
            _played(run, after.step),
            strict=True,
        )
    ]


def _played(run: RunDir, step: int) -> list[TrajectoryGroup]:
    return read_trajectories(trajectory_path(run, "test", step))


def _strict(value: Any) -> Any:
    """`value` with None in the place of NaN and infinities."""
    if isinstance(value, dict):
        return {str(key): _strict(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_strict(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
