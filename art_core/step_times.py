"""Where the time of a run's steps went, phase by phase.

In: a run's metrics, or a step's figures. Out: seconds by phase, in words or as records. They are
measured where they happen (training/phases.py, local/live_run.py); a picture of them is in
step_chart.py.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from art_core.metrics import StepMetrics
from art_core.trajectories import TrajectoryGroup

PREFIX = "seconds/"
"""Of the metrics' names."""
PHASES = (
    "gather", "select", "wait", "canary", "pack", "known logprobs", "forward", "backward",
    "optimizer", "lost", "save", "wake", "swap",
)  # fmt: skip
"""In the order they come in. "wait": until nothing else computes, and vLLM sleeps; "lost": a first
try that ran out of memory; "swap": until the new step answers."""
_SPLITS = ("train", "sft")
"""Of steps; what users log under other splits may have names of the same form."""
_SHORT = 0.005
"""Seconds that are not worth a word."""


@dataclass(frozen=True)
class StepTimes:
    """Of one step that learned something."""

    step: int
    split: str
    """"train", or "sft"."""
    seconds: Mapping[str, float]
    """By phase."""


def times_of(history: Iterable[StepMetrics]) -> list[StepTimes]:
    """Of every step that has them, in order."""
    found = []
    for record in history:
        if record.split not in _SPLITS:
            continue
        seconds = {
            name.removeprefix(PREFIX): float(value)
            for name, value in record.values.items()
            if name.startswith(PREFIX) and isinstance(value, int | float) and value >= 0
        }
        if seconds:
            found.append(StepTimes(record.step, record.split, _in_order(seconds)))
    return found


def document(times: Sequence[StepTimes]) -> dict[str, Any]:
    """As one JSON document: each step, and of all the median and the share of each phase."""
    whole = sum(sum(each.seconds.values()) for each in times)
    phases = {}
    for name in _in_order({n: 0.0 for each in times for n in each.seconds}):
        column = [each.seconds.get(name, 0.0) for each in times]
        share = sum(column) / whole if whole else 0.0
        phases[name] = {"median_seconds": statistics.median(column), "share": share}
    steps = [{"step": t.step, "split": t.split, "seconds": dict(t.seconds)} for t in times]
    return {"steps": steps, "phases": phases}


def told(figures: Mapping[str, Any]) -> str:
    """The phases among a step's figures, the longest first: "backward 2.1 s, forward 1 s"."""
    found = [(k.removeprefix(PREFIX), v) for k, v in figures.items() if k.startswith(PREFIX)]
    found.sort(key=lambda phase: -phase[1])
    return ", ".join(f"{name} {seconds:.2g} s" for name, seconds in found if seconds >= _SHORT)


def gather_seconds(groups: Sequence[TrajectoryGroup]) -> dict[str, float]:
    """How long any rollout was under way; nothing if none was timed. Time between them, such as
    that between two processes of a run, is not gathering."""
    spans = sorted(
        (trajectory.start_time, trajectory.start_time + float(trajectory.metrics["duration"]))
        for group in groups
        for trajectory in group
        if "duration" in trajectory.metrics
    )
    if not spans:
        return {}
    whole, reached = 0.0, spans[0][0]
    for begun, ended in spans:
        whole += max(0.0, ended - max(begun, reached))
        reached = max(reached, ended)
    return {f"{PREFIX}gather": whole}


def _in_order(seconds: Mapping[str, float]) -> dict[str, float]:
    known = [name for name in PHASES if name in seconds]
    return {name: seconds[name] for name in [*known, *sorted(seconds.keys() - set(known))]}
