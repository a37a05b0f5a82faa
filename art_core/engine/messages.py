"""OpenAI messages made ready for a chat template, and their identity.

In: messages as a client sent them. Out: copies in one normal form: developer is system, content
is a string, tool arguments are mappings. The stored messages are never touched. A tool call in
the history whose arguments are no JSON object is rendered as the text that it is, so that one
broken call does not poison the calls after it.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from typing import Any, NoReturn, cast

from art_core.engine.api_errors import ApiError

_ROLES = {
    "system": "system",
    "developer": "system",
    "user": "user",
    "assistant": "assistant",
    "tool": "tool",
    "function": "tool",
}


def template_messages(messages: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """`messages` in normal form; applying it twice changes nothing.

    Raises:
        ApiError: a role, a content part or a tool call that can't be rendered.
    """
    return [_normal(message, f"messages.[{i}]") for i, message in enumerate(messages)]


def thoughts_in(messages: Sequence[dict[str, Any]], field: str) -> list[dict[str, Any]]:
    """`messages` in normal form, their thoughts in the field that a template reads them from too.

    Not beside words and calls at once, which GPT-OSS's template refuses.
    """
    found = []
    for message in messages:
        thought = message.get("reasoning_content") or message.get("reasoning")
        is_full = bool(message["content"]) and "tool_calls" in message
        is_new = isinstance(thought, str) and field not in message and not is_full
        found.append({**message, field: thought} if is_new else message)
    return found


def short_ids(messages: Sequence[dict[str, Any]], letters: int) -> list[dict[str, Any]]:
    """`messages` in normal form with ids of tool calls that have so many letters and digits.

    Mistral's templates refuse others. Equal ids stay equal.
    """

    def short(call_id: object) -> str:
        return hashlib.blake2b(str(call_id).encode(), digest_size=32).hexdigest()[:letters]

    found = []
    for message in messages:
        changed = dict(message)
        if "tool_calls" in message:
            changed["tool_calls"] = [
                {**call, "id": short(call.get("id"))} for call in message["tool_calls"]
            ]
        if "tool_call_id" in message:
            changed["tool_call_id"] = short(message["tool_call_id"])
        found.append(changed)
    return found


def strict_loads(text: str) -> Any:
    """`json.loads` that takes JSON only: no NaN, no Infinity.

    Raises:
        ValueError: `text` is not JSON, nests too deep to be read, or has half a character.
    """
    try:
        value = json.loads(text, parse_constant=_no_constant)
        if "\\u" in text:
            json.dumps(value, ensure_ascii=False).encode()
        return value
    except RecursionError as error:
        raise ValueError("nested too deep") from error


def identity(message: dict[str, Any]) -> str:
    """What makes two messages in normal form the same: role, text, and calls by value.

    Spelling of JSON, ids of tool calls, and white space around the text do not count.
    """
    calls = [
        (call["function"]["name"], call["function"]["arguments"])
        for call in message.get("tool_calls", ())
    ]
    return json.dumps([message["role"], message["content"].strip(), calls], sort_keys=True)


def turn_keys(
    messages: Sequence[dict[str, Any]], tools: Sequence[dict[str, Any]] | None
) -> list[bytes]:
    """For each i a digest of `tools` and messages[0..i] (normal form)."""
    state = hashlib.blake2b(json.dumps(tools or None, sort_keys=True).encode(), digest_size=16)
    keys = []
    for message in messages:
        state.update(identity(message).encode())
        keys.append(state.digest())
    return keys


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")


def _normal(message: object, where: str) -> dict[str, Any]:
    if not isinstance(message, dict):
        raise ApiError("a message is not an object", got=message, param=where)
    role = _ROLES.get(cast(str, message.get("role")))
    if role is None:
        raise ApiError(
            "unknown message role",
            got=message.get("role"),
            expected=" or ".join(sorted(_ROLES)),
            param=f"{where}.role",
        )
    plain = {key: value for key, value in message.items() if value is not None}
    plain["role"] = role
    plain["content"] = _text(message.get("content"), f"{where}.content")
    if plain.pop("function_call", None):
        raise ApiError(
            "`function_call` in a message is not supported",
            fix="Send the call as `tool_calls`.",
            param=f"{where}.function_call",
        )
    calls = plain.pop("tool_calls", None)
    if calls:
        _add_calls(plain, calls, f"{where}.tool_calls")
    return plain


def _text(content: object, where: str) -> str:
    """Content as one string; text parts are joined as they are."""
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise ApiError(
            "message content has a wrong type",
            got=content,
            expected="a string or a list of text parts",
            param=where,
        )
    texts = []
    for i, part in enumerate(content):
        kind = part.get("type") if isinstance(part, dict) else None
        text = part.get(kind) if isinstance(kind, str) and isinstance(part, dict) else None
        if kind not in ("text", "refusal") or not isinstance(text, str):
            raise ApiError(
                f"content part of type {kind!r} is not supported"
                if kind
                else "a content part has no type",
                expected='parts of type "text": the base model reads text only',
                fix="Leave the part out, or put what it says into text.",
                param=f"{where}.[{i}]",
            )
        texts.append(text)
    return "".join(texts)


def _add_calls(plain: dict[str, Any], calls: object, where: str) -> None:
    """Put `calls` into `plain`: whole ones as mappings, broken ones as text."""
    if not isinstance(calls, list):
        raise ApiError("tool_calls is not a list", got=calls, param=where)
    whole, broken = [], []
    for i, call in enumerate(calls):
        function = call.get("function") if isinstance(call, dict) else None
        name = function.get("name") if isinstance(function, dict) else None
        if not isinstance(call, dict) or not isinstance(function, dict) or not name:
            raise ApiError("a tool call names no function", got=call, param=f"{where}.[{i}]")
        arguments = _arguments(function.get("arguments"))
        if arguments is None:
            raw = function["arguments"]
            broken.append(
                f'<tool_call>\n{{"name": {json.dumps(name)}, "arguments": {raw}}}\n</tool_call>'
            )
        else:
            whole.append({**call, "function": {**function, "arguments": arguments}})
    plain["content"] = "\n".join(filter(None, [plain["content"], *broken]))
    if whole:
        plain["tool_calls"] = whole


def _arguments(raw: object) -> dict[str, Any] | None:
    """Arguments as a mapping; an empty string means none were given; None if broken."""
    if isinstance(raw, dict):
        return raw
    if raw is None or (isinstance(raw, str) and not raw.strip()):
        return {}
    try:
        value = strict_loads(raw) if isinstance(raw, str) else None
    except ValueError:
        return None
    return value if isinstance(value, dict) else None
