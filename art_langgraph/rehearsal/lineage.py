"""Which call goes on from which, by what was said; and whether the token ids say so too.

In: the calls of a rollout. Out: a `Link` for each. Where the messages of a call begin with all that
an earlier call read and said, the history was only appended, and the prompt's ids must begin with
that call's prompt and sample. Where they do not, that is drift.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass

from art_core.calls import ModelCall
from art_core.drift import drift_between
from art_core.earlier import extends_ids
from art_core.engine.api_errors import ApiError
from art_core.engine.messages import template_messages, turn_keys


@dataclass(frozen=True)
class Link:
    """A call and the one that it goes on from."""

    call: ModelCall
    parent: int | None
    """Index of that call; None begins a history."""
    drift: str | None
    """Why its ids do not extend the parent's; None: they do, or there is no parent."""
    context: int
    """Tokens of its prompt that no earlier call has."""


def lineage(calls: Sequence[ModelCall]) -> list[Link]:
    """A link for each of `calls`, which are those of one model in the order of their starts."""
    ends: list[bytes | None] = [_end(call) for call in calls]
    links = []
    for place, call in enumerate(calls):
        keys = _keys(call)
        before = [i for i in range(place) if ends[i] is not None and ends[i] in keys]
        parent = max(before, key=lambda i: (keys.index(ends[i] or b""), i), default=None)
        drift = None if parent is None else _drift(calls[parent], call)
        known = 0 if parent is None or drift else _length(calls[parent])
        read = 0 if call.prompt_ids is None else len(call.prompt_ids)
        links.append(Link(call, parent, drift, read - known))
    return links


def _keys(call: ModelCall) -> list[bytes]:
    """A digest for each beginning of what the call read; none where it can't be told."""
    try:
        return turn_keys(template_messages(call.messages), call.request.get("tools"))
    except ApiError:
        return []


def _end(call: ModelCall) -> bytes | None:
    """The digest of what the call read and said; None for a call that gave no answer."""
    if call.error is not None or not call.message:
        return None
    try:
        messages = template_messages([*call.messages, call.message])
    except ApiError:
        return None
    return turn_keys(messages, call.request.get("tools"))[-1]


def _drift(parent: ModelCall, call: ModelCall) -> str | None:
    if not (parent.trainable and call.trainable) or extends_ids(call, parent):
        return None
    return _told_drift(call) or drift_between(call, parent).cause


def _told_drift(call: ModelCall) -> str | None:
    """The reason that our endpoint gives."""
    try:
        told = json.loads(call.response).get("art_drift")
    except (ValueError, AttributeError):  # a stream
        return None
    return None if told is None else str(told)


def _length(call: ModelCall) -> int:
    read = 0 if call.prompt_ids is None else len(call.prompt_ids)
    said = 0 if call.sampled_ids is None else len(call.sampled_ids)
    return read + said
