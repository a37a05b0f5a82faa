"""What a run of the comparison of algorithms keeps of itself, and when it has to stop.

In: the figures of each step. Out: a line in `steps.jsonl` as it comes, and the run's state in its
folder, so that another start goes on with it.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import art_core as art
from benchmarks.algorithm_plan import Plan

STEPS_FILE, RESULTS_FILE = "steps.jsonl", "results.jsonl"
_KEY = "algorithms"


class OutOfTime(Exception):
    """The run's own time is up."""


class Interrupted(Exception):
    """It stops for this time."""


@dataclass(frozen=True)
class Step:
    """What was played and learned."""

    reward: float
    """Mean over the rollouts."""
    success: float
    spread: float
    """Standard deviation of the rewards of a group, mean over groups."""
    failures: float
    """Rollouts that failed by no fault of the policy."""
    trained: bool
    """False: there was nothing to learn; the five figures that follow are None then."""
    entropy: float | None
    """Nats a token."""
    clipped: float | None
    """Share of the tokens that the loss shut out."""
    kl: float | None
    """Of the old policy to the new one, mean over the updates."""
    grad_norm: float | None
    learning_rate: float | None
    gather_seconds: float
    train_seconds: float
    seconds: float
    """All of it, checks of the step before included."""


class Diary:
    """The steps of a run."""

    def __init__(self, plan: Plan, model: art.TrainableModel[Any]) -> None:
        kept = (model.read_state() or {}).get(_KEY, {})
        self._plan = plan
        self._model = model
        self.steps = [Step(**step) for step in kept.get("steps", [])]
        self.before: dict[str, Any] | None = kept.get("before")
        """The tool task's held-out figures before; the quickstart has a journal for it."""
        self.stopped: str | None = kept.get("stopped")
        """Why training ended; likewise."""
        self.result: dict[str, Any] | None = kept.get("result")
        """The line of the whole run, once it is through."""
        self._wall: float = kept.get("wall", 0.0)
        self._began = self._since = time.monotonic()

    @property
    def wall(self) -> float:
        """Seconds of all starts."""
        return self._wall + time.monotonic() - self._began

    def begin(self) -> None:
        """The next step begins now."""
        self._since = time.monotonic()

    def note(self, figures: Mapping[str, float], result: art.TrainResult) -> None:
        """A step is through.

        Args:
            figures: of its rollouts, and "gather_seconds".

        Raises:
            OutOfTime, Interrupted: there is another one to come, and it would take too long.
        """
        learned = result.metrics
        step = Step(
            reward=figures["reward"],
            success=figures["success"],
            spread=figures["reward_std_dev"],
            failures=figures["failures"],
            trained=result.trained,
            entropy=learned.get("entropy"),
            clipped=learned.get("clipped"),
            kl=learned.get("kl"),
            grad_norm=learned.get("grad_norm"),
            learning_rate=learned.get("learning_rate"),
            gather_seconds=figures["gather_seconds"],
            train_seconds=learned.get("step_seconds", 0.0),
            seconds=time.monotonic() - self._since,
        )
        self.begin()
        self.steps.append(step)
        self.save()
        told = {"id": self._plan.run.id, "step": len(self.steps), **asdict(step)}
        self.tell(STEPS_FILE, told)
        if len(self.steps) >= self._plan.planned:
            return
        if sum(s.seconds for s in self.steps) + step.seconds > self._plan.seconds:
            raise OutOfTime
        self.check()

    def check(self) -> None:
        """See that there is time for a step.

        Raises:
            Interrupted: it would end too late.
        """
        longest = max((step.seconds for step in self.steps[-3:]), default=0.0)
        if self._plan.until is not None and time.time() + longest > self._plan.until:
            raise Interrupted

    def save(self) -> None:
        """Write all that is known by now."""
        kept = {
            "steps": [asdict(step) for step in self.steps],
            "before": self.before,
            "stopped": self.stopped,
            "result": self.result,
            "wall": self.wall,
        }
        self._model.merge_state({_KEY: kept})

    def tell(self, file: str, line: Mapping[str, Any]) -> None:
        """Append a line, in one write: other runs do the same."""
        with (Path(self._plan.out) / file).open("a", encoding="utf-8") as out:
            out.write(json.dumps(line) + "\n")
