"""A request of OpenAI's responses API, as the body of a chat completion.

In: the parsed body. Out: the body of the chat completion that asks the same. No answer is kept to
go on from: the whole conversation comes with each request. Settings of caches, tiers and effort
change no distribution and are ignored. Left out: checks that the chat completion makes anyway.
"""

from __future__ import annotations

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

_LOGPROBS = "message.output_text.logprobs"
_STATELESS = "Send the whole conversation as `input`; nothing is kept between requests."
_REFUSED: Refused = {
    "previous_response_id": (bool, _STATELESS),
    "conversation": (bool, _STATELESS),
    "store": (bool, "Set it to false, or leave it out; nothing is kept between requests."),
    "background": (bool, "Leave it out, or stream the answer."),
    "prompt": (bool, "Send the prompt's text as `instructions` and `input`."),
    "context_management": (bool, "Send the input that the model should read."),
    "truncation": (lambda v: v != "disabled", "Shorten the input yourself."),
    "max_tool_calls": (bool, "Leave it out; tools are run by the caller, who can count."),
    "moderation": (bool, "Leave it out."),
    "top_logprobs": (bool, "Set 0; only the sampled token's logprob is known."),
    "n": (lambda v: v != 1, "Send the request again for another answer."),
    "include": (
        lambda v: not isinstance(v, list) or bool({*map(str, v)} - {_LOGPROBS}),
        f'Only "{_LOGPROBS}" is known; thoughts are in the output as text.',
    ),
}
_NAMES = {
    "model": "model",
    "max_output_tokens": "max_completion_tokens",
    "temperature": "temperature",
    "top_p": "top_p",
    "parallel_tool_calls": "parallel_tool_calls",
    "stream": "stream",
    "seed": "seed",
    "stop": "stop",
}
"""The last two are not in OpenAI's own, and cost nothing."""


def chat_request(body: object) -> dict[str, Any]:
    """The body of the chat completion.

    Raises:
        ApiError: a field that is missing, of a wrong kind, or not supported.
    """
    fields = fields_of(body, _REFUSED)
    asked = {**renamed(fields, _NAMES), "messages": _messages(fields), **_tools(fields)}
    if _LOGPROBS in fields.get("include", ()):
        asked["logprobs"] = True
    return {**asked, **_format(fields)}


def _messages(fields: dict[str, Any]) -> list[dict[str, Any]]:
    """Items as messages: the items of one answer are one message, as it was sampled."""
    messages: list[dict[str, Any]] = []
    if "instructions" in fields:
        messages.append({"role": "system", "content": text(fields, "instructions", "")})
    given = fields.get("input")
    if isinstance(given, str):
        return [*messages, {"role": "user", "content": given}]
    for i, item in enumerate(objects(given, "input")):
        _add(messages, item, f"input.[{i}]")
    return messages


def _add(messages: list[dict[str, Any]], item: dict[str, Any], where: str) -> None:
    kind = item.get("type", "message")
    if kind == "reasoning":
        thought = "".join(
            text(part, "text", where) for part in objects(item.get("content") or [], where)
        )
        if thought:
            _answer(messages, "reasoning_content", "content", "tool_calls")["reasoning_content"] = (
                thought
            )
    elif kind == "function_call":
        function = {
            "name": text(item, "name", where),
            "arguments": text(item, "arguments", where),
        }
        call = {"id": text(item, "call_id", where), "type": "function", "function": function}
        _answer(messages).setdefault("tool_calls", []).append(call)
    elif kind == "function_call_output":
        said = _said(item.get("output"), f"{where}.output")
        call_id = text(item, "call_id", where)
        messages.append({"role": "tool", "tool_call_id": call_id, "content": said})
    elif kind == "message" and item.get("role") == "assistant":
        said = _said(item.get("content"), f"{where}.content")
        _answer(messages, "content")["content"] = said
    elif kind == "message":
        said = _said(item.get("content"), f"{where}.content")
        messages.append({"role": item.get("role"), "content": said})
    else:
        refuse_kind(
            kind,
            f"{where}.type",
            expected="message, reasoning, function_call or function_call_output",
        )


def _answer(messages: list[dict[str, Any]], *taken: str) -> dict[str, Any]:
    """The answer that an item is a part of: the last message, or a new one.

    Args:
        taken: what the message must not have yet.
    """
    last = messages[-1] if messages else {}
    if last.get("role") != "assistant" or any(last.get(name) for name in taken):
        last = {"role": "assistant", "content": None}
        messages.append(last)
    return last


def _said(content: object, where: str) -> str:
    """The text of content whose parts are all text."""
    if isinstance(content, str):
        return content
    said = []
    for j, part in enumerate(objects(content, where)):
        at, kind = f"{where}.[{j}]", part.get("type")
        if kind not in ("input_text", "output_text", "text", "refusal"):
            refuse_kind(kind, at, expected="input_text, or output_text of an answer")
        said.append(text(part, "refusal" if kind == "refusal" else "text", at))
    return "".join(said)


def _tools(fields: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    tools = []
    for i, tool in enumerate(objects(fields.get("tools", []), "tools")):
        if tool.get("type") != "function":
            where = f"tools.[{i}].type"
            refuse_kind(tool.get("type"), where, expected='"function": tools that the caller runs')
        names = ("name", "description", "parameters", "strict")
        function = {name: tool[name] for name in names if tool.get(name) is not None}
        tools.append({"type": "function", "function": function})
    if tools:
        found["tools"] = tools
    choice = fields.get("tool_choice")
    if isinstance(choice, dict) and choice.get("type") == "function":
        function = {"name": text(choice, "name", "tool_choice")}
        choice = {"type": "function", "function": function}
    if choice is not None:
        found["tool_choice"] = choice
    return found


def _format(fields: dict[str, Any]) -> dict[str, Any]:
    config = fields.get("text") or {}
    form = config.get("format") if isinstance(config, dict) else config
    if form is None:
        return {}
    if isinstance(form, dict) and form.get("type") == "json_schema":
        named = {name: value for name, value in form.items() if name != "type"}
        form = {"type": "json_schema", "json_schema": named}
    if not isinstance(form, dict):
        raise ApiError("text.format is of a wrong kind", got=form, param="text.format")
    return {"response_format": form}
