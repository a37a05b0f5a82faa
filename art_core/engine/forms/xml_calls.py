"""Calls with a tag for each argument, as Qwen3-Coder and Qwen3.5 write them.

`<tool_call><function=look><parameter=city>Oslo</parameter></function></tool_call>`, in lines of
their own. In: the text after `<tool_call>`, and the tools' schemas. Out: calls whose values are
typed by the schema: a value is text there, and 7 may be a number or a string.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from art_core.engine.forms.calls import Read, ToolCall, Tools, written
from art_core.engine.messages import strict_loads

_HEAD = re.compile(r"\s*<function=([^<>\s]+)>\s*")
_OPENING = "<function="
_PARAMETER = re.compile(r"\s*<parameter=([^<>\s]+)>\n?")
_VALUE_END = re.compile(r"\n?</parameter>\s{0,32}(?=<parameter=|</function>)")
"""A closing tag in a value, case 049, is one that neither a parameter nor the end follows."""
_END = re.compile(r"\s*</function>\s*</tool_call>")
_LOST = re.compile(r"</function>\s*</tool_call>|\n<parameter=([^<>\s]+)>")
"""In a value: its own end was forgotten, and it has run into what follows."""
_REFERENCES = 16
"""From one schema to another, at most: they may go in a circle."""
_LONGEST_END = 64
"""Letters before the end of what was searched that are looked at again: more than `_VALUE_END` has,
so that it is found in any portions."""


class XmlBlock:
    """One call."""

    def __init__(self, mark: str, tools: Tools) -> None:
        self._mark, self._tools = mark, tools
        self._name = ""
        self._at = self._searched = 0
        self._key: str | None = None
        self._values: dict[str, str] = {}

    def read(self, text: str, *, is_last: bool) -> Read | None:
        """As `Block.read`."""
        broken = Read(self._mark, 0, is_over=True)
        if not self._name:
            head = _HEAD.match(text)
            if head is None:
                return None if _may_open(text) and not is_last else broken
            self._name, self._at = head[1], head.end()
        while self._value(text) or self._parameter(text):
            pass
        if self._is_lost():
            return broken
        if self._key is None:
            if end := _END.match(text, self._at):
                return Read(self._call(), end.end(), is_over=True)
            if not _may_go_on(text[self._at :]):
                return broken
        return broken if is_last else None

    def _parameter(self, text: str) -> bool:
        """Go into the next parameter, if it is here."""
        found = None if self._key is not None else _PARAMETER.match(text, self._at)
        if found is None or found.end() == len(text):  # a line break may come
            return False
        self._key, self._at = found[1], found.end()
        self._searched = max(self._at - 1, 0)
        return True

    def _value(self, text: str) -> bool:
        """Go behind the value that is being read, if it is whole."""
        if self._key is None:
            return False
        found = _VALUE_END.search(text, max(self._at, self._searched - _LONGEST_END))
        self._searched = len(text)
        if found is None:
            return False
        self._values[self._key] = text[self._at : found.start()]
        self._key, self._at = None, found.end()
        return True

    def _is_lost(self) -> bool:
        """True if a value has run over its end: into another call, or another parameter."""
        found = (each for value in self._values.values() for each in _LOST.finditer(value))
        return any(each[1] is None or each[1] in self._properties for each in found)

    @property
    def _properties(self) -> Mapping[str, Any]:
        return (self._tools.get(self._name) or {}).get("properties") or {}

    def _call(self) -> ToolCall:
        of, whole = self._properties, self._tools.get(self._name) or {}
        typed = {k: _typed(text, _kinds(of.get(k), whole)) for k, text in self._values.items()}
        return ToolCall(self._name, written(typed))


def _may_open(text: str) -> bool:
    """True if `text` may become the head of a call with more text."""
    text = text.lstrip()
    return _OPENING.startswith(text) or bool(re.fullmatch(r"<function=[^<>\s]*", text))


def _may_go_on(rest: str) -> bool:
    """True if `rest` may become a parameter or the end with more text."""
    rest = rest.lstrip()
    if rest.startswith("<parameter="):
        return bool(re.fullmatch(r"<parameter=[^<>\s]*>?\n?", rest))
    if rest.startswith("</function>"):
        return "</tool_call>".startswith(rest.removeprefix("</function>").lstrip())
    return "<parameter=".startswith(rest) or "</function>".startswith(rest)


def _typed(text: str, kinds: set[str]) -> Any:
    """A value of one of these JSON types; text where it fits nothing else."""
    if "string" in kinds and not (text in ("null", "None") and "null" in kinds):
        return text
    try:
        value = strict_loads(text)
        written(value)  # 1e999 is none
    except ValueError:
        spelled = {"True": True, "False": False, "None": None}  # as the templates write them
        return spelled.get(text, text)
    return value


def _kinds(schema: Any, whole: Mapping[str, Any], depth: int = 0) -> set[str]:
    """JSON types that a value may have; "string" where the schema does not say.

    Args:
        whole: what its references point into.
        depth: references that led here.
    """
    if isinstance(schema, Mapping) and "$ref" in schema and depth < _REFERENCES:
        return _kinds(_referred(schema["$ref"], whole), whole, depth + 1)
    if not isinstance(schema, Mapping):
        return {"string"} if schema is None else set()
    listed = schema.get("type")
    kinds = set(listed) if isinstance(listed, list) else {listed} if listed else set()
    for several in ("anyOf", "oneOf", "allOf"):
        for one in schema.get(several) or ():
            kinds |= _kinds(one, whole, depth)
    values = schema.get("enum") or ([schema["const"]] if "const" in schema else [])
    if not kinds and values:
        kinds = {"string" if isinstance(value, str) else "other" for value in values}
    return kinds or {"other"}


def _referred(reference: Any, whole: Mapping[str, Any]) -> Any:
    """What a reference such as "#/$defs/Size" points to; None: nothing that is here."""
    found: Any = whole
    for part in str(reference).removeprefix("#/").split("/"):
        name = part.replace("~1", "/").replace("~0", "~")
        found = found.get(name) if isinstance(found, Mapping) else None
    return found
