"""Drift: calls that go on from an earlier one by what was said, and not by the ids that they read.

In: the calls of a trajectory. Out: a `Drift` for each such call, with its cause and the text around
the first difference. Such a call trains all the same, on a branch of its own; but its history was
computed twice, and the earlier answer is not what the model read later. It leaves out calls whose
history was edited, trimmed or begun anew: they drift from nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

import numpy as np

from art_core.calls import Ids, ModelCall
from art_core.earlier import Answers, extends_ids, extends_messages

DriftCause: TypeAlias = Literal[
    "tools changed", "history rewritten", "answer rewritten", "re-encoded"
]
"""What is other: the tools that the prompt tells of; the text before the earlier answer; the text
of that answer (a template drops thinking, say); only the ids of the same text."""
Decode: TypeAlias = Callable[[Sequence[int]], str]
_AROUND = 12
"""Ids that are shown before and after the first difference."""


@dataclass(frozen=True, eq=False)
class Drift:
    """A call that reads other ids than the call that it goes on from."""

    call: ModelCall
    parent: ModelCall
    cause: DriftCause
    at: int
    """Index of the first id that differs."""
    had: str
    """What the parent read or sampled around there: its text, if it can be decoded, and its ids
    where the text does not tell the difference."""
    reads: str
    """What the call reads there."""

    def __str__(self) -> str:
        return (
            f"{self.cause} at {self.call.origin}, id {self.at}: {self.had!r} was read as "
            f"{self.reads!r}"
        )


def drifts(calls: Sequence[ModelCall], decode: Decode | None = None) -> list[Drift]:
    """The drift among the calls of one trajectory, in the order they were started.

    Args:
        decode: text of ids, special tokens spelled out; None: by place only, so that an answer
            which was re-encoded counts as rewritten.
    """
    found: list[Drift] = []
    answers = Answers()
    for place, call in enumerate(calls):
        if call.error is None and call.prompt_ids is not None:
            parents = _parents(call, calls, answers)
            if parents and not any(extends_ids(call, parent) for parent in parents):
                found.append(drift_between(call, parents[-1], decode))
            if call.sampled_ids is not None:
                answers.add(place, call)
    return found


def _parents(call: ModelCall, calls: Sequence[ModelCall], answers: Answers) -> list[ModelCall]:
    """The calls of the longest history that `call` goes on from by its messages, latest last.

    Several where the same was said to the same messages: any of them may be the one.
    """
    for places in answers.likely(call):
        ours = (calls[place] for place in places if calls[place].model == call.model)
        parents = [one for one in ours if extends_messages(call, one)]
        if parents:
            return parents
    return []


def drift_between(call: ModelCall, parent: ModelCall, decode: Decode | None = None) -> Drift:
    """How `call` drifts from `parent`, which it goes on from by its messages; both have ids."""
    assert parent.prompt_ids is not None
    assert parent.sampled_ids is not None
    assert call.prompt_ids is not None
    had, reads = np.concatenate([parent.prompt_ids, parent.sampled_ids]), call.prompt_ids
    size = min(len(had), len(reads))
    differs = np.flatnonzero(had[:size] != reads[:size])
    at = int(differs[0]) if len(differs) else size
    around = slice(max(0, at - _AROUND), at + _AROUND)
    cause = _cause(call, parent, had, at, decode)
    with_ids = decode is None or cause == "re-encoded"
    shown = [_shown(ids[around], decode, with_ids=with_ids) for ids in (had, reads)]
    return Drift(call, parent, cause, at, *shown)


def _cause(
    call: ModelCall, parent: ModelCall, had: Ids, at: int, decode: Decode | None
) -> DriftCause:
    assert parent.prompt_ids is not None
    assert call.prompt_ids is not None
    if (call.request.get("tools") or None) != (parent.request.get("tools") or None):
        return "tools changed"
    if decode is not None and decode(call.prompt_ids.tolist()).startswith(decode(had.tolist())):
        return "re-encoded"
    return "history rewritten" if at < len(parent.prompt_ids) else "answer rewritten"


def _shown(ids: Ids, decode: Decode | None, *, with_ids: bool) -> str:
    text = [] if decode is None else [decode(ids.tolist())]
    return " ".join([*text, str(ids.tolist())] if with_ids else text)
