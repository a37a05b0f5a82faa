"""`Earlier`: the calls before a call, asked which of them it has read.

In: calls in the order they were started. Out: those that a call goes on from and that had read
most. A call goes on from another if its prompt's ids begin with that one's prompt and sample; where
either lacks ids, if its messages do. Asking takes next to no more time for more calls: likely ones
are looked up, and only they are compared.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator, Sequence

import numpy as np

from art_core.calls import ModelCall
from art_core.prefixes import Places, Prefixes
from art_core.said import said, same_message
from art_core.types import Message


class Earlier:
    """The calls so far.

    Args:
        calls: all that will be added or asked for.
    """

    def __init__(self, calls: Sequence[ModelCall]) -> None:
        self._calls: list[ModelCall] = []
        self._read = np.zeros(len(calls), np.int64)  # messages
        self._ids = Prefixes(len(calls))
        self._messages, self._messages_without_ids = Answers(), Answers()
        self._all_have_ids = all(call.prompt_ids is not None for call in calls)

    def add(self, call: ModelCall) -> None:
        """The next call."""
        place = len(self._calls)
        self._calls.append(call)
        self._read[place] = len(call.messages)
        if not self._all_have_ids:
            self._messages.add(place, call)
        if call.prompt_ids is None or call.sampled_ids is None:
            self._messages_without_ids.add(place, call)
        else:
            self._ids.add(place, np.concatenate([call.prompt_ids, call.sampled_ids]))

    def longest_read(self, call: ModelCall) -> list[ModelCall]:
        """Of the calls that `call` goes on from those that had read most, in their order."""
        if call.prompt_ids is None:
            return self._first(call, self._messages.likely(call))
        by_ids = self._first(call, self._by_length(self._ids.of(call.prompt_ids)))
        other = self._first(call, self._messages_without_ids.likely(call))
        if not (by_ids and other):
            return by_ids or other
        ours, theirs = len(by_ids[0].messages), len(other[0].messages)
        if ours != theirs:
            return by_ids if ours > theirs else other
        found = {id(before) for before in (*by_ids, *other)}
        return [before for before in self._calls if id(before) in found]

    def _by_length(self, places: Places) -> Iterator[list[int]]:
        """`places` by how much was read there, most first."""
        while len(places):
            read = self._read[places]
            most = read.max()
            yield places[read == most].tolist()
            places = places[read < most]

    def _first(self, call: ModelCall, likely: Iterator[list[int]]) -> list[ModelCall]:
        """The calls of the first group that holds any which `call` does go on from."""
        for places in likely:
            found = [self._calls[p] for p in places if _goes_on(call, self._calls[p])]
            if found:
                return found
        return []


class Answers:
    """Places of calls by how many messages they had read, and by the text of their answer."""

    def __init__(self) -> None:
        self._lengths: list[int] = []
        self._places: dict[int, dict[str, list[int]]] = {}

    def add(self, place: int, call: ModelCall) -> None:
        length = len(call.messages)
        if length not in self._places:
            insort(self._lengths, length)
        answers = self._places.setdefault(length, {})
        answers.setdefault(_text_of(call.message), []).append(place)

    def likely(self, call: ModelCall) -> Iterator[list[int]]:
        """Places of calls whose answer may be in the messages of `call`, the longest first."""
        messages = call.messages
        for at in range(bisect_left(self._lengths, len(messages)) - 1, -1, -1):
            length = self._lengths[at]
            places = self._places[length].get(_text_of(messages[length]))
            if places:
                yield places


def _text_of(message: Message) -> str:
    """The same for messages that say the same; "" for what is no text."""
    content = message.get("content")
    text = said(message)[1] if isinstance(content, list) else content
    return text.strip() if isinstance(text, str) else ""


def _goes_on(call: ModelCall, before: ModelCall) -> bool:
    """True if `call` read the whole of `before`: by ids, or by messages where either has none."""
    if before.sampled_ids is None or before.prompt_ids is None or call.prompt_ids is None:
        return extends_messages(call, before)
    return extends_ids(call, before)


def extends_messages(call: ModelCall, before: ModelCall) -> bool:
    """True if the messages of `call` begin with those of `before` and its answer."""
    start = [*before.messages, before.message]
    read = call.messages[: len(start)]
    return len(read) == len(start) and all(map(same_message, read, start))


def extends_ids(call: ModelCall, before: ModelCall) -> bool:
    """True if the prompt of `call` begins with what `before` read and sampled; both have ids."""
    assert call.prompt_ids is not None
    assert before.prompt_ids is not None
    assert before.sampled_ids is not None
    middle = len(before.prompt_ids)
    end = middle + len(before.sampled_ids)
    return (
        len(call.prompt_ids) >= end
        and np.array_equal(call.prompt_ids[middle:end], before.sampled_ids)
        and np.array_equal(call.prompt_ids[:middle], before.prompt_ids)
    )
