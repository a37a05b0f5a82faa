"""Tool calls in Hermes form, parsed out of a text as it comes.

A call is `<tool_call>`, a JSON object with a "name" and an "arguments" object, `</tool_call>`.
In: text in any portions. Out: text and calls in order; arguments as they were written. Whatever
is not such a call stays text, so nothing is said that was not sampled. White space that touches
a call is dropped; texts before and after calls are joined by a line break.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal, TypeAlias

from art_core.engine.detokenize import overlap
from art_core.engine.messages import strict_loads

OPEN = "<tool_call>"
CLOSE = "</tool_call>"

_SPACE = " \t\n\r"
_NOT_SPACE = re.compile(f"[^{_SPACE}]")
_STRUCTURE = re.compile(r"[^\s0-9a-zA-Z:,.+-]")
"""Outside strings: what opens or closes something, and what JSON has no place for."""
_IN_STRING = re.compile(r'["\\\x00-\x1f]')


@dataclass(frozen=True)
class ToolCall:
    """A whole call."""

    name: str
    arguments: str
    """A JSON object, spelled as the model wrote it."""


Event: TypeAlias = str | ToolCall


class ToolCallParser:
    """Splits a text into plain text and calls; the pieces' sequence does not depend on how the
    text was cut. Text is given out as soon as it can't be part of a call.

    Args:
        limit: ignore everything after this many calls; None means no limit.
    """

    def __init__(self, limit: int | None = None) -> None:
        self.calls = 0
        self._limit = limit
        self._buffer = ""
        self._call: _CallScanner | None = None
        self._space = ""
        self._after_call = False
        self._has_text = False

    def push(self, text: str) -> list[Event]:
        """What `text` completes."""
        self._buffer += text
        return [*self._events(is_last=False)]

    def finish(self) -> list[Event]:
        """What still waits, at the end of the text; an unfinished call is text."""
        events = [*self._events(is_last=True)]
        if self._space and not self._after_call:
            events.append(self._space)
        self._space = ""
        return events

    @property
    def is_full(self) -> bool:
        """True if `limit` calls were found."""
        return self._limit is not None and self.calls >= self._limit

    def _events(self, *, is_last: bool) -> Iterator[Event]:
        while not self.is_full:
            if self._call is None:
                at = self._buffer.find(OPEN)
                held = 0 if is_last else overlap(self._buffer, OPEN)
                yield from self._text(self._buffer[: at if at >= 0 else len(self._buffer) - held])
                if at < 0:
                    self._buffer = self._buffer[len(self._buffer) - held :]
                    return
                self._buffer = self._buffer[at + len(OPEN) :]
                self._call = _CallScanner()
            found = self._call.scan(self._buffer)
            if found == "more" and not is_last:
                return
            if isinstance(found, ToolCall):
                self._buffer = self._buffer[self._call.end :]
                self._space, self._after_call = "", True
                self.calls += 1
                yield found
            else:
                yield from self._text(OPEN)
            self._call = None

    def _text(self, text: str) -> Iterator[str]:
        """`text` less the white space at its end, which waits for what follows it."""
        text = self._space + text
        if self._after_call:
            text = text.lstrip(_SPACE)
        body = text.rstrip(_SPACE)
        self._space = text[len(body) :]
        if body:
            joint = "\n" if self._after_call and self._has_text else ""
            self._after_call, self._has_text = False, True
            yield joint + body


class _CallScanner:
    """Reads what follows `<tool_call>`, in one pass however often more text comes.

    It counts brackets outside strings, so that a closing tag inside a string closes nothing.
    """

    def __init__(self) -> None:
        self._at = 0
        self._depth = 0
        self._in_string = False
        self._start = -1
        self._call: ToolCall | None = None
        self.end = -1
        """Index after the closing tag, once the call is whole."""

    def scan(self, text: str) -> ToolCall | Literal["more", "broken"]:
        """The call that `text` begins with, if it is whole. `text` only ever grows."""
        if self._start < 0:
            first = _NOT_SPACE.search(text)
            if first is None:
                return "more"
            if first[0] != "{":
                return "broken"
            self._start = self._at = first.start()
        while self._call is None:
            found = self._step(text)
            if found is not None:
                return found
        return self._close(text, self._call)

    def _step(self, text: str) -> Literal["more", "broken"] | None:
        """Go to the next character that matters."""
        found = (_IN_STRING if self._in_string else _STRUCTURE).search(text, self._at)
        if found is None:
            self._at = len(text)
            return "more"
        char, self._at = found[0], found.end()
        if char == "\\" and self._in_string:
            if self._at == len(text):
                self._at -= 1
                return "more"
            self._at += 1
        elif char == '"':
            self._in_string = not self._in_string
        elif self._in_string or char not in "{}[]":
            return "broken"
        else:
            self._depth += 1 if char in "{[" else -1
            if self._depth == 0:
                self._call = _read_call(text[self._start : self._at])
                return "broken" if self._call is None else None
        return None

    def _close(self, text: str, call: ToolCall) -> ToolCall | Literal["more", "broken"]:
        rest = text[self._at :].lstrip(_SPACE)
        if rest.startswith(CLOSE):
            self.end = len(text) - len(rest) + len(CLOSE)
            return call
        return "more" if CLOSE.startswith(rest) else "broken"


def parse_tool_calls(text: str) -> tuple[str, list[ToolCall]]:
    """(plain text, calls) of a whole text."""
    parser = ToolCallParser()
    events = [*parser.push(text), *parser.finish()]
    calls = [event for event in events if isinstance(event, ToolCall)]
    return "".join(event for event in events if isinstance(event, str)), calls


def _read_call(text: str) -> ToolCall | None:
    """The call in the JSON object `text`; None if it is no call. No arguments means `{}`."""
    try:
        value = strict_loads(text)
    except ValueError:
        return None
    if not isinstance(value, dict):
        return None
    name, arguments = value.get("name"), value.get("arguments", {})
    if not isinstance(name, str) or not name or not isinstance(arguments, dict):
        return None
    return ToolCall(name, _member(text, "arguments") if "arguments" in value else "{}")


def _member(text: str, key: str) -> str:
    """The value of `key` in the valid JSON object `text`, as it is spelled there."""
    decoder = json.JSONDecoder()
    found = ""
    at = _skip_space(text, 1)
    while text[at] != "}":
        name, at = decoder.raw_decode(text, at)
        start = _skip_space(text, _skip_space(text, at) + 1)
        _, end = decoder.raw_decode(text, start)
        if name == key:
            found = text[start:end]
        at = _skip_space(text, end)
        if text[at] == ",":
            at = _skip_space(text, at + 1)
    return found


def _skip_space(text: str, at: int) -> int:
    found = _NOT_SPACE.search(text, at)
    return len(text) if found is None else found.start()
