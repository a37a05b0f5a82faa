"""Rows of SFT files, whatever their shape, as conversations in OpenAI's shape.

In: the object of a line. Out: a checked `Conversation` and the name of its shape: OpenAI's
fine-tuning rows, ShareGPT's, or LangChain's messages as plain dicts (`messages_to_dict`,
`model_dump`, `dumpd`) or pairs. LangChain itself is never imported.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

from art_core.sft.conversation import Conversation, check_conversation
from art_core.sft.lines import shown
from art_core.types import Message

Shape: TypeAlias = Literal["OpenAI", "ShareGPT", "LangChain"]


@dataclass(frozen=True)
class _Row:
    """Where a shape keeps what we want."""

    messages: str
    others: frozenset[str]
    """Keys beside it that are read."""


_OPENAI = _Row("messages", frozenset({"tools", "functions", "parallel_tool_calls"}))
_SHAREGPT = _Row("conversations", frozenset({"tools", "system", "id"}))
_FROM = {
    "human": "user", "user": "user", "gpt": "assistant", "assistant": "assistant",
    "chatgpt": "assistant", "bing": "assistant", "bard": "assistant", "model": "assistant",
    "system": "system", "tool": "tool", "observation": "tool", "function_response": "tool",
    "function_call": "assistant", "tool_call": "assistant",
}  # fmt: skip
"""Who speaks in ShareGPT's "from"."""
_CALLS = ("function_call", "tool_call")
_TYPES = {
    "human": "user", "HumanMessage": "user", "HumanMessageChunk": "user",
    "ai": "assistant", "AIMessage": "assistant", "AIMessageChunk": "assistant",
    "system": "system", "SystemMessage": "system", "SystemMessageChunk": "system",
    "tool": "tool", "ToolMessage": "tool", "ToolMessageChunk": "tool",
    "function": "tool", "FunctionMessage": "tool",
}  # fmt: skip
"""LangChain's "type", or the last part of a serialised class's name."""
_PAIRS = {
    "human": "user", "user": "user", "ai": "assistant", "assistant": "assistant",
    "system": "system", "developer": "system",
}  # fmt: skip


def read_row(row: Mapping[str, Any]) -> tuple[Shape, Conversation]:
    """The conversation of a row.

    Raises:
        ValueError: with the reason.
    """
    if "conversations" in row and "messages" not in row:
        return "ShareGPT", _sharegpt(row)
    messages = row.get("messages")
    if messages is None:
        keys = ", ".join(map(shown, list(row)[:8])) or "nothing"
        raise ValueError(f'has no "messages" or "conversations", but {keys}')
    if not isinstance(messages, list):
        raise ValueError(f'"messages" must be a list, not {shown(messages)}')
    is_langchain = any(map(_is_langchain, messages))
    if is_langchain:
        messages = _each(messages, _from_langchain)
    tools = row.get("tools") or row.get("functions")
    found = check_conversation(messages, tools, warnings=_unknown(row, _OPENAI))
    return ("LangChain" if is_langchain else "OpenAI"), found


def _unknown(row: Mapping[str, Any], known: _Row) -> list[str]:
    names = {known.messages, *known.others}
    return [f"unknown key {shown(key)} of the row" for key in row if key not in names]


def _each(messages: object, convert: Callable[[Any, int], Message]) -> list[Message]:
    if not isinstance(messages, list):
        raise ValueError(f"the messages must be a list, not {shown(messages)}")
    return [convert(message, i) for i, message in enumerate(messages)]


# --- ShareGPT


def _sharegpt(row: Mapping[str, Any]) -> Conversation:
    messages = _each(row["conversations"], _from_sharegpt)
    if system := row.get("system"):
        messages.insert(0, {"role": "system", "content": system})
    tools = row.get("tools")
    if isinstance(tools, str) and tools.strip():  # LLaMA-Factory keeps them as JSON text
        try:
            tools = json.loads(tools)
        except (ValueError, RecursionError):
            raise ValueError(f"tools are a text that is not JSON: {shown(tools)}") from None
    return check_conversation(messages, tools or None, warnings=_unknown(row, _SHAREGPT))


