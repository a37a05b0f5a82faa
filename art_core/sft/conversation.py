"""What supervised training may learn from: a conversation in OpenAI's shape, checked.

In: messages and tools as a user or a file gives them. Out: a `Conversation`: messages that a chat
template can render, and a weight for each answer; or the reason why it is refused. Left out: the
shapes of files (shapes.py), and tokens (batch/supervised.py).
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from art_core.sft.lines import no_constant, shown
from art_core.types import Message, Messages, Tools

_ROLES = ("system", "developer", "user", "assistant", "tool", "function")
_KNOWN = {
    "role", "content", "name", "tool_calls", "tool_call_id", "weight", "refusal",
    "reasoning_content", "reasoning", "id", "function_call", "audio", "annotations",
}  # fmt: skip
"""Keys of a message that mean something, or are known to mean nothing here."""
_HEAVIEST = 1e30
"""A weight above it is no share of a loss, and a sum of such may be infinite."""
_TEXTS = ("name", "tool_call_id", "reasoning_content", "reasoning")
"""Keys that a template may put between texts, and fails on anything else."""


@dataclass(frozen=True)
class Conversation:
    """A conversation that can be rendered."""

    messages: Messages
    """Without weights."""
    tools: Tools | None
    weights: dict[int, float]
    """Of each assistant message by its index, >= 0. 0: it is context only."""
    warnings: tuple[str, ...] = ()
    """What was ignored in it."""

    @property
    def trained(self) -> list[int]:
        """Indices of the messages that have a weight above 0."""
        return [i for i, weight in self.weights.items() if weight > 0]


def check_conversation(
    messages: object, tools: object = None, *, warnings: Sequence[str] = ()
) -> Conversation:
    """The conversation that `messages` and `tools` are.

    An assistant message may have a "weight", a number from 0 on or a bool: the share of its tokens
    in the loss, 1 if not given.

    Raises:
        ValueError: with the reason; it shows at most 80 characters of a value.
    """
    if not isinstance(messages, list) or not messages:
        raise ValueError(f"messages must be a list with something in it, not {shown(messages)}")
    told = list(warnings)
    clean: Messages = []
    weights: dict[int, float] = {}
    for i, message in enumerate(messages):
        if not isinstance(message, dict):
            raise ValueError(f"message {i} must be an object, not {shown(message)}")
        role = message.get("role")
        if role not in _ROLES:
            raise ValueError(
                f"message {i} has the role {shown(role)}; known are {', '.join(_ROLES)}"
            )
        told += [f"unknown key {shown(key)} in a message" for key in message if key not in _KNOWN]
        if role == "assistant":
            weights[i] = _weight(message.get("weight"), i)
        elif message.get("weight") is not None:
            told.append(f"the weight of a {role} message; only answers are trained")
        clean.append(_checked(message, i, is_learned=weights.get(i, 0.0) > 0))
    if not weights:
        raise ValueError("no assistant message: there is no answer to learn")
    return Conversation(clean, _tools(tools), weights, tuple(dict.fromkeys(told)))


def _weight(value: object, i: int) -> float:
    if value is None:
        return 1.0
    is_number = isinstance(value, int | float)  # a bool is one: true is 1
    if not is_number or not 0 <= value <= _HEAVIEST:  # type: ignore[operator]
        raise ValueError(
            f"the weight of message {i} must be a number from 0 on, not {shown(value)}"
        )
    return float(value)  # type: ignore[arg-type]  # checked above


def _checked(message: Mapping[str, Any], i: int, *, is_learned: bool) -> Message:
    """A copy without its weight, its calls in today's form.

    An answer that is context only may be one that nobody should learn: empty, or a broken call.
    """
    clean = {key: value for key, value in message.items() if key != "weight"}
    _check_content(clean.get("content"), i)
    for key in _TEXTS:
        if not isinstance(clean.get(key), str | None):
            raise ValueError(f"the {key} of message {i} must be a text, not {shown(clean[key])}")
    old_call = clean.pop("function_call", None)
    calls = clean.get("tool_calls") or []
    if not isinstance(calls, list):
        raise ValueError(f"the tool calls of message {i} must be a list, not {shown(calls)}")
    if old_call:  # OpenAI's form of 2023
        calls = [*calls, {"id": f"call_{i}", "type": "function", "function": old_call}]
    if calls:
        if clean["role"] != "assistant":
            raise ValueError(f"message {i} of role {clean['role']} has tool calls")
        clean["tool_calls"] = [
            _call(call, i, place, is_learned=is_learned) for place, call in enumerate(calls)
        ]
    elif is_learned and not _has_text(clean.get("content")):
        raise ValueError(f"message {i} is an empty answer: neither content nor tool calls")
    return clean


def _check_content(content: object, i: int) -> None:
    if content is None or isinstance(content, str):
        return
    if not isinstance(content, list):
        raise ValueError(f"the content of message {i} must be a text, not {shown(content)}")
    for part in content:
        kind = part.get("type") if isinstance(part, dict) else None
        if kind != "text" or not isinstance(part.get("text"), str):
            raise ValueError(
                f"the content of message {i} has a part of type {shown(kind)}; only text is read"
            )


def _has_text(content: object) -> bool:
    if isinstance(content, list):
        return any(part["text"] for part in content)
    return bool(content)


def _call(call: object, i: int, place: int, *, is_learned: bool) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, dict) else None
    name = function.get("name") if isinstance(function, dict) else None
    if not isinstance(call, dict) or not isinstance(function, dict) or not _is_name(name):
        raise ValueError(f"tool call {place} of message {i} names no function: {shown(call)}")
    if is_learned:
        _check_arguments(function.get("arguments"), f"tool call {place} of message {i}")
    return {"id": f"call_{i}_{place}", "type": "function", **call}


def _is_name(value: object) -> bool:
    return isinstance(value, str) and bool(value)


def _check_arguments(arguments: object, where: str) -> None:
    """Refuse what a template would be given as text, not as a call; blanks are no fault."""
    value = arguments
    if arguments is None or (isinstance(arguments, str) and not arguments.strip()):
        return
    if isinstance(arguments, str):
        try:
            value = json.loads(arguments, parse_constant=no_constant)
        except (ValueError, RecursionError):
            raise ValueError(f"the arguments of {where} are not JSON: {shown(arguments)}") from None
    if not isinstance(value, dict):
        raise ValueError(f"the arguments of {where} must be an object, not {shown(arguments)}")


def _tools(tools: object) -> Tools | None:
    """Tools in OpenAI's form; a bare function is put into it."""
    if not tools:
        return None
    if not isinstance(tools, list):
        raise ValueError(f"tools must be a list, not {shown(tools)}")
    found = []
    for place, tool in enumerate(tools):
        function = tool.get("function", tool) if isinstance(tool, dict) else None
        if not isinstance(function, dict) or not _is_name(function.get("name")):
            raise ValueError(f"tool {place} has no name: {shown(tool)}")
        parameters = function.get("parameters")
        if parameters is not None and not isinstance(parameters, dict):
            raise ValueError(f"the parameters of tool {place} must be a JSON schema object")
        found.append(tool if "function" in tool else {"type": "function", "function": tool})
    return found
