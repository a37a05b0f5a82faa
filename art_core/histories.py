"""The conversations inside a trajectory: its calls, each put behind the one that it goes on from.

In: calls in the order they were started. Out: histories of messages and choices, the main one
first; every sampled choice is in exactly one, once. A call goes on from an earlier one if its ids
extend that one's ids; where ids are missing, if its messages do. Equal calls stay calls of their
own. It leaves out training, which joins ids itself (`batch.forest`).
"""

from __future__ import annotations

from collections.abc import Container, Sequence
from typing import Any

from pydantic import ValidationError

from art_core.calls import Cause, ModelCall
from art_core.earlier import Earlier
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
    ends: dict[int, list[ModelCall]] = {}
    earlier = Earlier(answered)
    for call in answered:
        best = _best(call, earlier.longest_read(call), ends)
        earlier.add(call)
        chain = ends.pop(id(best), None)
        if chain is None:
            chain = []
            found.append(chain)
        chain.append(call)
        ends[id(call)] = chain
    return sorted(found, key=_rank)


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
    told: dict[str, Any] = {
        "index": call.choice_index,
        "finish_reason": call.finish_reason or "stop",
        "message": {"content": None, **call.message, "role": "assistant"},
        "logprobs": None,
        "art_record_id": call.record_id,
    }
    try:
        return Choice.model_validate(told)
    except ValidationError:  # what OpenAI does not know, such as another finish_reason
        return Choice.construct(**told)  # its own way, which takes anything, and six times as long


# --- which of several


def _best(call: ModelCall, read: Sequence[ModelCall], ends: Container[int]) -> ModelCall | None:
    """Of those that `call` goes on from the nearest; None: there are none.

    Args:
        ends: ids (Python's) of the calls that nothing goes on from yet.
    """
    if len(read) < 2:
        return read[0] if read else None
    return max(read, key=lambda a: _nearness(call, a, is_end=id(a) in ends))


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
