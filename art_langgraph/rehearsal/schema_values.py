"""A value that fits a JSON schema, for arguments and answers that nobody's model wrote.

In: a schema, and words that the conversation offers. Out: a value; with a turn, another one where
the schema leaves a choice (enums, alternatives, booleans), so that each branch comes up in time.
Cross-field rules are not solved.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

from art_langgraph.rehearsal.pattern_text import text_matching

_DEPTH = 8
"""Levels after which a recursive schema is cut to what it requires."""
_FORMATS = {
    "date": "2026-01-02",
    "date-time": "2026-01-02T03:04:05Z",
    "time": "03:04:05Z",
    "email": "ann@example.com",
    "uri": "https://example.com/",
    "uuid": "00000000-0000-4000-8000-000000000000",
    "uuid4": "00000000-0000-4000-8000-000000000000",
    "duration": "PT1H",
    "ipv4": "192.0.2.1",
    "ipv6": "2001:db8::1",
}
_NAMED = {
    "url|uri|link|href": _FORMATS["uri"],
    "mail|recipient": _FORMATS["email"],
    "date|day": _FORMATS["date"],
    "time": _FORMATS["date-time"],
}
"""What texts of such names usually are, where the schema does not say so."""
_WHOLE = re.compile(r"query|question|task|request|message|prompt|input|text|topic|content|instr")
"""Names of texts that take a whole sentence rather than a word of it."""


def value_of(
    schema: Mapping[str, Any],
    texts: Sequence[str],
    *,
    turn: int = 0,
    root: Mapping[str, Any] | None = None,
    name: str = "",
) -> Any:
    """A value that fits `schema`.

    Args:
        schema: JSON schema.
        texts: what strings are made of: the first is the sentence, words are taken out of it.
        turn: which of the possible values.
        root: where references point into; None: the schema itself.
        name: of the property that the value is for.
    """
    return _Maker(schema if root is None else root, texts, turn).make(schema, name, _DEPTH)


class _Maker:
    def __init__(self, root: Mapping[str, Any], texts: Sequence[str], turn: int) -> None:
        self._root, self._texts, self._turn = root, texts, turn
        self._words = [word for text in texts for word in telling_words(text)]

    def make(self, schema: Any, name: str, depth: int) -> Any:
        schema = self._resolved(schema)
        for key in ("enum", "anyOf", "oneOf"):
            if options := schema.get(key):
                chosen = self._choose(options, depth)
                return chosen if key == "enum" else self.make(chosen, name, depth - 1)
        if "const" in schema:
            return schema["const"]
        if parts := schema.get("allOf"):
            schema = {**schema, **_merged([self._resolved(part) for part in parts])}
        kind = schema.get("type")
        if isinstance(kind, list):
            kind = next((k for k in kind if k != "null"), "null")
        if kind is None:
            kind = "object" if "properties" in schema else "string"
        return self._of_kind(kind, schema, name, depth)

    def _of_kind(self, kind: str, schema: Mapping[str, Any], name: str, depth: int) -> Any:
        if kind == "object":
            return self._object(schema, depth)
        if kind == "array":
            return self._array(schema, name, depth)
        if kind in ("integer", "number"):
            return self._number(schema, kind)
        if kind == "boolean":
            return self._turn % 2 == 0
        return None if kind == "null" else self._string(schema, name)

    def _choose(self, options: Sequence[Any], depth: int) -> Any:
        """One of the options: each in its turn, and none that goes on for ever."""
        real = [o for o in options if not (isinstance(o, Mapping) and o.get("type") == "null")]
        if depth <= 0:
            return next((o for o in options if o not in real), options[-1]) if real else options[0]
        return (real or options)[self._turn % len(real or options)]

    def _object(self, schema: Mapping[str, Any], depth: int) -> dict[str, Any]:
        properties = schema.get("properties") or {}
        required = schema.get("required") or ()
        wanted = [
            name
            for name, part in properties.items()
            if name in required or (depth > 0 and "default" not in self._resolved(part))
        ]
        return {name: self.make(properties[name], name, depth - 1) for name in wanted}

    def _array(self, schema: Mapping[str, Any], name: str, depth: int) -> list[Any]:
        least = schema.get("minItems") or 0
        count = max(least, 0 if depth <= 0 else 1)
        fixed = schema.get("prefixItems")
        if isinstance(fixed, list):
            return [self.make(part, name, depth - 1) for part in fixed]
        items = schema.get("items")
        return [self.make(items if items else {}, name, depth - 1) for _ in range(count)]

    def _number(self, schema: Mapping[str, Any], kind: str) -> float | int:
        whole = kind == "integer"
        low, high = _bounds(schema, 1 if whole else None)
        said = [float(w) for w in self._words if re.fullmatch(r"\d{1,9}", w)]
        step = schema.get("multipleOf")
        fitting = [n for n in said if low <= n <= high and not (step and n % step)]
        value = fitting[self._turn % len(fitting)] if fitting else min(max(1.0, low), high)
        if step and not fitting:
            value = math.ceil(value / step) * step
        return int(value) if whole else value

    def _string(self, schema: Mapping[str, Any], name: str) -> str:
        if examples := schema.get("examples"):
            return str(examples[self._turn % len(examples)])
        if (fitting := self._by_pattern(schema)) is not None:
            return fitting
        if (shape := schema.get("format")) in _FORMATS:
            return _FORMATS[shape]
        usual = next((v for names, v in _NAMED.items() if re.search(names, name.lower())), None)
        if usual is not None:
            text = usual
        elif _WHOLE.search(name.lower()) or not self._words:
            text = self._texts[0] if self._texts else "something"
        else:
            text = self._words[self._turn % len(self._words)]
        text = text.ljust(schema.get("minLength") or 0, "x")
        return text[: schema.get("maxLength", len(text))]

    def _by_pattern(self, schema: Mapping[str, Any]) -> str | None:
        """What fits the schema's pattern; None if it has none, or none that can be solved."""
        pattern = schema.get("pattern")
        if not isinstance(pattern, str):
            return None
        shift = self._turn % len(self._words) if self._words else 0
        words = [*self._words[shift:], *self._words[:shift]]
        least, most = schema.get("minLength") or 0, schema.get("maxLength")
        return text_matching(pattern, words, shortest=least, longest=most)

    def _resolved(self, schema: Any) -> dict[str, Any]:
        """The schema behind a reference; what is no schema at all allows anything."""
        for _ in range(_DEPTH):
            if not isinstance(schema, Mapping):
                return {}
            reference = schema.get("$ref")
            if not isinstance(reference, str) or not reference.startswith("#"):
                break
            schema = self._at(reference)
        return dict(schema)

    def _at(self, reference: str) -> Any:
        found: Any = self._root
        for part in reference.removeprefix("#").strip("/").split("/"):
            key = part.replace("~1", "/").replace("~0", "~")
            found = found.get(key, {}) if isinstance(found, Mapping) and key else found
        return found


