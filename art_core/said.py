"""What a message says, however it is spelled.

In: messages in OpenAI's shape, as a client sent them, a server got them or a graph gave them on.
Out: whether two say the same. Spelling of JSON, ids of tool calls, blanks around a text and parts
of it do not count; nor does it whether the system speaks as "system" or as "developer".
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from art_core.types import Message


def same_message(one: Message, other: Message) -> bool:
    """True if two messages say the same: spelling of JSON and ids of tool calls do not count."""
    return one == other or said(one) == said(other)


def said(message: Message) -> tuple[Any, ...]:
    """Role, text and tool calls of a message, without what does not count."""
    role = "system" if message.get("role") == "developer" else message.get("role")
    calls = [
        (call["function"].get("name"), _value(call["function"].get("arguments")))
        for call in message.get("tool_calls") or ()
        if isinstance(call.get("function"), Mapping)
    ]
    return role, _text(message.get("content")), calls


def _text(content: Any) -> Any:
    """Text parts joined; what is no text as it is."""
    if isinstance(content, list) and all(_is_text(part) for part in content):
        content = "".join(part if isinstance(part, str) else part["text"] for part in content)
    return content.strip() if isinstance(content, str) else content or ""


def _is_text(part: Any) -> bool:
    if isinstance(part, Mapping):
        return part.get("type") == "text" and isinstance(part.get("text"), str)
    return isinstance(part, str)


def _value(arguments: Any) -> Any:
    """Arguments as LangChain reads them: null and [] are none, raw line ends in texts are no fault.

    NaN counts as equal to NaN.
    """
    if not isinstance(arguments, str):
        return arguments or {}
    try:
        return json.loads(arguments.strip() or "{}", strict=False, parse_constant=str) or {}
    except (ValueError, RecursionError):
        return arguments
