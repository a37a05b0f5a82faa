"""Responses for the client, less the token data that only recording asked for.

In: response bytes, and the request as its caller wrote it. Out: the bytes to hand on. Parsing the
logprobs of 100 tokens costs an OpenAI client eight times the rest of its work, and a graph would
keep them in its state. What is no completion passes as it came.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from art_core.json_bytes import read_json, write_json
from art_core.reply import events

_BLANK_LINE = re.compile(rb"\r\n\r\n|\n\n|\r\r")
_FINISH = re.compile(rb'"finish_reason"\s*:\s*"[^"]')
"""Some servers send an empty one with every event."""


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
    """The same for server-sent events, as they come.

    From the first finish_reason on, events are held back until [DONE] or the end, and then handed
    on together: some clients hang up at a finish_reason, and the answer is whole all the same.

    Args:
        asked: the body of the request as its caller wrote it.
    """

    def __init__(self, asked: Mapping[str, Any]) -> None:
        self._unasked = _unasked(asked)
        self._part = b""
        self._ending: list[bytes] = []

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
        held = [*self._ending, self._slim(self._part)]
        self._part, self._ending = b"", []
        return b"".join(held)

    def _add(self, block: bytes, ready: list[bytes]) -> None:
        event = self._slim(block)
        if self._ending or _FINISH.search(event):
            self._ending.append(event)
            if event.startswith((b"data: [DONE]", b"data:[DONE]")):
                ready.extend(self._ending)
                self._ending = []
        else:
            ready.append(event)

    def _slim(self, block: bytes) -> bytes:
        if b'"logprobs"' not in block and b'token_ids"' not in block:
            return block
        try:
            return b"data: " + _without(read_json(_data(block)), self._unasked) + b"\n\n"
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
            return block


def _data(block: bytes) -> bytes:
    """The data of one event.

    Raises:
        ValueError: there is none, or several, as behind blank lines of mixed line ends.
    """
    data = block[6:-2]
    if block.startswith(b"data: ") and block.endswith(b"\n\n") and len(data.splitlines()) == 1:
        return data  # as servers send it; all else takes five times as long
    (data,) = events(block)
    return data
