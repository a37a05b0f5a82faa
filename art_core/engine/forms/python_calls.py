"""Calls as Python writes them: `[look(city="Oslo"), now()]`.

In: the text after a mark, or from the bracket on where the bracket is the mark. Out: each call, its
arguments as JSON. A broken call stays text, and those around it are read all the same.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Collection

from art_core.engine.forms.calls import SPACE, Read, ToolCall, written

_CALL = re.compile(r"[A-Za-z_][\w.]*\(")
_CALL_BEGUN = re.compile(r"(?:[A-Za-z_][\w.]*)?\Z")
_MATTERS = re.compile(r"[\"'()\[\]{},\\]")
_AFTER_A_STRING = re.compile(r"\s*(?:[,:)\]}]|\Z)")
"""What a quote that ends a string is followed by: in 'it's' the second is an apostrophe."""
_WORDS = {"true": True, "false": False, "null": None}
"""Of JSON, which models mix in."""


class PythonBlock:
    """A list of calls.

    Args:
        mark: what was read before; "" if the bracket itself is the mark.
        close: may follow.
        known: no other names are calls; None: any.
    """

    def __init__(self, mark: str, close: str = "", known: Collection[str] | None = None) -> None:
        self._mark, self._close, self._known = mark, close, known
        self._left: list[ToolCall | str] | None = None
        """Of the list that was read, what is still to be given out."""

    def read(self, text: str, *, is_last: bool) -> Read | None:
        """As `Block.read`."""
        if self._left is not None:
            return Read(self._left.pop(0), 0, not self._left)
        broken = Read(self._mark, 0, is_over=True) if self._mark else Read(text[:1], 1, True)
        start = len(text) - len(text.lstrip(SPACE))
        if start == len(text):
            return broken if is_last else None
        if text[start] != "[" or not _may_be(text[start + 1 :].lstrip(SPACE)):
            return broken
        parts, end = _parts(text, start)
        if end is None and not is_last:
            return None
        end = len(text) if end is None else end
        items = [_call(part, self._known) or part for part in parts if part.strip(SPACE)]
        if not any(isinstance(item, ToolCall) for item in items):
            return broken
        rest = text[end:].lstrip(SPACE) if self._close else ""
        if self._close and rest.startswith(self._close):
            end = len(text) - len(rest) + len(self._close)
        elif self._close and self._close.startswith(rest) and not is_last:
            return None
        self._left = items[1:] or None
        return Read(items[0], end, is_over=self._left is None)


def _may_be(text: str) -> bool:
    """True if a call begins there, or may with more text."""
    return bool(_CALL.match(text) or _CALL_BEGUN.match(text))


def _parts(text: str, start: int) -> tuple[list[str], int | None]:
    """What stands between the commas of the list at `start`, and where it ends."""
    parts: list[str] = []
    begin, depth, quote = start + 1, 0, ""
    at = start
    while found := _MATTERS.search(text, at):
        char, at = found[0], found.end()
        if char == "\\":
            at += 1
        elif quote:
            is_end = char == quote and _AFTER_A_STRING.match(text, at)
            quote = "" if is_end else quote
        elif char in "\"'":
            quote = char
        elif char in "([{":
            depth += 1
        elif char in ")]}":
            depth -= 1
            if depth == 0:
                return [*parts, text[begin : found.start()]], at
        elif char == "," and depth == 1:
            parts.append(text[begin : found.start()])
            begin = at
    return [*parts, text[begin:]], None


def _call(text: str, known: Collection[str] | None) -> ToolCall | None:
    """The call in `text`; None if it is none."""
    try:
        node = ast.parse(text.strip(), mode="eval").body
        if not isinstance(node, ast.Call) or node.args:
            return None
        if None in (keys := [word.arg for word in node.keywords]) or len(keys) != len({*keys}):
            return None  # **values, or one told twice
        name = ast.unparse(node.func)
        if known is not None and name not in known:
            return None
        values = {str(word.arg): _value(word.value) for word in node.keywords if word.arg}
        return ToolCall(name, written(values))
    except (SyntaxError, ValueError, TypeError, RecursionError, MemoryError):
        return None


def _value(node: ast.expr) -> object:
    if isinstance(node, ast.Name) and node.id in _WORDS:
        return _WORDS[node.id]
    if isinstance(node, ast.List):
        return [_value(each) for each in node.elts]
    if isinstance(node, ast.Dict):
        keys = [ast.literal_eval(key) if key is not None else None for key in node.keys]
        return dict(zip(keys, map(_value, node.values), strict=True))
    return ast.literal_eval(node)
