"""Plays the rehearsal: scenarios, a group of rollouts each, under the eyes of an `Observer`.

In: a graph, scenarios, and the model that plays. Out: a `Rehearsal`. The first rollout of a group
is played alone, the others side by side, so that what one leaves behind is there for the next.
"""

from __future__ import annotations

import asyncio
import uuid
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, cast

from langchain_core.globals import get_llm_cache
from langchain_core.runnables import Runnable, RunnableConfig
from langgraph.pregel import Pregel

from art_core.capture import Target
from art_core.errors import RolloutFailure
from art_core.exchange import split_step
from art_core.join import join_records
from art_core.records import RecordStore
from art_core.trajectories import Trajectory
from art_langgraph.rehearsal.actor import MANNERS, rollout_id
from art_langgraph.rehearsal.observer import Observer
from art_langgraph.rehearsal.played import GraphFacts, Play, Rehearsal
from art_langgraph.rehearsal.rewards import RewardFunction, reward_of
from art_langgraph.rehearsal.scenarios import Scenario, fitted, made_up_scenario
from art_langgraph.rollouts import rollout
from art_langgraph.sources import GraphSource, open_graph
from art_langgraph.told import NoModelCalls
from art_langgraph.training_payload import SamplingOverridden

RECURSION_LIMIT = 40
"""Supersteps of a rollout where neither the scenario nor the graph sets a limit."""
_LANGGRAPHS_OWN = 9_999
"""From here on a recursion limit is a default of LangGraph (10007) or create_agent (9999)."""
SAMPLED = "sampled"
"""The manner of a real model."""


@dataclass(frozen=True)
class Player:
    """Who speaks for the policy."""

    name: str
    """"scripted", or the base model."""
    target: Target
    records: RecordStore | None = None
    """Where the endpoint keeps token records, if they are in reach."""
    opening: Callable[[str], None] | None = None
    """Told of each rollout before it begins; rollouts are then played one after the other, for
    clients that don't say which one they belong to."""

    def manner(self, number: int) -> str:
        """How the rollout of this number in its group behaves."""
        return [*MANNERS][number % len(MANNERS)] if self.name == "scripted" else SAMPLED


async def perform(
    source: GraphSource,
    player: Player,
    scenarios: Sequence[Scenario] | None = None,
    *,
    label: str = "",
    group: int = len(MANNERS),
    reward: RewardFunction | None = None,
    timeout: float = 20.0,
    on_play: Callable[[Play], None] | None = None,
) -> Rehearsal:
    """Play `group` rollouts of each scenario.

    Args:
        source: the graph.
        player: the model behind its `ChatArt`s.
        scenarios: None makes one up.
        label: how the user calls the graph.
        group: rollouts a scenario.
        reward: says what a trajectory is worth; None: nobody does.
        timeout: seconds a rollout may take.
        on_play: told of each rollout as it ends.

    Raises:
        ConfigError: there are no scenarios, and none can be made up; or one does not fit.
        Exception: what the user's factory raises.
    """
    async with open_graph(source) as graph:
        facts, limit = _facts(graph), _limit_of(graph)
        given = tuple(fitted(scenario, graph) for scenario in scenarios or ())
        chosen = given or (made_up_scenario(graph),)
    cap = None if limit else RECURSION_LIMIT
    stage = _Rollouts(source, player, chosen, reward, timeout, cap)
    plays: list[Play] = []
    with _quiet():
        for scenario in range(len(chosen)):
            for play in await stage.group(scenario, group):
                plays.append(play)
                if on_play is not None:
                    on_play(play)
    is_capped = cap is not None and any("recursion_limit" not in s.config for s in chosen)
    return Rehearsal(
        source=label or facts.name,
        player=player.name,
        graph=facts,
        scenarios=chosen,
        made_up=not scenarios,
        plays=tuple(plays),
        rewarded=reward is not None,
        capped=cap if is_capped else None,
        timeout=timeout,
    )


