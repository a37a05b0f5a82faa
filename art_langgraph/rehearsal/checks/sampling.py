"""Temperature traps: what would make the rollouts of a group alike, or give answers unsampled."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from art_langgraph.rehearsal.finding import Finding
from art_langgraph.rehearsal.played import Rehearsal
from art_langgraph.rehearsal.wording import listed, place, plural

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


def check_caches(rehearsal: Rehearsal) -> Iterator[Finding]:
    """Answers that are not sampled but replayed."""
    graph = rehearsal.graph
    if graph.cached_nodes:
        yield Finding(
            "caches",
            "fail",
            f"LangGraph caches the results of {listed(graph.cached_nodes)}: the rollouts of a "
            "group would share one answer",
            "Compile the graph for training without cache=, or without the nodes' cache_policy.",
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
