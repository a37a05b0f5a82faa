"""What a conversation has already sampled, findable by the messages of the next request.

In: token records as they are made. Out: for each assistant message of a request the records that
it may have come from. A `Conversations` keeps the records of requests that name no rollout.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from art_core.engine.messages import identity, template_messages, turn_keys
from art_core.records import TokenRecord


@dataclass(frozen=True)
class Match:
    """Where the assistant messages of a request come from."""

    candidates: tuple[tuple[TokenRecord, ...], ...]
    """For each message the records that are equal to it, best first; none if it is foreign."""
    ancestor: tuple[int, TokenRecord] | None
    """The last (message index, record) whose whole conversation up to there is this one's."""


class History:
    """The complete records of one rollout."""

    def __init__(self, records: Iterable[TokenRecord] = ()) -> None:
        self._by_identity: dict[str, list[TokenRecord]] = {}
        self._by_turn: dict[bytes, list[TokenRecord]] = {}
        self._by_call_id: dict[str, TokenRecord] = {}
        for record in records:
            self.add(record)

    def add(self, record: TokenRecord) -> None:
        """Make `record` findable.

        One that broke off was never seen whole, and one that went on from a bare prompt is no
        conversation: these are left out.
        """
        if not record.complete or not record.request_messages:
            return
        messages = template_messages([*record.request_messages, record.message])
        self._by_identity.setdefault(identity(messages[-1]), []).append(record)
        self._by_turn.setdefault(turn_keys(messages, record.tools)[-1], []).append(record)
        for call in record.message.get("tool_calls") or ():
            self._by_call_id[call["id"]] = record

    def match(
        self, messages: Sequence[dict[str, Any]], tools: Sequence[dict[str, Any]] | None
    ) -> Match:
        """Find the origin of each assistant message of `messages` (normal form)."""
        candidates: list[tuple[TokenRecord, ...]] = []
        ancestor: tuple[int, TokenRecord] | None = None
        if not self._by_identity:
            return Match(((),) * len(messages), None)
        for i, key in enumerate(turn_keys(messages, tools)):
            equal = self._equal(messages[i], key)
            candidates.append(equal)
            turn = self._by_turn.get(key, ())
            ancestor = next(((i, record) for record in equal if record in turn), ancestor)
        return Match(tuple(candidates), ancestor)

    def _equal(self, message: dict[str, Any], key: bytes) -> tuple[TokenRecord, ...]:
        """Records equal to `message`: by tool call id, then same conversation, latest first."""
        if message["role"] != "assistant":
            return ()
        equal = self._by_identity.get(identity(message), [])
        if len(equal) < 2:
            return tuple(equal)
        ids = [call.get("id") for call in message.get("tool_calls", ())]
        named = {id(self._by_call_id[i]) for i in ids if i in self._by_call_id}
        turn = {id(record) for record in self._by_turn.get(key, ())}
        latest_first = equal[::-1]
        latest_first.sort(key=lambda record: (id(record) not in named, id(record) not in turn))
        return tuple(latest_first)


class Conversations:
    """The latest conversations, by what was said in them. Thread-safe.

    Args:
        limit: how many conversations are kept; the one unused for longest goes first.
    """

    def __init__(self, limit: int = 4096) -> None:
        self._limit = limit
        self._lock = threading.Lock()
        self._records: OrderedDict[bytes, tuple[TokenRecord, ...]] = OrderedDict()

    def records(
        self, messages: Sequence[dict[str, Any]], tools: Sequence[dict[str, Any]] | None
    ) -> tuple[TokenRecord, ...]:
        """The records of the longest known conversation that `messages` (normal form) goes on."""
        keys = turn_keys(messages, tools)
        with self._lock:
            for message, key in zip(reversed(messages), reversed(keys), strict=True):
                if message["role"] == "assistant" and key in self._records:
                    self._records.move_to_end(key)
                    return self._records[key]
        return ()

    def add(self, record: TokenRecord, before: Sequence[TokenRecord]) -> None:
        """Keep `record`, which was sampled after `before`."""
        if not record.complete or not record.request_messages:
            return
        messages = template_messages([*record.request_messages, record.message])
        key = turn_keys(messages, record.tools)[-1]
        with self._lock:
            self._records[key] = (*before, record)
            self._records.move_to_end(key)
            while len(self._records) > self._limit:
                self._records.popitem(last=False)