@dataclass(frozen=True)
class _Rollouts:
    source: GraphSource
    player: Player
    scenarios: Sequence[Scenario]
    reward: RewardFunction | None
    timeout: float
    cap: int | None

    async def group(self, index: int, size: int) -> list[Play]:
        """The rollouts of a scenario."""
        if self.player.opening is not None:
            return [await self.play(index, number) for number in range(size)]
        first = await self.play(index, 0)
        rest = (self.play(index, number) for number in range(1, size))
        return [first, *await asyncio.gather(*rest)]

    async def play(self, index: int, number: int) -> Play:
        scenario, manner = self.scenarios[index], self.player.manner(number)
        observer = Observer()
        rollout = rollout_id(number, manner, uuid.uuid4().hex[:12])
        if self.player.opening is not None:
            self.player.opening(rollout)
        trajectory, failure = await self._trajectory(scenario, observer, rollout)
        trajectory.metadata["policy"], _ = split_step(self.player.target.model_name)
        if self.player.records is not None:
            join_records([trajectory], self.player.records)
        play = Play(index, manner, rollout, trajectory, failure, tuple(observer.asked))
        return await self._rewarded(play, scenario)

    async def _trajectory(
        self, scenario: Scenario, observer: Observer, rollout_id: str
    ) -> tuple[Trajectory, RolloutFailure | None]:
        config: dict[str, Any] = {"callbacks": [observer], **scenario.config}
        if self.cap is not None:
            config.setdefault("recursion_limit", self.cap)
        try:
            trajectory = await rollout(
                self.source,
                scenario.input,
                model=self.player.target,
                config=cast(RunnableConfig, config),
                context=scenario.context,
                timeout=self.timeout,
                rollout_id=rollout_id,
            )
        except RolloutFailure as failure:
            return failure.trajectory, failure
        return trajectory, None

    async def _rewarded(self, play: Play, scenario: Scenario) -> Play:
        if self.reward is None or play.failure is not None:
            return play
        try:
            play.trajectory.reward = await reward_of(self.reward, play.trajectory, scenario.line)
        except Exception as error:  # noqa: BLE001 - the user's function; what it raised is a finding
            return replace(play, reward_error=error)
        return play


def _facts(graph: Runnable[Any, Any]) -> GraphFacts:
    cache = get_llm_cache()
    llm_cache = None if cache is None else type(cache).__name__
    bare = _bare(graph)
    if not isinstance(bare, Pregel):
        return GraphFacts(name=graph.get_name(), llm_cache=llm_cache)
    graphs: list[tuple[str, Any]] = [("", bare)]
    graphs += [(f"{path}/", inner) for path, inner in bare.get_subgraphs(recurse=True)]
    cached = [
        f"{path}{name}"
        for path, inner in graphs
        for name, node in getattr(inner, "nodes", {}).items()
        if getattr(inner, "cache", None) is not None
        and (node.cache_policy or getattr(inner, "cache_policy", None))
        and not name.startswith("__")
    ]
    return GraphFacts(
        name=graph.get_name(),
        checkpointer=_class_name(bare.checkpointer),
        store=_class_name(bare.store),
        cached_nodes=tuple(cached),
        llm_cache=llm_cache,
    )


def _bare(graph: Any) -> Any:
    """The graph inside a binding such as `graph.with_config(...)`."""
    while not isinstance(graph, Pregel) and isinstance(getattr(graph, "bound", None), Runnable):
        graph = graph.bound
    return graph


def _limit_of(graph: Any) -> int | None:
    """The recursion limit that the graph itself brings, if it is one."""
    config: Mapping[str, Any] = getattr(graph, "config", None) or {}
    limit = config.get("recursion_limit")
    return limit if isinstance(limit, int) and limit < _LANGGRAPHS_OWN else None


def _class_name(value: Any) -> str | None:
    return None if value is None or isinstance(value, bool) else type(value).__name__


@contextmanager
def _quiet() -> Any:
    """Without warnings of what is a finding here."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", NoModelCalls)
        warnings.simplefilter("ignore", SamplingOverridden)
        yield