def _from_sharegpt(turn: Any, i: int) -> Message:
    if not isinstance(turn, dict):
        raise ValueError(f"message {i} must be an object, not {shown(turn)}")
    if "from" not in turn and "role" in turn:
        return turn
    speaker = turn.get("from")
    role = _FROM.get(speaker) if isinstance(speaker, str) else None
    if role is None:
        raise ValueError(f"message {i} is from {shown(speaker)}; known are {', '.join(_FROM)}")
    message: Message = {"role": role, "content": turn.get("value")}
    message |= {key: value for key, value in turn.items() if key not in ("from", "value")}
    return _with_calls(message, i) if speaker in _CALLS else message


def _with_calls(message: Message, i: int) -> Message:
    """A "function_call" turn: its text is JSON of one call, or of a list of them."""
    text = message["content"]
    try:
        calls = json.loads(text) if isinstance(text, str) else text
    except (ValueError, RecursionError):
        raise ValueError(
            f"message {i} is a function call that is not JSON: {shown(text)}"
        ) from None
    calls = calls if isinstance(calls, list) else [calls]
    return {**message, "content": "", "tool_calls": [_named(call, i) for call in calls]}


def _named(call: Any, i: int) -> dict[str, Any]:
    if not isinstance(call, dict) or "name" not in call:
        raise ValueError(f"a function call of message {i} has no name: {shown(call)}")
    names = ("arguments", "args", "parameters")
    arguments: Any = next((call[name] for name in names if call.get(name) is not None), {})
    text = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
    function = {"name": call["name"], "arguments": text}
    own_id = {"id": call["id"]} if isinstance(call.get("id"), str) else {}
    return {**own_id, "type": "function", "function": function}


# --- LangChain


def _is_langchain(message: object) -> bool:
    if isinstance(message, list):
        return len(message) == 2
    return (
        isinstance(message, dict) and "role" not in message and bool({"type", "lc"} & set(message))
    )


def _from_langchain(message: Any, i: int) -> Message:
    if isinstance(message, list):
        role = _PAIRS.get(message[0]) if isinstance(message[0], str) else None
        if len(message) != 2 or role is None:
            raise ValueError(f"message {i} is no pair of a role and a text: {shown(message)}")
        return {"role": role, "content": message[1]}
    if not isinstance(message, dict):
        raise ValueError(f"message {i} must be an object, not {shown(message)}")
    if "role" in message:
        return message
    kind, fields = _kind_and_fields(message)
    role = _TYPES.get(kind) if isinstance(kind, str) else None
    if role is None or not isinstance(fields, dict):
        raise ValueError(f"message {i} is of type {shown(kind)}, which is no message of LangChain")
    found: Message = {"role": role, "content": _text_only(fields.get("content"))}
    for key in ("name", "tool_call_id", "weight"):
        if fields.get(key) is not None:
            found[key] = fields[key]
    extra = fields.get("additional_kwargs")
    extra = extra if isinstance(extra, dict) else {}
    if role == "assistant":
        if broken := fields.get("invalid_tool_calls"):
            raise ValueError(f"message {i} has tool calls that could not be read: {shown(broken)}")
        if calls := fields.get("tool_calls"):
            if not isinstance(calls, list):
                raise ValueError(
                    f"the tool calls of message {i} must be a list, not {shown(calls)}"
                )
            found["tool_calls"] = [_named(call, i) for call in calls]
        elif calls := extra.get("tool_calls"):
            found["tool_calls"] = calls
        elif call := extra.get("function_call"):
            found["function_call"] = call
    for key in ("weight", "reasoning_content"):
        if extra.get(key) is not None:
            found.setdefault(key, extra[key])
    return found


def _kind_and_fields(message: Mapping[str, Any]) -> tuple[Any, Any]:
    """(type, fields) of the three plain forms."""
    if "lc" in message:  # dumpd
        path = message.get("id")
        return (path[-1] if isinstance(path, list) and path else None), message.get("kwargs")
    if "data" in message:  # messages_to_dict
        return message.get("type"), message["data"]
    return message.get("type"), message  # model_dump


def _text_only(content: Any) -> Any:
    """Content without the parts that only repeat an answer's tool calls."""
    if not isinstance(content, list):
        return content
    return [
        {"type": "text", "text": part} if isinstance(part, str) else part
        for part in content
        if not (isinstance(part, dict) and part.get("type") in ("tool_use", "tool_call"))
    ]
