"""LangChain messages to OpenAI's shape and back, pure.

In: anything a LangGraph state may hold (strings, tuples, dicts, LangChain messages). Out: OpenAI
chat messages, or LangChain messages. `mend_tool_calls` and `mend_texts` make a history sendable:
what is sent may be mended, what was sampled stays in the call's record as it was. It leaves out
tokens.
"""

from __future__ import annotations

import functools
import json
import math
import operator
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn, TypeGuard

from langchain_core.messages import (
    AIMessage,
    BaseMessage,
    ChatMessage,
    HumanMessage,
    InvalidToolCall,
    SystemMessage,
    ToolCall,
    ToolMessage,
    convert_to_messages,
)
from langchain_core.utils.json import parse_partial_json

from art_core.types import Message, Messages

REASONING = ("reasoning_content", "reasoning")
"""The names under which servers send what a model thought."""

_NOT_SENT = frozenset(
    (
        "tool_call",
        "invalid_tool_call",
        "tool_use",
        "function_call",
        "code_interpreter_call",
        "reasoning",
        "reasoning_content",
        "thinking",
    )
)
"""Blocks of an AI message that repeat its tool calls, or hold what another model thought."""


def to_openai(messages: str | Message | BaseMessage | Sequence[Any]) -> Messages:
    """Messages in OpenAI's shape.

    Args:
        messages: one message or a sequence of them, each a string (the user's), a (role, text)
            tuple, a dict in OpenAI's or LangChain's shape, or a LangChain message.

    Raises:
        ValueError: a message of none of these kinds, or of an unknown role.
    """
    several = [messages] if isinstance(messages, str | Mapping | BaseMessage) else messages
    return [
        dict(m) if _is_openai(m) else _openai_message(convert_to_messages([m])[0]) for m in several
    ]


def to_langchain(messages: Sequence[Message]) -> list[BaseMessage]:
    """LangChain messages of OpenAI ones.

    A tool call whose arguments are no JSON object becomes an `InvalidToolCall`; reasoning text is
    kept in `additional_kwargs`.

    Raises:
        ValueError: a message of an unknown role.
    """
    return [_langchain_message(message) for message in messages]


def mend_tool_calls(messages: Sequence[Message]) -> Messages:
    """The messages with every tool call's arguments a strict JSON object.

    Servers refuse a request, and with it every later turn, for one broken string in its history.
    A cut object is closed where it was cut; one that was encoded twice is decoded; what is no
    object at all becomes {}; NaN and infinity become null. Messages without a broken call are the
    same objects as before.
    """
    return [_mended(message) for message in messages]


def strict_object(arguments: Any) -> dict[str, Any] | None:
    """Tool arguments as a dict; None if they are no JSON object. Nothing at all means {}."""
    if arguments is None or (isinstance(arguments, str) and not arguments.strip()):
        return {}
    try:
        is_text = isinstance(arguments, str)
        value = json.loads(arguments, parse_constant=_refuse) if is_text else arguments
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None


def mend_texts(messages: Sequence[Message]) -> Messages:
    """The messages with every text fit for UTF-8: a lone surrogate becomes U+FFFD, two a letter.

    File names and cut texts bring them in, by way of tools. Messages without one are the same
    objects as before.
    """
    return [_encodable(message) for message in messages]


def _encodable(value: Any) -> Any:
    if isinstance(value, str):
        return value if value.isascii() else _encodable_text(value)
    if isinstance(value, Mapping):
        made = {key: _encodable(part) for key, part in value.items()}
        return value if all(made[key] is part for key, part in value.items()) else made
    if isinstance(value, list):
        parts = [_encodable(part) for part in value]
        return value if all(map(operator.is_, parts, value)) else parts
    return value


def _encodable_text(text: str) -> str:
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return text


def _mended(message: Message) -> Message:
    calls = message.get("tool_calls")
    if not calls or all(_sendable(call) for call in calls):
        return message
    return {**message, "tool_calls": [_mended_call(call) for call in calls]}


def _sendable(call: Mapping[str, Any]) -> bool:
    arguments = call["function"]["arguments"]
    return isinstance(arguments, str) and bool(arguments) and _is_strict(arguments)


