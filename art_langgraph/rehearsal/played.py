"""What a rehearsal leaves behind, ready to be checked: plain records, no graph, no network.

In: rollouts as they were played. Out: `Rehearsal`, which the checks read.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from art_core.calls import ModelCall
from art_core.errors import RolloutFailure
from art_core.trajectories import Trajectory
from art_langgraph.rehearsal.observer import Asked
from art_langgraph.rehearsal.scenarios import Scenario


@dataclass(frozen=True)
class Play:
    """One rollout."""

    scenario: int
    """Index in `Rehearsal.scenarios`."""
    manner: str
    """How the actor behaved; "sampled" where a real model played."""
    rollout_id: str
    trajectory: Trajectory
    failure: RolloutFailure | None
    """None: the rollout ended by itself or by the policy's doing."""
    asked: tuple[Asked, ...]
    reward_error: BaseException | None = None
    """What the reward function raised, or what is wrong with its value."""

    @property
    def calls(self) -> list[ModelCall]:
        """Every call, in the order of starts."""
        return self.trajectory.calls

    @property
    def policy_calls(self) -> list[ModelCall]:
        """Calls that the policy was asked, trainable or not."""
        return [call for call in self.calls if call.model == self.policy]

    @property
    def policy(self) -> str:
        """Name of the model being rehearsed."""
        return str(self.trajectory.metadata.get("policy"))

    @property
    def error(self) -> BaseException | None:
        """What the graph raised."""
        if self.failure is not None:
            return self.failure.__cause__ or self.failure
        return self.trajectory.exception

    @property
    def graph(self) -> Mapping[str, Any]:
        """What callbacks told: nodes, tools, interrupts."""
        told: Mapping[str, Any] = self.trajectory.metadata.get("graph") or {}
        return told

    @property
    def incomplete(self) -> list[str]:
        """Why the record is not whole."""
        return [str(reason) for reason in self.trajectory.metadata.get("incomplete") or ()]


@dataclass(frozen=True)
class GraphFacts:
    """What can be seen of a graph without running it."""

    name: str
    checkpointer: str | None = None
    """Class of its checkpointer."""
    store: str | None = None
    """Class of its store."""
    cached_nodes: tuple[str, ...] = ()
    """Nodes whose results LangGraph caches."""
    llm_cache: str | None = None
    """Class of LangChain's global response cache."""


@dataclass(frozen=True)
class Rehearsal:
    """Everything that was played."""

    source: str
    player: str
    """"scripted", or the base model that played."""
    graph: GraphFacts
    scenarios: tuple[Scenario, ...]
    made_up: bool
    """True if nobody gave scenarios."""
    plays: tuple[Play, ...]
    rewarded: bool
    """True if a reward function was given."""
    capped: int | None
    """The recursion limit that the rehearsal set because nobody else did; None: somebody did."""
    timeout: float
    """Seconds that a rollout may take."""

    @property
    def scripted(self) -> bool:
        """True if no real model played."""
        return self.player == "scripted"

    def group(self, scenario: int) -> list[Play]:
        """The rollouts of a scenario."""
        return [play for play in self.plays if play.scenario == scenario]


def stock_nodes(play: Play) -> set[str | None]:
    """Nodes whose calls to the policy came by a client of OpenAI's own, and were joined by id."""
    return {c.origin.node for c in play.policy_calls if not c.response and c.error is None}
