"""Responses for the client, less the token data that only recording asked for.

In: response bytes, and the request as its caller wrote it. Out: the bytes to hand on. Parsing the
logprobs of 100 tokens costs an OpenAI client eight times the rest of its work, and a graph would
keep them in its state. What is no completion passes as it came.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from art_core.json_bytes import read_json, write_json
from art_core.reply import events, no_object

_BLANK_LINE = re.compile(rb"\r\n\r\n|\n\n|\r\r")
_FINISH = re.compile(rb'"finish_reason"\s*:\s*"[^"]')
"""Some servers send an empty one with every event."""
_DONE = b"[DONE]"


def slim_body(body: Mapping[str, Any], asked: Mapping[str, Any]) -> bytes:
    """A parsed completion, as bytes without the fields that `asked` did not ask for."""
    return _without(body, _unasked(asked))


def _unasked(asked: Mapping[str, Any]) -> frozenset[str]:
    """Names of the token fields that `asked` does not ask for."""
    fields = set() if asked.get("return_token_ids") else {"prompt_token_ids", "token_ids"}
    return frozenset(fields if asked.get("logprobs") else fields | {"logprobs"})


def _without(body: Mapping[str, Any], unasked: frozenset[str]) -> bytes:
    slim = {name: value for name, value in body.items() if name not in unasked}
    slim["choices"] = [
        {name: value for name, value in choice.items() if name not in unasked}
        if isinstance(choice, Mapping)
        else choice
        for choice in body["choices"]
    ]
    return write_json(slim)


class SlimStream:
    """The same for server-sent events, as they come, one line of data each.

    From the first finish_reason on, events are held back until [DONE] or the end, and then handed
    on together: some clients hang up at a finish_reason, and the answer is whole all the same. Of
    several finish_reasons of a choice the last is handed on: LangChain adds them up ("stopstop").
    Events without data, such as a ping, are left out: OpenAI's client takes them for broken JSON.
    Data that can be no object becomes an error in OpenAI's form, which its client raises as an
    `APIError`; as it came, it would break in whatever reads the event.

    Args:
        asked: the body of the request as its caller wrote it.
    """

    def __init__(self, asked: Mapping[str, Any]) -> None:
        self._unasked = _unasked(asked)
        self._part = b""
        self._ending: list[bytes] = []
        """Data of the events that are held back."""

    def feed(self, chunk: bytes) -> bytes:
        """What can be handed on now that `chunk` has come: whole events only."""
        self._part += chunk
        ready: list[bytes] = []
        start = 0
        for end in _BLANK_LINE.finditer(self._part):
            self._add(self._part[start : end.end()], ready)
            start = end.end()
        self._part = self._part[start:]
        return b"".join(ready)

    def rest(self) -> bytes:
        """What was held back when the stream ended."""
        ready: list[bytes] = []
        part, self._part = self._part, b""
        if all(map(_is_whole, events(part))):  # it lacks its blank line only
            self._add(part, ready)
            part = b""
        return b"".join([*ready, *self._ended(), part])

    def _add(self, block: bytes, ready: list[bytes]) -> None:
        for data in map(_object_or_error, _data(block)):
            if self._ending or _FINISH.search(data):
                self._ending.append(self._slim(data))
                if data.startswith(_DONE):
                    ready.extend(self._ended())
            else:
                ready.append(_event(self._slim(data)))

    def _ended(self) -> list[bytes]:
        """The events that were held back."""
        held, self._ending = self._ending, []
        if sum(_FINISH.search(data) is not None for data in held) > 1:
            held = _finished_once(held)
        return [_event(data) for data in held]

    def _slim(self, data: bytes) -> bytes:
        if b'"logprobs"' not in data and b'token_ids"' not in data:
            return data
        try:
            return _without(read_json(data), self._unasked)
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
            return data


def _data(block: bytes) -> Iterator[bytes]:
    """The data of the events in a block, which are several behind blank lines of mixed ends."""
    if block.startswith(b"data: ") and block.endswith(b"\n\n") and block.count(b"\n") == 2:
        yield block[6:-2]  # as servers send it; all else takes five times as long
    else:
        yield from events(block)


def _object_or_error(data: bytes) -> bytes:
    if data.startswith((b"{", _DONE)) or data.lstrip().startswith((b"{", _DONE)):
        return data
    return write_json({"error": {"message": no_object(data), "type": "server_error"}})


def _event(data: bytes) -> bytes:
    return b"data: " + data.replace(b"\n", b"\ndata: ") + b"\n\n"


def _is_whole(data: bytes) -> bool:
    try:
        return data.startswith(_DONE) or bool(read_json(data))
    except (ValueError, RecursionError):
        return False


def _finished_once(held: Sequence[bytes]) -> list[bytes]:
    """The events, each choice's finish_reason only in the last that has one."""
    finished: set[object] = set()
    kept = []
    for data in reversed(held):
        try:
            event = read_json(data)
            for choice in event["choices"]:
                if choice["finish_reason"] and choice["index"] in finished:
                    choice["finish_reason"] = None
                    data = write_json(event)
                elif choice["finish_reason"]:
                    finished.add(choice["index"])
        except (ValueError, KeyError, TypeError, RecursionError):  # [DONE], or nothing we know
            pass
        kept.append(data)
    return kept[::-1]
