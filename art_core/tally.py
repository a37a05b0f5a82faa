"""Running figures of a gather: how many are through, mean reward, tokens, failures.

In: results as they come. Out: a line of text for people. Figures that are kept are in runlog.py.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from art_core.errors import RolloutFailure
from art_core.trajectories import Trajectory, TrajectoryGroup


@dataclass
class Mean:
    """A sum and how many it holds."""

    total: float = 0.0
    number: int = 0

    def add(self, value: float) -> None:
        """Add a value."""
        self.total += value
        self.number += 1

    def swap(self, before: Mean, after: Mean) -> None:
        """Take `before` out and put `after` in."""
        self.total += after.total - before.total
        self.number += after.number - before.number

    def __str__(self) -> str:
        return f"{self.total / self.number:.3f}" if self.number else "-"


@dataclass
class Tally:
    """Counts over rollouts."""

    done: int = 0
    failures: int = 0
    tokens: int = 0
    """Sampled tokens, those of failed rollouts included."""
    reward: Mean = field(default_factory=Mean)
    metrics: dict[str, Mean] = field(default_factory=dict)

    @classmethod
    def of(cls, groups: Iterable[TrajectoryGroup]) -> Tally:
        """The tally of groups that are through."""
        tally = cls()
        for group in groups:
            for trajectory in group:
                tally.add(trajectory)
            for failure in group.exceptions:
                tally.add(failure)
        return tally

    def add(self, result: Trajectory | BaseException) -> None:
        """Count one rollout."""
        self.done += 1
        if isinstance(result, RolloutFailure):
            self.tokens += result.trajectory.completion_tokens
        if not isinstance(result, Trajectory):
            self.failures += 1
            return
        self.tokens += result.completion_tokens
        if result.reward is not None:
            self.reward.add(result.reward)
        for name, value in result.metrics.items():
            self.metrics.setdefault(name, Mean()).add(value)

    def regrade(self, before: Tally, after: Tally) -> None:
        """Put the rewards and metrics of `after` in the place of those of `before`."""
        self.reward.swap(before.reward, after.reward)
        for name in {**before.metrics, **after.metrics}:
            mean = self.metrics.setdefault(name, Mean())
            mean.swap(before.metrics.get(name, Mean()), after.metrics.get(name, Mean()))

    def text(self, max_metrics: int = 0) -> str:
        """Like "reward 0.425  12,345 tokens  2 failed", and the first `max_metrics` metrics."""
        figures = [f"reward {self.reward}", f"{self.tokens:,} tokens", f"{self.failures} failed"]
        figures += [f"{name} {mean}" for name, mean in [*self.metrics.items()][:max_metrics]]
        return "  ".join(figures)
