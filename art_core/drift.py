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
from art_core.histories import same_message

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
    """What the parent read or sampled around there: text, or ids where nothing decodes them."""
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
    found = []
    known: list[ModelCall] = []
    for call in calls:
        if call.error is None and call.prompt_ids is not None:
            parents = _parents(call, known)
            if parents and not any(extends_ids(call, parent) for parent in parents):
                found.append(drift_between(call, parents[0], decode))
            if call.sampled_ids is not None:
                known.append(call)
    return found


def _parents(call: ModelCall, known: Sequence[ModelCall]) -> list[ModelCall]:
    """The calls of the longest history that `call` goes on from by its messages, latest first.

    Several where the same was said to the same messages: any of them may be the one.
    """
    parents: list[ModelCall] = []
    ours = [one for one in reversed(known) if one.model == call.model]
    for one in sorted(ours, key=lambda c: -len(c.messages)):
        if parents and len(one.messages) < len(parents[0].messages):
            break
        if _extends_messages(call, one):
            parents.append(one)
    return parents


def extends_ids(call: ModelCall, before: ModelCall) -> bool:
    """True if the prompt of `call` begins with what `before` read and sampled; both have ids."""
    assert call.prompt_ids is not None
    head = _had(before)
    return bool(np.array_equal(call.prompt_ids[: len(head)], head))


def _extends_messages(call: ModelCall, before: ModelCall) -> bool:
    """True if the messages of `call` begin with those of `before` and its answer."""
    read, size = call.messages, len(before.messages)
    return (
        len(read) > size
        and same_message(read[size], before.message)
        and all(map(same_message, read[:size], before.messages))
    )


def _had(call: ModelCall) -> Ids:
    assert call.prompt_ids is not None
    assert call.sampled_ids is not None
    return np.concatenate([call.prompt_ids, call.sampled_ids])


def drift_between(call: ModelCall, parent: ModelCall, decode: Decode | None = None) -> Drift:
    """How `call` drifts from `parent`, which it goes on from by its messages; both have ids."""
    assert call.prompt_ids is not None
    had, reads = _had(parent), call.prompt_ids
    size = min(len(had), len(reads))
    differs = np.flatnonzero(had[:size] != reads[:size])
    at = int(differs[0]) if len(differs) else size
    around = slice(max(0, at - _AROUND), at + _AROUND)
    cause = _cause(call, parent, had, at, decode)
    as_ids = decode is None or cause == "re-encoded"
    return Drift(
        call,
        parent,
        cause,
        at,
        _shown(had[around], None if as_ids else decode),
        _shown(reads[around], None if as_ids else decode),
    )


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


def _shown(ids: Ids, decode: Decode | None) -> str:
    return str(ids.tolist()) if decode is None else decode(ids.tolist())
