"""Calls that are JSON: one object, or a list of them, after a mark.

In: the text after the mark. Out: calls as they become whole. In a list a broken call stays text,
and those around it are read all the same. Used by most forms: Hermes, Llama 3, Mistral, Phi-4.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Mapping
from typing import Any, Literal

from art_core.engine.forms.calls import SPACE, Block, Read, ToolCall, json_object

_NOT_SPACE = re.compile(f"[^{SPACE}]")
_STRUCTURE = re.compile(r"[^\s0-9a-zA-Z:,.+-]")
"""Outside strings: what opens or closes something, and what JSON has no place for."""
_IN_STRING = re.compile(r'["\\\x00-\x1f]')
_BLANK = re.compile(rf"[{SPACE}]*")
_BETWEEN = re.compile(rf"[{SPACE}]*,?[{SPACE}]*")
_FIRST_KEY = re.compile(r'\{\s*"(?:name|type)"\s*:')
_FIRST_KEY_BEGUN = re.compile(
    r'\{\s*(?:"(?:n(?:a(?:me?)?)?|t(?:y(?:pe?)?)?)?|"(?:name|type)"\s*)?\Z'
)
"""What may become a call's first key with more text."""
_NAME_ARGS = re.compile(r"\s*([\w.-]+)\s*(?:\[CALL_ID\][\w-]*\s*)?(?:\[ARGS\]\s*)?(?=\{)")
_NAME_ARGS_BEGUN = re.compile(r"\s*[\w.-]*\s*(?:\[[A-Z_]*\]?[\w-]*\s*){0,2}\Z")


class JsonScanner:
    """Finds where a JSON object or list ends, in one pass however often more text comes.

    It counts brackets outside strings, so that a closing tag inside a string closes nothing.

    Args:
        at: index of its first bracket.
    """

    def __init__(self, at: int) -> None:
        self._at = at
        self._depth = 0
        self._in_string = False

    def end(self, text: str) -> int | Literal["more", "broken"]:
        """The index after its last bracket. `text` only ever grows."""
        while True:
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
                    return self._at


class JsonCalls:
    """How a form writes a call in JSON.

    Args:
        keys: names of the member with the arguments; the first that is there counts.
        known: no other names are calls; None: any. For forms that begin like other texts.
    """

    def __init__(self, keys: tuple[str, ...], known: Collection[str] | None = None) -> None:
        self._keys, self._known = keys, known
        self._scanner: JsonScanner | None = None

    def at(self, text: str, at: int) -> tuple[ToolCall | None, int] | Literal["more", "broken"]:
        """The object that begins at `at`: the call, or None if it is none, and where it ends."""
        if self._known is not None and not _FIRST_KEY.match(text, at):
            return "more" if _FIRST_KEY_BEGUN.match(text, at) else "broken"
        self._scanner = self._scanner or JsonScanner(at)
        end = self._scanner.end(text)
        if end == "more":
            return "more"
        self._scanner = None
        return (self._call(text[at:end]), end) if isinstance(end, int) else "broken"

    def _call(self, text: str) -> ToolCall | None:
        """The call in the object `text`; no arguments means `{}`."""
        value = json_object(text)
        if value is None:
            return None
        name = value.get("name")
        if name is None and self._known is not None:  # as Llama 3.2 writes it at times
            name = value.get("function")
        key = next((key for key in self._keys if key in value), "")
        if not isinstance(name, str) or not name or not isinstance(value.get(key, {}), dict):
            return None
        if self._known is not None and name not in self._known:
            return None
        return ToolCall(name, member(text, key) if key else "{}")


class JsonBlock:
    """One call.

    Args:
        mark: what was read before; "" if the JSON itself is the mark.
        close: must follow.
    """

    def __init__(self, mark: str, calls: JsonCalls, close: str = "") -> None:
        self._mark, self._calls, self._close = mark, calls, close
        self._found: tuple[ToolCall, int] | None = None

    def read(self, text: str, *, is_last: bool) -> Read | None:
        """As `Block.read`."""
        broken = Read(self._mark, 0, is_over=True) if self._mark else Read(text[:1], 1, True)
        first = _NOT_SPACE.search(text)
        if self._found is None and first is not None and first[0] == "{":
            found = self._calls.at(text, first.start())
            if found == "broken" or (found != "more" and found[0] is None):
                return broken
            if isinstance(found, tuple) and found[0] is not None:
                self._found = (found[0], found[1])
        elif self._found is None and first is not None:
            return broken
        end = None if self._found is None else closed(text, self._found[1], self._close)
        if self._found is not None and isinstance(end, int):
            return Read(self._found[0], end, is_over=True)
        return broken if is_last or end == "other" else None


