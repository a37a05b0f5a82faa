"""Token-in: whether a call that goes on from another one begins with its very tokens."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from art_core.plural import plural
from art_langgraph.rehearsal.finding import Finding
from art_langgraph.rehearsal.lineage import lineage
from art_langgraph.rehearsal.played import Rehearsal
from art_langgraph.rehearsal.wording import place


def check_history(rehearsal: Rehearsal) -> Iterator[Finding]:
    """Histories and drift."""
    links = [link for play in rehearsal.plays for link in lineage(play.policy_calls)]
    going_on = [link for link in links if link.parent is not None]
    drifted = Counter(
        f"{place(link.call.origin.node)}: {link.drift}" for link in going_on if link.drift
    )
    for what, count in drifted.items():
        yield Finding(
            "token-in",
            "warn",
            f"{plural(count, 'call')} appended to a history and read other tokens, {what}",
            "The template or the node rewrites what was said. It trains, each call on its own; "
            "sending history as it came is cheaper and exact.",
        )
    if links and not drifted:
        begun = len(links) - len(going_on)
        yield Finding(
            "token-in",
            "pass",
            f"{plural(len(going_on), 'call')} went on from an earlier one with its very tokens, "
            f"{plural(begun, 'history').replace('historys', 'histories')} begun, drift 0",
        )


def histories(rehearsal: Rehearsal) -> int:
    """Most histories that a rollout has."""
    return max(
        (sum(link.parent is None for link in lineage(p.policy_calls)) for p in rehearsal.plays),
        default=0,
    )
