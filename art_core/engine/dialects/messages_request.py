"""A request of Anthropic's messages API, as the body of a chat completion.

In: the parsed body. Out: the body of the chat completion that asks the same. Settings of caches,
tiers and effort change no distribution and are ignored; so is a tool result's `is_error`, of which
chat templates know nothing. Left out: checks that the chat completion makes anyway.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

from art_core.engine.api_errors import ApiError
from art_core.engine.dialects.fields import (
    Refused,
    fields_of,
    objects,
    refuse_kind,
    renamed,
    text,
)

_REFUSED: Refused = {
    "thinking": (
        lambda v: not isinstance(v, dict) or v.get("type") not in ("disabled", "adaptive"),
        "Leave it out: a model thinks as its chat template has it.",
    ),
    "container": (bool, "Nothing is run here."),
    "mcp_servers": (bool, "Give the model tools, and call the servers yourself."),
    "context_management": (bool, "Send the messages that the model should read."),
    "prefill": (bool, "An answer is always a new message."),
}
_NAMES = {
    "model": "model",
    "max_tokens": "max_tokens",
    "temperature": "temperature",
    "top_p": "top_p",
    "top_k": "top_k",
    "stop_sequences": "stop",
    "stream": "stream",
}
_CHOICES = {"auto": "auto", "any": "required", "none": "none"}


def chat_request(body: object) -> dict[str, Any]:
    """The body of the chat completion.

    Raises:
        ApiError: a field that is missing, of a wrong kind, or not supported.
    """
    fields = fields_of(body, _REFUSED)
    if "max_tokens" not in fields:
        raise ApiError("max_tokens is missing", expected="an integer >= 1", param="max_tokens")
    return {**renamed(fields, _NAMES), **_conversation(fields), **_tools(fields), **_format(fields)}


def count_request(body: object) -> dict[str, Any]:
    """The body of the tokenize request that counts the tokens of a prompt.

    Raises:
        ApiError: as `chat_request`.
    """
    fields = fields_of(body, _REFUSED)
    tools = _tools(fields).get("tools")
    asked = {**renamed(fields, {"model": "model"}), **_conversation(fields)}
    return asked if tools is None else {**asked, "tools": tools}


def _conversation(fields: dict[str, Any]) -> dict[str, Any]:
    given = objects(fields.get("messages", []), "messages")
    if given and given[-1].get("role") == "assistant":
        raise ApiError(
            "the last message is the assistant's",
            expected="one to answer: an answer is always a new message",
            param=f"messages.[{len(given) - 1}].role",
        )
    messages = []
    if "system" in fields:
        said = _said(_blocks(fields["system"], "system"), "system")
        messages.append({"role": "system", "content": said})
    for i, message in enumerate(given):
        messages += _message(message, f"messages.[{i}]")
    return {"messages": messages}


def _message(message: dict[str, Any], where: str) -> list[dict[str, Any]]:
    """One message as one or, with results of tools in it, several."""
    role = message.get("role")
    blocks = _blocks(message.get("content"), f"{where}.content")
    if role == "assistant":
        return [_answer(blocks, f"{where}.content")]
    if role not in ("user", "system"):
        raise ApiError(
            "unknown message role", got=role, expected="user or assistant", param=f"{where}.role"
        )
    found: list[dict[str, Any]] = []
    rest = []
    for j, block in enumerate(blocks):
        if block.get("type") == "tool_result" and role == "user":
            at = f"{where}.content.[{j}]"
            result = _said(_blocks(block.get("content") or "", at), at)
            call_id = text(block, "tool_use_id", at)
            found.append({"role": "tool", "tool_call_id": call_id, "content": result})
        else:
            rest.append(block)
    if rest or not found:
        found.append({"role": role, "content": _said(rest, f"{where}.content")})
    return found


def _answer(blocks: Iterable[dict[str, Any]], where: str) -> dict[str, Any]:
    """An earlier answer, in the shape in which it was sampled: one message."""
    thoughts, said = [], []
    calls: list[dict[str, Any]] = []
    for j, block in enumerate(blocks):
        at, kind = f"{where}.[{j}]", block.get("type")
        if kind == "text":
            said.append(text(block, "text", at))
        elif kind == "thinking":
            thoughts.append(text(block, "thinking", at))
        elif kind == "tool_use":
            function = {
                "name": text(block, "name", at),
                "arguments": json.dumps(block.get("input") or {}),
            }
            call = {"id": text(block, "id", at), "type": "function", "function": function}
            calls.append(call)
        else:
            refuse_kind(kind, at, expected="text, thinking or tool_use")
    message: dict[str, Any] = {"role": "assistant", "content": "".join(said)}
    if thoughts:
        message["reasoning_content"] = "".join(thoughts)
    if calls:
        message |= {"content": message["content"] or None, "tool_calls": calls}
    return message


def _blocks(content: object, where: str) -> list[dict[str, Any]]:
    """Content as blocks; a text is one block."""
    if isinstance(content, str):
        return [{"type": "text", "text": content}]
    return objects(content, where)


def _said(blocks: Iterable[dict[str, Any]], where: str) -> str:
    """The text of blocks that are all text."""
    said = []
    for j, block in enumerate(blocks):
        if block.get("type") != "text":
            refuse_kind(block.get("type"), f"{where}.[{j}]", expected="text, which is all it reads")
        said.append(text(block, "text", f"{where}.[{j}]"))
    return "".join(said)


def _tools(fields: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    tools = []
    for i, tool in enumerate(objects(fields.get("tools", []), "tools")):
        if tool.get("type") not in (None, "custom"):
            refuse_kind(tool["type"], f"tools.[{i}].type", expected="tools that the caller runs")
        function = renamed(
            tool,
            {"name": "name", "description": "description", "input_schema": "parameters"},
        )
        tools.append({"type": "function", "function": function})
    if tools:
        found["tools"] = tools
    choice = fields.get("tool_choice")
    if choice is None:
        return found
    kind = choice.get("type") if isinstance(choice, dict) else None
    if kind == "tool":
        function = {"name": text(choice, "name", "tool_choice")}
        found["tool_choice"] = {"type": "function", "function": function}
    elif kind in _CHOICES:
        found["tool_choice"] = _CHOICES[kind]
    else:
        raise ApiError(
            "tool_choice is not supported",
            got=choice,
            expected='type "auto", "any", "tool" or "none"',
            param="tool_choice",
        )
    if choice.get("disable_parallel_tool_use"):
        found["parallel_tool_calls"] = False
    return found


def _format(fields: dict[str, Any]) -> dict[str, Any]:
    config = fields.get("output_config") or {}
    form = config.get("format") if isinstance(config, dict) else config
    if form is None:
        return {}
    schema = form.get("schema") if isinstance(form, dict) else None
    if not isinstance(schema, dict) or form.get("type") != "json_schema":
        raise ApiError(
            "output_config.format is not supported",
            got=form,
            expected='type "json_schema" with a schema',
            param="output_config.format",
        )
    named = {"name": "answer", "schema": schema}
    return {"response_format": {"type": "json_schema", "json_schema": named}}
