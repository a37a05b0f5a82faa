"""What earlier calls leave to later ones: their records, and how often a prompt was asked.

In: the rollout that a request names, if any, and its messages. Out: the `Past` that its prompt is
built on and that its noise is keyed by. Rollouts not in memory are read back from the records.
"""

from __future__ import annotations

import hashlib
import itertools
import json
from collections import Counter, OrderedDict
from collections.abc import Iterator, Sequence
from typing import Any, Protocol

from art_core.calls import Ids
from art_core.engine.history import Conversations, History
from art_core.engine.messages import template_messages
from art_core.records import RecordStore, TokenRecord

_KEPT_ROLLOUTS = 1024


class Past(Protocol):
    """What came before a call."""

    history: History

    def seed(self, base: int, prompt_ids: Ids) -> int:
        """A key for the noise of the next call that has this prompt; `base` is the model's seed."""
        ...

    def add(self, record: TokenRecord) -> None:
        """Leave `record` to the calls after it."""
        ...


class Rollouts:
    """The pasts of the latest rollouts and conversations. Not thread-safe."""

    def __init__(self, records: RecordStore) -> None:
        self._records = records
        self._rollouts: OrderedDict[str, _Rollout] = OrderedDict()
        self._conversations = Conversations()
        self._calls = itertools.count()

    def past(
        self,
        rollout_id: str | None,
        messages: Sequence[dict[str, Any]],
        tools: Sequence[dict[str, Any]] | None,
    ) -> Past:
        """The past of a call: its rollout's, or that of the conversation it goes on."""
        if rollout_id is None:
            before = self._conversations.records(template_messages(messages), tools)
            return _Conversation(self._conversations, before, self._calls)
        rollout = self._rollouts.get(rollout_id)
        if rollout is None:
            rollout = _Rollout(rollout_id, self._records.of_rollout(rollout_id))
            self._rollouts[rollout_id] = rollout
            if len(self._rollouts) > _KEPT_ROLLOUTS:
                self._rollouts.popitem(last=False)
        self._rollouts.move_to_end(rollout_id)
        return rollout


class _Rollout:
    """A repeated rollout finds the same noise again, in whatever order its parallel nodes ask: a
    key is made of the prompt and of how often that prompt came before.
    """

    def __init__(self, rollout_id: str, records: Sequence[TokenRecord]) -> None:
        self.history = History(records)
        self._id = rollout_id
        self._asked = Counter(
            _digest(record.prompt_ids) for record in records if record.choice_index == 0
        )

    def seed(self, base: int, prompt_ids: Ids) -> int:
        digest = _digest(prompt_ids)
        self._asked[digest] += 1
        return noise_key(base, self._id, digest, self._asked[digest])

    def add(self, record: TokenRecord) -> None:
        self.history.add(record)


class _Conversation:
    """Requests that name no rollout get new noise at every call."""

    def __init__(
        self, known: Conversations, before: tuple[TokenRecord, ...], calls: Iterator[int]
    ) -> None:
        self.history = History(before)
        self._known, self._before, self._calls = known, before, calls

    def seed(self, base: int, prompt_ids: Ids) -> int:
        return noise_key(base, next(self._calls))

    def add(self, record: TokenRecord) -> None:
        self._known.add(record, self._before)


def noise_key(*parts: int | str) -> int:
    """63 bits out of `parts`, the same in every process."""
    digest = hashlib.blake2b(json.dumps(parts).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1


def _digest(ids: Ids) -> str:
    return hashlib.blake2b(ids.tobytes(), digest_size=16).hexdigest()
