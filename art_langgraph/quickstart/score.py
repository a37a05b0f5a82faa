"""How well a set of customers was served, overall and tool by tool.

In: customers, and the group played for each. Out: shares and means, with failed rollouts counted
as served badly: none is left out of a figure.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from art_core.trajectories import TrajectoryGroup
from art_langgraph.quickstart.customers import Customer


@dataclass(frozen=True)
class ToolScore:
    """The customers who need one tool."""

    customers: int
    success: float
    """Share of them who were served right."""
    reward: float
    """Mean reward."""


@dataclass(frozen=True)
class Score:
    """One evaluation."""

    step: int
    """Of the policy that served."""
    customers: int
    success: float
    reward: float
    failures: int
    """Rollouts that failed by a fault of the infrastructure; they count as not right, reward 0."""
    tools: dict[str, ToolScore]

    @property
    def weakest(self) -> float:
        """Success of the tool that is used worst."""
        return min(tool.success for tool in self.tools.values())

    @classmethod
    def from_json(cls, kept: Mapping[str, Any]) -> Score:
        """Of `dataclasses.asdict`."""
        return cls(**{**kept, "tools": {k: ToolScore(**v) for k, v in kept["tools"].items()}})


def score(customers: Sequence[Customer], groups: Sequence[TrajectoryGroup], step: int) -> Score:
    """Score `groups`, one rollout for each of `customers`, in their order."""
    results: dict[str, list[tuple[float, float]]] = {}
    for customer, group in zip(customers, groups, strict=True):
        played = group.trajectories[0] if group.trajectories else None
        success = float(played.metrics["success"]) if played else 0.0
        reward = float(played.reward or 0.0) if played else 0.0
        results.setdefault(customer.tool, []).append((success, reward))
    every = [result for of_tool in results.values() for result in of_tool]
    return Score(
        step=step,
        customers=len(every),
        success=_mean(success for success, _ in every),
        reward=_mean(reward for _, reward in every),
        failures=sum(len(group.exceptions) for group in groups),
        tools={
            tool: ToolScore(
                customers=len(of_tool),
                success=_mean(success for success, _ in of_tool),
                reward=_mean(reward for _, reward in of_tool),
            )
            for tool, of_tool in results.items()
        },
    )


def _mean(values: Iterable[float]) -> float:
    column = list(values)
    return sum(column) / len(column)
