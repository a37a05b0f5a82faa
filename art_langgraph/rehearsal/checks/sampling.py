"""Temperature traps: what would make the rollouts of a group alike, or give answers unsampled."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from art_core.plural import plural
from art_langgraph.chosen_nodes import is_in
from art_langgraph.rehearsal.finding import Finding
from art_langgraph.rehearsal.played import Rehearsal, stock_nodes
from art_langgraph.rehearsal.wording import listed, place

_OFF: Mapping[str, Any] = {
    "temperature": 1,
    "top_p": 1,
    "top_k": 0,
    "min_p": 0,
    "n": 1,
    "presence_penalty": 0,
    "frequency_penalty": 0,
    "logit_bias": {},
}
"""Values that training samples with anyway."""


def check_sampling(rehearsal: Rehearsal) -> Iterator[Finding]:
    """Settings that a ChatArt asks for and that training replaces or refuses."""
    asked = [one for play in rehearsal.plays for one in play.asked if one.ours]
    yield from _stock_sampling(rehearsal, alone=not asked)
    if not asked:
        return
    several = dict.fromkeys(
        f"{place(a.node)}: n={a.settings['n']}" for a in asked if a.settings.get("n", 1) > 1
    )
    if several:
        yield Finding(
            "sampling",
            "fail",
            f"several answers are asked for at once ({listed(several)}), which training refuses",
            "Ask several times: each answer is then a call of its own.",
        )
    replaced = dict.fromkeys(
        f"{place(a.node)}: {name}={value!r}"
        for a in asked
        for name, value in a.settings.items()
        if name != "n" and _OFF.get(name) != value
    )
    if replaced:
        yield Finding(
            "sampling",
            "warn",
            f"training samples in its own way where the graph asks for {listed(replaced)}",
            "Nothing to do: the model's SamplingConfig (temperature 1) replaces it in training, "
            "else a group's rollouts would be alike. Evaluation and production keep it.",
        )
    if not several and not replaced:
        yield Finding("sampling", "pass", "no node asks for sampling of its own")


def _stock_sampling(rehearsal: Rehearsal, *, alone: bool) -> Iterator[Finding]:
    """Settings of stock clients that make a group alike: nobody replaces them.

    Args:
        alone: no ChatArt was asked beside them.
    """
    alike = dict.fromkeys(
        f"{place(asked.node)}: {name}={asked.settings[name]!r}"
        for play in rehearsal.plays
        for asked in play.asked
        if not asked.ours and asked.node in stock_nodes(play)
        for name in ("temperature", "seed")
        if name in asked.settings and (name == "seed" or asked.settings[name] == 0)
    )
    if alike:
        yield Finding(
            "sampling",
            "fail" if alone else "warn",
            f"a stock client asks for {listed(alike)}: the rollouts of a group would be alike",
            "Leave it out where the agent is trained, or put ChatArt() in its place: in training "
            "that one samples by the model's SamplingConfig.",
        )


def check_caches(rehearsal: Rehearsal) -> Iterator[Finding]:
    """Answers that are not sampled but replayed."""
    graph = rehearsal.graph
    origins = [call.origin for play in rehearsal.plays for call in play.policy_calls]
    shared = [n for n in graph.cached_nodes if any(is_in(origin, [n]) for origin in origins)]
    if shared:
        yield Finding(
            "caches",
            "fail",
            f"LangGraph caches the results of {listed(shared)}: the rollouts of a group would "
            "share one answer",
            "Compile the graph for training without cache=, or without the nodes' cache_policy.",
        )
    if beside := [name for name in graph.cached_nodes if name not in shared]:
        yield Finding(
            "caches",
            "warn",
            f"LangGraph caches the results of {listed(beside)}, which asked the policy nothing",
            "All rollouts of a group then see the same; leave it if it is meant so, and if no "
            "cache of an earlier run hides a call.",
        )
    asked = [one for play in rehearsal.plays for one in play.asked]
    ours = graph.llm_cache is not None or any(one.cached for one in asked if one.ours)
    if ours:
        name = graph.llm_cache or "a cache of the model's own"
        yield Finding(
            "caches",
            "pass",
            f"LangChain's response cache ({name}) is on; a ChatArt in a rollout passes it by",
        )
    others = [one for one in asked if not one.ours]
    if others and (graph.llm_cache is not None or any(one.cached for one in others)):
        yield Finding(
            "caches",
            "warn",
            f"other models answer from LangChain's response cache ({plural(len(others), 'call')})",
            "All rollouts of a group then see the same; leave it if it is meant so.",
        )
