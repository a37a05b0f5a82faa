"""State between rollouts: what one leaves behind must not be there for the next."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from art_core.finding import Finding
from art_langgraph.rehearsal.actor import mark_of
from art_langgraph.rehearsal.played import Play, Rehearsal
from art_langgraph.rehearsal.wording import listed, place, shortened

_AROUND = 50
"""Characters shown on each side of a difference."""


def check_state(rehearsal: Rehearsal) -> Iterator[Finding]:
    """Leaks, first prompts that differ, and how threads are kept apart."""
    groups = [rehearsal.group(i) for i in range(len(rehearsal.scenarios))]
    leaks = dict.fromkeys(place(node) for node in _leaks(rehearsal.plays))
    if leaks:
        store = f" Its store ({rehearsal.graph.store}) is one." if rehearsal.graph.store else ""
        yield Finding(
            "state",
            "fail",
            f"what one rollout said was read by another, in {listed(leaks)}",
            "Something outlives a rollout: a global, a default argument, a store, a file."
            f"{store} Give each rollout its own: pass a factory that builds the graph.",
        )
    else:
        differing = next((text for g in groups if (text := _first_difference(g))), None)
        if differing is not None:
            yield Finding(
                "state",
                "warn",
                f"the rollouts of a scenario do not begin with the same prompt: {differing}",
                "A clock or a random example in the prompt is harmless but for speed; state that "
                "grows from rollout to rollout is not.",
            )
        elif (
            told := next((text for g in groups if (text := _told_otherwise(g))), None)
        ) is not None:
            yield Finding(
                "state",
                "warn",
                f"a tool answered the same first calls of two rollouts otherwise: {told}",
                "A clock or chance is harmless; what a tool changed for whoever comes next is not: "
                "give each rollout a fresh one (a factory of the graph, or rollout(..., set_up=)).",
            )
        elif rehearsal.scripted and len([p for p in rehearsal.plays if p.policy_calls]) > 1:
            yield Finding("state", "pass", "no rollout read what another one left")
        elif any(len(_begun(group)) > 1 for group in groups):  # what it says has no mark
            yield Finding("state", "pass", "the rollouts of a scenario begin with the same prompt")
    yield from _threads(rehearsal)


def _threads(rehearsal: Rehearsal) -> Iterator[Finding]:
    given = any("thread_id" in (s.config.get("configurable") or {}) for s in rehearsal.scenarios)
    keeper = rehearsal.graph.checkpointer
    if given:
        yield Finding(
            "threads",
            "warn",
            "a scenario's config names a thread_id, which rollouts do not use",
            "Leave it out: each rollout gets a thread of its own, else state would leak through "
            "the checkpointer.",
        )
    elif keeper is not None:
        yield Finding(
            "threads",
            "pass",
            f"the checkpointer ({keeper}) keeps the rollouts apart: each has a thread of its own",
        )


def _leaks(plays: Sequence[Play]) -> Iterator[str | None]:
    """Nodes that read the mark of another rollout."""
    marks = {mark_of(play.rollout_id): play for play in plays}
    for play in plays:
        for call in play.calls:
            text = json.dumps(call.messages, ensure_ascii=False)
            if "mark-" in text and any(m in text for m, of in marks.items() if of is not play):
                yield call.origin.node


def _told_otherwise(group: Sequence[Play]) -> str | None:
    """What a tool said in two rollouts that had gone the same way until then; None: the same."""
    first, *others = [_longest(play) for play in group if play.policy_calls] or [[]]
    for other in others:
        for one, two in zip(first, other, strict=False):
            if one.get("role") == two.get("role") == "tool" and _said(one) != _said(two):
                return f"{shortened(str(_said(one)))!r} against {shortened(str(_said(two)))!r}"
            if _said(one) != _said(two):
                break
    return None


def _longest(play: Play) -> list[dict[str, Any]]:
    return max((call.messages for call in play.policy_calls), key=len)


def _said(message: Mapping[str, Any]) -> Any:
    """Of a turn with tool calls these, else its content."""
    calls = [call["function"] for call in message.get("tool_calls") or ()]
    return [(c["name"], c["arguments"]) for c in calls] or message.get("content")


def _begun(group: Sequence[Play]) -> list[str]:
    """The first prompt of each rollout."""
    calls = [play.policy_calls[0] for play in group if play.policy_calls]
    return [json.dumps(call.messages, ensure_ascii=False) for call in calls]


def _first_difference(group: Sequence[Play]) -> str | None:
    """Where the first prompts of a group part; None if they are the same."""
    begun = _begun(group)
    other = next((text for text in begun if text != begun[0]), None)
    if other is None:
        return None
    at = next(
        (i for i, (a, b) in enumerate(zip(begun[0], other, strict=False)) if a != b),
        min(len(begun[0]), len(other)),
    )
    parts = [shortened(t[max(0, at - _AROUND // 2) : at + _AROUND]) for t in (begun[0], other)]
    return f"{parts[0]!r} against {parts[1]!r}"
