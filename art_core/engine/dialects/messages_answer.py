"""Answers in the shape of Anthropic's messages API, plain and streamed.

In: a chat completion, or its parts as they come. Out: a message; or the events of one. The extras
`art_record_id` and `art_policy` stand beside the message's own fields.
"""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing
from typing import Any

from art_core.engine.api_errors import error_response
from art_core.engine.dialects.chat_parts import BrokenStream, named_event

_PING = named_event("ping", {})
_KINDS = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
}


def message_of(completion: Mapping[str, Any]) -> dict[str, Any]:
    """The body of an answer that was not streamed."""
    [choice] = completion["choices"]
    said = choice["message"]
    content: list[dict[str, Any]] = []
    if said.get("reasoning_content"):
        thought = said["reasoning_content"]
        content.append({"type": "thinking", "thinking": thought, "signature": ""})
    if said.get("content"):
        content.append({"type": "text", "text": said["content"]})
    calls = said.get("tool_calls") or ()
    content += [{**_tool_use(call), "input": _input(call)} for call in calls]
    return {
        **_head(completion),
        "content": content,
        **_ending(choice),
        "usage": _usage(completion["usage"]),
    }


def error_of(error: Exception) -> tuple[int, dict[str, Any]]:
    """HTTP status and body for `error`."""
    status, body = error_response(error)
    kind = _KINDS.get(status, "api_error")
    return status, _error(kind, body["error"]["message"])


async def message_events(
    parts: AsyncGenerator[dict[str, Any] | None, None],
) -> AsyncGenerator[bytes, None]:
    """The events of a streamed answer; a fault within it becomes an error event, and the end."""
    blocks, ending, usage = _Blocks(), dict[str, Any](), dict[str, Any]()
    is_open = False
    try:
        async with aclosing(parts) as told:
            async for part in told:
                if part is None:
                    yield _PING
                    continue
                if not is_open:
                    is_open = True
                    yield named_event("message_start", {"message": _opening(part)})
                usage = part.get("usage") or usage
                for choice in part["choices"]:
                    for event in blocks.events(choice["delta"]):
                        yield event
                    if choice["finish_reason"] is not None:
                        ending = _ending(choice)
    except BrokenStream as broken:
        yield named_event("error", _error("api_error", str(broken)))
        return
    for event in blocks.close():
        yield event
    yield named_event("message_delta", {"delta": ending, "usage": _usage(usage)})
    yield named_event("message_stop", {})


class _Blocks:
    """The blocks of a streamed answer; one is open at a time."""

    def __init__(self) -> None:
        self._index, self._kind = -1, ""

    def events(self, delta: Mapping[str, Any]) -> list[bytes]:
        """What one delta adds."""
        found: list[bytes] = []
        if thought := delta.get("reasoning_content"):
            found += self._open("thinking", {"thinking": "", "signature": ""})
            found.append(self._delta("thinking_delta", thinking=thought))
        if said := delta.get("content"):
            found += self._open("text", {"text": ""})
            found.append(self._delta("text_delta", text=said))
        for call in delta.get("tool_calls") or ():
            found += self.close()
            found += self._open("tool_use", {**_tool_use(call), "input": {}})
            arguments = json.dumps(_input(call))
            found.append(self._delta("input_json_delta", partial_json=arguments))
            found += self.close()
        return found

    def close(self) -> list[bytes]:
        """The end of the block that is open, if one is."""
        if not self._kind:
            return []
        self._kind = ""
        return [named_event("content_block_stop", {"index": self._index})]

    def _open(self, kind: str, block: Mapping[str, Any]) -> list[bytes]:
        if kind == self._kind:
            return []
        found = self.close()
        self._index, self._kind = self._index + 1, kind
        start = {"index": self._index, "content_block": {"type": kind, **block}}
        return [*found, named_event("content_block_start", start)]

    def _delta(self, kind: str, **added: str) -> bytes:
        told = {"index": self._index, "delta": {"type": kind, **added}}
        return named_event("content_block_delta", told)


def _head(part: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "id": f"msg_{part['system_fingerprint']}",
        "type": "message",
        "role": "assistant",
        "model": part["model"],
        "art_record_id": part["system_fingerprint"],
        "art_policy": part["art_policy"],
    }


def _opening(part: Mapping[str, Any]) -> dict[str, Any]:
    """A message of which nothing is known yet; its usage comes with its end."""
    usage = {"input_tokens": 0, "output_tokens": 0}
    nothing: dict[str, Any] = {"content": [], "stop_reason": None, "stop_sequence": None}
    return {**_head(part), **nothing, "usage": usage}


def _tool_use(call: Mapping[str, Any]) -> dict[str, Any]:
    return {"type": "tool_use", "id": call["id"], "name": call["function"]["name"]}


def _input(call: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments as an object, which the API wants whatever a model said."""
    try:
        value = json.loads(call["function"]["arguments"] or "{}")
    except ValueError:
        return {}
    return value if isinstance(value, dict) else {}


def _ending(choice: Mapping[str, Any]) -> dict[str, Any]:
    stop = choice.get("stop_reason")
    reasons = {"tool_calls": "tool_use", "length": "max_tokens"}
    plain = "end_turn" if stop is None else "stop_sequence"
    return {
        "stop_reason": reasons.get(choice["finish_reason"], plain),
        "stop_sequence": stop,
    }


def _usage(usage: Mapping[str, Any]) -> dict[str, int]:
    """Here prompt tokens out of a cache are not counted among those that were read."""
    cached = usage["prompt_tokens_details"]["cached_tokens"]
    return {
        "input_tokens": usage["prompt_tokens"] - cached,
        "cache_read_input_tokens": cached,
        "output_tokens": usage["completion_tokens"],
    }


def _error(kind: str, message: str) -> dict[str, Any]:
    return {"type": "error", "error": {"type": kind, "message": message}}