@functools.lru_cache(maxsize=4096)
def _is_strict(arguments: str) -> bool:
    """Kept, as a history is sent again at each of its turns."""
    return strict_object(arguments) is not None


def _mended_call(call: dict[str, Any]) -> dict[str, Any]:
    if _sendable(call):
        return call
    value = _without_constants(_closed(call["function"]["arguments"]))
    return {**call, "function": {**call["function"], "arguments": json.dumps(value)}}


def _closed(arguments: Any) -> dict[str, Any]:
    """The object that a broken string was about to be, or that was never spelled; else {}."""
    value = arguments
    for _ in range(2):  # it may have been encoded twice
        value = _loosely(value or "{}") if isinstance(value, str | None) else value
    return value if isinstance(value, dict) else {}


def _loosely(text: str) -> Any:
    try:
        return parse_partial_json(text)
    except (ValueError, RecursionError):
        return None


def _without_constants(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_constants(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_without_constants(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _refuse(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")


# --- to OpenAI


def _is_openai(message: Any) -> TypeGuard[Message]:
    return isinstance(message, dict) and "role" in message and "type" not in message


def _openai_message(message: BaseMessage) -> Message:
    content = _sent_content(message)
    shape: Message = {"role": _role(message), "content": content}
    if message.name:
        shape["name"] = message.name
    if isinstance(message, ToolMessage):
        shape["tool_call_id"] = message.tool_call_id
    if isinstance(message, AIMessage):
        calls = [_openai_call(c) for c in (*message.tool_calls, *message.invalid_tool_calls)]
        if calls:
            shape |= {"tool_calls": calls, "content": content or None}
        extras = message.additional_kwargs
        shape |= {key: text for key in REASONING if isinstance(text := extras.get(key), str)}
    return shape


def _sent_content(message: BaseMessage) -> str | list[Any]:
    """The content less the blocks that ChatOpenAI does not send."""
    content = message.content
    if isinstance(content, str) or not isinstance(message, AIMessage):
        return content
    return [b for b in content if not (isinstance(b, dict) and b.get("type") in _NOT_SENT)]


def _role(message: BaseMessage) -> str:
    if isinstance(message, ChatMessage):
        return message.role
    if isinstance(message, SystemMessage):
        return str(message.additional_kwargs.get("__openai_role__", "system"))
    roles = {"human": "user", "ai": "assistant", "AIMessageChunk": "assistant"}
    return roles.get(message.type, message.type)


def _openai_call(call: Mapping[str, Any]) -> dict[str, Any]:
    arguments = call["args"]
    if not isinstance(arguments, str):
        arguments = json.dumps(arguments or {}, ensure_ascii=False)
    return {
        "id": call["id"],
        "type": "function",
        "function": {"name": call["name"], "arguments": arguments},
    }


# --- to LangChain


def _langchain_message(message: Message) -> BaseMessage:
    role, content = message.get("role"), message.get("content")
    content = "" if content is None else content
    if role == "assistant":
        return _ai_message(message, content)
    if role == "user":
        return HumanMessage(content, name=message.get("name"))
    if role == "system":
        return SystemMessage(content)
    if role == "developer":
        return SystemMessage(content, additional_kwargs={"__openai_role__": "developer"})
    if role == "tool":
        return ToolMessage(content, tool_call_id=message.get("tool_call_id") or "")
    raise ValueError(
        f"unknown message role {role!r}, expected system, developer, user, assistant or tool"
    )


def _ai_message(message: Message, content: str | list[Any]) -> AIMessage:
    whole: list[ToolCall] = []
    broken: list[InvalidToolCall] = []
    for call in message.get("tool_calls") or []:
        name, raw = call["function"]["name"], call["function"].get("arguments")
        args = strict_object(raw)
        if args is None:
            broken.append(
                InvalidToolCall(
                    type="invalid_tool_call",
                    id=call.get("id"),
                    name=name,
                    args=raw,
                    error="the arguments are not a JSON object",
                )
            )
        else:
            whole.append(ToolCall(type="tool_call", id=call.get("id"), name=name, args=args))
    return AIMessage(
        content,
        name=message.get("name"),
        tool_calls=whole,
        invalid_tool_calls=broken,
        additional_kwargs={k: message[k] for k in REASONING if message.get(k)},
    )
