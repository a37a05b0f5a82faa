"""Which nodes ask the policy, and which ask other models."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from art_core.plural import plural
from art_langgraph.rehearsal.finding import Finding
from art_langgraph.rehearsal.played import Rehearsal, stock_nodes
from art_langgraph.rehearsal.wording import asker, described, listed, place


def check_models(rehearsal: Rehearsal) -> Iterator[Finding]:
    """The policy's calls by node; what other models are asked."""
    plays = rehearsal.plays
    by_node = Counter(asker(call.origin) for play in plays for call in play.policy_calls)
    stock = {node for play in plays for node in stock_nodes(play)}
    others: Counter[str] = Counter()
    for play in plays:
        foreign = (a for a in play.asked if not a.ours and a.node not in stock)
        others.update(f"{place(a.node)}: {described(a)}" for a in foreign)
    nodes = listed(dict.fromkeys(n for play in plays for n in play.graph.get("nodes") or ()))
    if by_node:
        told = ", ".join(f"{node} {count}" for node, count in by_node.items())
        total = plural(sum(by_node.values()), "call")
        joined = f"; a stock client in {listed(map(place, stock))}, joined by id" if stock else ""
        yield Finding("model calls", "pass", f"{total} to the policy: {told}{joined}")
    else:
        yield Finding(
            "model calls",
            "fail",
            f"no node asked the policy anything; nodes that ran: {nodes or 'none'}",
            _swap(others) or "Build the graph with ChatArt(): `from art_langgraph import ChatArt`.",
        )
    if others:
        told = listed(f"{what} ({plural(count, 'call')})" for what, count in others.items())
        yield Finding(
            "other models",
            "warn" if by_node else "fail",
            f"these nodes ask models that are not trained: {told}",
            f"{_swap(others)} Leave it if it is meant so: their calls are kept as context, and "
            "each rollout pays for them.",
        )
    silent = [play for play in plays if play.failure is None and not play.policy_calls]
    if by_node and silent:
        yield Finding(
            "model calls",
            "warn",
            f"{plural(len(silent), 'rollout')} of {len(plays)} ended without asking the policy",
            "Nothing of such a rollout can be trained. Look for caches and for branches that need "
            "no model.",
        )


def _swap(others: Counter[str]) -> str:
    if not others:
        return ""
    return (
        "To train such a node, put ChatArt() where it makes its model (in create_agent: in the "
        'place of the "provider:model" string).'
    )
