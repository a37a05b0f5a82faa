"""What is read out of an answer: text, thoughts, calls of tools; and who reads a call.

A `Block` is what follows a mark that begins a call. In: the text after it, as it grows. Out:
`Read`, a call, or what was taken for one and stays text. Arguments are given as they were
written.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias

from art_core.engine.messages import strict_loads

SPACE = " \t\n\r"


@dataclass(frozen=True)
class ToolCall:
    """A whole call."""

    name: str
    arguments: str
    """A JSON object, spelled as the model wrote it."""


@dataclass(frozen=True)
class Thought:
    """A piece of what was thought before the answer."""

    text: str


Event: TypeAlias = str | Thought | ToolCall
Tools: TypeAlias = Mapping[str, Mapping[str, Any]]
"""Tools that may be called, by name: their parameters' JSON schema."""


@dataclass(frozen=True)
class Read:
    """The next thing in a block."""

    event: ToolCall | str | None
    """str: no call, so it stays text. None: what calls are joined by, which says nothing."""
    end: int
    """Characters that were read."""
    is_over: bool
    """The block ends here."""


class Block(Protocol):
    """Reads what follows a mark."""

    def read(self, text: str, *, is_last: bool) -> Read | None:
        """The next thing in `text`, which only grows until one was read; None: more is needed.

        Args:
            is_last: no more comes.
        """
        ...


class AnswerParser(Protocol):
    """Takes an answer apart, in any portions."""

    @property
    def tokens(self) -> frozenset[str]:
        """Special tokens that it has to see."""
        ...

    @property
    def has_limit(self) -> bool:
        """`is_full` may come true."""
        ...

    def push(self, text: str) -> Sequence[Event]:
        """What `text` completes."""
        ...

    def finish(self) -> Sequence[Event]:
        """What still waits, at the end of the text."""
        ...

    @property
    def is_full(self) -> bool:
        """As many calls were found as were to be read: nothing more counts."""
        ...


def by_name(tools: Sequence[Mapping[str, Any]]) -> Tools:
    """OpenAI's list of tools as `Tools`."""
    functions = [tool["function"] for tool in tools]
    return {function["name"]: function.get("parameters") or {} for function in functions}


def json_object(text: str) -> dict[str, Any] | None:
    """The JSON object in `text`; None if it is none."""
    try:
        value = strict_loads(text)
    except ValueError:
        return None
    return value if isinstance(value, dict) else None


def written(value: object) -> str:
    """A value as JSON, in the spelling of chat templates.

    Raises:
        ValueError: it is none, as an infinite number, or half a character.
    """
    text = json.dumps(value, ensure_ascii=False, allow_nan=False)
    text.encode()
    return text
