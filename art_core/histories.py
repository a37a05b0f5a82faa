"""The conversations inside a trajectory: its calls, each put behind the one that it goes on from.

In: calls in the order they were started. Out: histories of messages and choices, the main one
first; every sampled choice is in exactly one, once. A call goes on from an earlier one if its ids
extend that one's ids; where ids are missing, if its messages do. Equal calls stay calls of their
own. It leaves out training, which joins ids itself (`batch.forest`).
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import numpy as np

from art_core.calls import Cause, ModelCall
from art_core.types import Choice, Message, MessagesAndChoices

_UNSEEN = frozenset[Cause]({"orphan", "several answers", "cache replay"})
"""Calls whose answer is no turn of its own in what the graph read."""


def chains(calls: Sequence[ModelCall]) -> list[list[ModelCall]]:
    """The answered calls as conversations, the main one first.

    The main one is the highest in the graph, then the one of the most calls, then the one that
    read most, then the first.
    """
    answered = [c for c in calls if c.error is None and c.message and c.left_out not in _UNSEEN]
    found: list[list[ModelCall]] = []
    for number, call in enumerate(answered):
        ends = {id(chain[-1]): chain for chain in found}
        best = _best(call, answered[:number], ends)
        chain = ends.get(id(best))
        if chain is None:
            found.append([call])
        else:
            chain.append(call)
    return sorted(found, key=_rank)


def goes_on(call: ModelCall, before: ModelCall) -> bool:
    """True if `call` read the whole of `before`: by ids, or by messages where either has none."""
    if before.sampled_ids is None or before.prompt_ids is None or call.prompt_ids is None:
        start = [*before.messages, before.message]
        read = call.messages[: len(start)]
        return len(read) == len(start) and all(map(same_message, read, start))
    middle = len(before.prompt_ids)
    end = middle + len(before.sampled_ids)
    return (
        len(call.prompt_ids) >= end
        and np.array_equal(call.prompt_ids[middle:end], before.sampled_ids)
        and np.array_equal(call.prompt_ids[:middle], before.prompt_ids)
    )


def items(chain: Sequence[ModelCall]) -> MessagesAndChoices:
    """A conversation as messages, its sampled turns as Choices; context stays a message."""
    found: MessagesAndChoices = []
    for call in chain:
        found.extend(call.messages[len(found) :])
        found.append(as_choice(call) if is_sample(call) else call.message)
    return found


def is_sample(call: ModelCall) -> bool:
    """True if the call's answer is the policy's own, so that it may be trained."""
    return call.error is None and call.left_out is None


def as_choice(call: ModelCall) -> Choice:
    """The call's answer as OpenAI's client would have given it, with the record id as an extra."""
    return Choice.construct(
        index=call.choice_index,
        finish_reason=call.finish_reason or "stop",
        message={"content": None, **call.message, "role": "assistant"},
        logprobs=None,
        art_record_id=call.record_id,
    )


# --- which of several


def _best(call: ModelCall, earlier: Sequence[ModelCall], ends: Collection[int]) -> ModelCall | None:
    """The longest of `earlier` that `call` goes on from, of equal twins the nearest; None: none.

    Args:
        ends: ids (Python's) of the calls that nothing goes on from yet.
    """
    longest = -1
    twins: list[ModelCall] = []
    for before in sorted(earlier, key=lambda a: -len(a.messages)):
        if len(before.messages) < longest:
            break
        if goes_on(call, before):
            longest = len(before.messages)
            twins.append(before)
    if len(twins) < 2:
        return twins[0] if twins else None
    return max(twins, key=lambda a: _nearness(call, a, is_end=id(a) in ends))


def _nearness(call: ModelCall, before: ModelCall, *, is_end: bool) -> tuple[Any, ...]:
    """Orders twins, which can't be told apart by what they said.

    First the one whose tool calls have the ids that were read, then the nearest in the graph, one
    that nothing goes on from yet, one that had ended, the latest.
    """
    return (
        _call_ids(before.message) == _call_ids(_turn(call, len(before.messages))),
        _shared(before.origin.namespace, call.origin.namespace),
        is_end,
        before.ended <= call.started,
        before.started,
    )


def _turn(call: ModelCall, index: int) -> Message:
    return call.messages[index] if index < len(call.messages) else {}


def _call_ids(message: Message) -> list[Any]:
    return [tool_call.get("id") for tool_call in message.get("tool_calls") or ()]


def _shared(one: str | None, other: str | None) -> int:
    """How many levels of two checkpoint namespaces are the same."""
    pairs = zip((one or "").split("|"), (other or "").split("|"), strict=False)
    levels = 0
    for a, b in pairs:
        if a != b:
            break
        levels += 1
    return levels


def _rank(chain: Sequence[ModelCall]) -> tuple[Any, ...]:
    depths = [(call.origin.namespace or "").count("|") for call in chain]
    return (
        not any(is_sample(call) for call in chain),
        min(depths),
        -len(chain),
        -len(chain[-1].messages),
    )


# --- equal messages


def same_message(one: Message, other: Message) -> bool:
    """True if two messages say the same: spelling of JSON and ids of tool calls do not count."""
    return one == other or _said(one) == _said(other)


def _said(message: Message) -> tuple[Any, ...]:
    role = "system" if message.get("role") == "developer" else message.get("role")
    calls = [
        (call["function"].get("name"), _value(call["function"].get("arguments")))
        for call in message.get("tool_calls") or ()
        if isinstance(call.get("function"), Mapping)
    ]
    return role, _text(message.get("content")), calls


def _text(content: Any) -> Any:
    """Text parts joined; what is no text as it is."""
    if isinstance(content, list) and all(_is_text(part) for part in content):
        content = "".join(part if isinstance(part, str) else part["text"] for part in content)
    return content.strip() if isinstance(content, str) else content or ""


def _is_text(part: Any) -> bool:
    if isinstance(part, Mapping):
        return part.get("type") == "text" and isinstance(part.get("text"), str)
    return isinstance(part, str)


def _value(arguments: Any) -> Any:
    """Arguments as LangChain reads them: null and [] are none, raw line ends in texts are no fault.

    NaN counts as equal to NaN.
    """
    if not isinstance(arguments, str):
        return arguments or {}
    try:
        return json.loads(arguments.strip() or "{}", strict=False, parse_constant=str) or {}
    except (ValueError, RecursionError):
        return arguments