def telling_words(text: str) -> list[str]:
    """What a tool is likely to be asked about: what is quoted, numbers, names, then other words."""
    quoted = re.findall(r"[\"'“]([^\"'”]{1,80})[\"'”]", text)
    words = re.findall(r"[\w@.+-]*\w", text)
    coded = [w for w in words if any(c.isdigit() for c in w)]
    names = [w for w in words[1:] if w[:1].isupper() and w not in coded]
    found = [*quoted, *coded, *names] or sorted(words, key=len, reverse=True)[:3]
    return list(dict.fromkeys(found))


def _merged(parts: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The parts of an allOf as one schema."""
    merged: dict[str, Any] = {}
    for part in parts:
        properties = {**merged.get("properties", {}), **part.get("properties", {})}
        required = [*merged.get("required", ()), *part.get("required", ())]
        merged = {**merged, **part}
        if properties:
            merged |= {"properties": properties, "required": required}
    return merged


def _bounds(schema: Mapping[str, Any], step: int | None) -> tuple[float, float]:
    """The least and the greatest number that fit.

    Args:
        step: how far apart numbers are; None for fractions, which keep off an open end.
    """
    low, high = schema.get("minimum", -math.inf), schema.get("maximum", math.inf)
    over, under = schema.get("exclusiveMinimum"), schema.get("exclusiveMaximum")
    room = min(high if under is None else under, high) - max(low if over is None else over, low)
    inside = step if step is not None else min(1.0, room / 2)
    if over is not None:
        low = max(low, over + inside)
    if under is not None:
        high = min(high, under - inside)
    return low, high
