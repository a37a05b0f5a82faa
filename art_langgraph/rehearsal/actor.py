"""The scripted model of a rehearsal: it explores an agent rather than serving it.

In: a chat-completions body, and the rollout it belongs to. Out: the text of an answer, tool calls
in Hermes form. Each rollout has a manner (`MANNERS`), so that a group shows what the graph does
with a thorough policy, a lazy one, a clumsy one and one that never stops. No skill is behind it.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
import threading
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from art_langgraph.rehearsal.schema_values import value_of

MANNERS = {
    "thorough": "calls each tool once, one a turn, then answers",
    "brief": "answers at once wherever it may",
    "busy": "calls all tools in one turn, then answers",
    "clumsy": "calls with wrong arguments, then a tool that is not there, then answers",
    "stubborn": "never stops calling tools",
}
"""How a rollout of a group behaves, in the order of the group."""
NO_TOOL = "no_such_tool"
_ROLLOUT = re.compile(r"rehearsal/(?P<number>\d+)/(?P<manner>[a-z]+)/")
_TURNS = 12
"""Turns in which all tools are called, several at once where there are more: a graph's recursion
limit is for what it does, not for how many tools it has."""
_ECHO = 240
"""Characters of what tools said that an answer repeats."""


@dataclass
class _Part:
    """What a rollout has done so far."""

    asked: Counter[str] = field(default_factory=Counter)
    """Turns, by what was asked for."""
    called: Counter[str] = field(default_factory=Counter)
    """Calls, by tool."""
    blunders: int = 0


def rollout_id(number: int, manner: str, run: str) -> str:
    """The id of a rollout, from which the actor knows its manner."""
    return f"rehearsal/{number}/{manner}/{run}"


def mark_of(rollout: str | None) -> str:
    """A word that this rollout alone writes into its answers: where it turns up, they went."""
    digest = hashlib.blake2b(str(rollout).encode(), digest_size=4).hexdigest()
    return f"mark-{digest}"


class Actor:
    """Answers requests. Thread-safe."""

    def __init__(self) -> None:
        self._parts: dict[str, _Part] = {}
        self._lock = threading.Lock()

    def answer(self, body: Mapping[str, Any], rollout: str | None) -> str:
        """The text of the answer, without its end of turn."""
        found = _ROLLOUT.match(rollout or "")
        manner = found["manner"] if found else "thorough"
        key = rollout if found and rollout else ""
        with self._lock:
            part = self._parts.setdefault(key, _Part()) if key else _part_in(body)
            return _Turn(body, part, manner, mark_of(rollout)).text()


class _Turn:
    """One answer being made up."""

    def __init__(self, body: Mapping[str, Any], part: _Part, manner: str, mark: str) -> None:
        self._part, self._manner, self._mark = part, manner, mark
        self._messages: Sequence[Mapping[str, Any]] = body.get("messages") or ()
        self._schema = _answer_schema(body)
        self._choice: Any = body.get("tool_choice") or "auto"
        listed = [tool["function"] for tool in body.get("tools") or ()]
        self._tools: dict[str, Mapping[str, Any]] = {tool["name"]: tool for tool in listed}
        self._parallel = body.get("parallel_tool_calls") is not False
        signature = json.dumps([[*self._tools], self._schema, str(self._choice)], sort_keys=True)
        self._turn = part.asked[signature]
        part.asked[signature] += 1

    def text(self) -> str:
        if isinstance(self._choice, Mapping):
            return self._call(self._choice["function"]["name"])
        if self._choice == "required" and self._tools:
            return self._forced()
        if self._choice != "none" and self._tools:
            called = self._free()
            if called:
                return called
        return self._final()

    def _forced(self) -> str:
        """A call, where there must be one. The last tool is often the one that ends the run."""
        names = [*self._tools]
        if self._manner == "stubborn":
            return self._call(names[0])
        if self._manner == "brief" or self._turn >= _TURNS:
            return self._call(names[-1])
        return self._call(min(names, key=lambda name: self._part.called[name]))

    def _free(self) -> str:
        """Calls, where there may be some; "" for none."""
        names = [*self._tools]
        fresh = [name for name in names if not self._part.called[name]]
        if self._manner == "brief":
            return ""
        if self._manner == "clumsy":
            return self._blunder(names)
        if self._manner == "stubborn":
            return self._call(min(names, key=lambda name: self._part.called[name]))
        if self._manner == "busy" and self._parallel:
            return "\n".join(self._call(name) for name in fresh)
        if self._turn >= _TURNS:
            return ""
        several = math.ceil(len(names) / _TURNS) if self._parallel else 1
        return "\n".join(self._call(name) for name in fresh[:several])

    def _blunder(self, names: Sequence[str]) -> str:
        self._part.blunders += 1
        if self._part.blunders == 1:
            return _written(names[0], {"wrong_argument": self._mark})
        return _written(NO_TOOL, {}) if self._part.blunders == 2 else ""

    def _call(self, name: str) -> str:
        turn = self._part.called[name]
        self._part.called[name] += 1
        tool = self._tools.get(name, {})
        schema = {"type": "object", **(tool.get("parameters") or {})}
        return _written(name, value_of(schema, self._texts(), turn=turn))

    def _final(self) -> str:
        if self._schema is not None:
            value = value_of(self._schema, [self._mark, *self._texts()], turn=self._turn)
            return json.dumps(value, ensure_ascii=False)
        told = [_text(m) for m in self._messages if m.get("role") == "tool"]
        if not told or self._manner == "brief":
            return f"I don't know. ({self._mark})"
        return f"It says: {' '.join(told)[:_ECHO]} ({self._mark})"

    def _texts(self) -> list[str]:
        asked = [_text(m) for m in self._messages if m.get("role") == "user"]
        return [asked[-1]] if asked else [self._mark]


def _part_in(body: Mapping[str, Any]) -> _Part:
    """What has been done so far, as the messages tell it: of a client that names no rollout."""
    part = _Part()
    for message in body.get("messages") or ():
        for call in message.get("tool_calls") or ():
            part.called[call["function"]["name"]] += 1
    return part


def _answer_schema(body: Mapping[str, Any]) -> dict[str, Any] | None:
    form = body.get("response_format") or {}
    if form.get("type") == "json_object":
        return {"type": "object"}
    named = form.get("json_schema") or {}
    schema = named.get("schema")
    return schema if isinstance(schema, dict) else None


def _text(message: Mapping[str, Any]) -> str:
    content = message.get("content") or ""
    if isinstance(content, str):
        return content
    parts = [part.get("text") for part in content if isinstance(part, Mapping)]
    return " ".join(text for text in parts if isinstance(text, str))


def _written(tool: str, arguments: Any) -> str:
    call = json.dumps({"name": tool, "arguments": arguments}, ensure_ascii=False)
    return f"<tool_call>\n{call}\n</tool_call>"