class JsonListBlock:
    """A list of calls; a broken one is text, and those around it are read.

    Args:
        mark, close: as for one call; without `close` the list is whole all the same.
    """

    def __init__(self, mark: str, calls: JsonCalls, close: str = "") -> None:
        self._said = mark
        """Of what was read, what is text if no call comes."""
        self._calls, self._close = calls, close
        self._is_begun = self._is_lost = False

    def read(self, text: str, *, is_last: bool) -> Read | None:
        """As `Block.read`."""
        read = self._next(text, is_last)
        if read is not None or not is_last:
            return read
        said = self._take_said()
        return Read(said or None, 0 if said else _begin(_BETWEEN, text), is_over=True)

    def _next(self, text: str, is_last: bool) -> Read | None:
        if self._is_lost:
            return self._search(text)
        at = _begin(_BETWEEN if self._is_begun else _BLANK, text)
        if at == len(text):
            return None
        if not self._is_begun:
            if text[at] != "[":
                return Read(self._take_said(), 0, is_over=True)
            self._is_begun, self._said = True, self._said + text[: at + 1]
            return Read(None, at + 1, is_over=False)
        if text[at] == "]":
            end = closed(text, at + 1, self._close)
            if end == "more" and not is_last:
                return None
            said = self._take_said()
            end = end if isinstance(end, int) else at + 1
            return Read(said + text[:end] if said else None, end, is_over=True)
        found = self._calls.at(text, at) if text[at] == "{" else "broken"
        if found == "more":
            return None
        before = self._take_said()
        if isinstance(found, tuple) and found[0] is not None:
            return Read(found[0], found[1], is_over=False)
        self._is_lost = found == "broken"
        end = at + 1 if isinstance(found, str) else found[1]
        return Read(before + text[at if not before else 0 : end], end, is_over=False)

    def _search(self, text: str) -> Read | None:
        """After what is no JSON: text, up to what looks like a call again."""
        at = text.find("{")
        if at:
            end = len(text) if at < 0 else at
            return Read(text[:end], end, is_over=False) if end else None
        if _FIRST_KEY.match(text):
            self._is_lost = False
            return self._next(text, is_last=False)
        return None if _FIRST_KEY_BEGUN.match(text) else Read("{", 1, is_over=False)

    def _take_said(self) -> str:
        said, self._said = self._said, ""
        return said


class NamedBlock:
    """A name and an object with the arguments: `look[ARGS]{"city": "Oslo"}`, of newer Mistrals."""

    def __init__(self, mark: str) -> None:
        self._mark = mark
        self._name: re.Match[str] | None = None
        self._scanner = JsonScanner(0)

    def read(self, text: str, *, is_last: bool) -> Read | None:
        """As `Block.read`."""
        broken = Read(self._mark, 0, is_over=True)
        if self._name is None:
            self._name = _NAME_ARGS.match(text)
            if self._name is None:
                return None if _NAME_ARGS_BEGUN.match(text) and not is_last else broken
            self._scanner = JsonScanner(self._name.end())
        end = self._scanner.end(text)
        if end == "more":
            return broken if is_last else None
        arguments = "" if end == "broken" else text[self._name.end() : end]
        if end == "broken" or json_object(arguments) is None:
            return broken
        return Read(ToolCall(self._name[1], arguments), end, is_over=True)


class FirstOf:
    """One of several blocks, by the first letter that comes.

    Args:
        blocks: by letter; "" is for all others, and if there is none they are text.
    """

    def __init__(self, mark: str, blocks: Mapping[str, Block]) -> None:
        self._mark, self._blocks = mark, blocks
        self._block: Block | None = None

    def read(self, text: str, *, is_last: bool) -> Read | None:
        """As `Block.read`."""
        first = _NOT_SPACE.search(text)
        if self._block is None and first is not None:
            self._block = self._blocks.get(first[0], self._blocks.get(""))
        if self._block is not None:
            return self._block.read(text, is_last=is_last)
        return Read(self._mark, 0, is_over=True) if is_last or first is not None else None


def closed(text: str, end: int, close: str) -> int | Literal["more", "other"]:
    """Where the closing mark ends that stands at `end`, if there is one and white space aside."""
    rest = text[end:].lstrip(SPACE) if close else ""
    if rest.startswith(close):
        return len(text) - len(rest) + len(close) if close else end
    return "more" if close.startswith(rest) else "other"


def _begin(pattern: re.Pattern[str], text: str) -> int:
    found = pattern.match(text)
    return 0 if found is None else found.end()


def member(text: str, key: str) -> str:
    """The value of `key` in the valid JSON object `text`, as it is spelled there."""
    decoder: Any = json.JSONDecoder()
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
