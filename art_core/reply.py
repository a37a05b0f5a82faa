"""What an OpenAI-compatible server said: a plain body or a stream, put together.

In: response bytes as received. Out: a `Reply` with its choices, what it says of ids, logprobs and
usage, and what broke it. A stream is whole only if every choice has finished and it then came to
[DONE] or to its end. It leaves out judging the ids (`exchange`).
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from art_core.json_bytes import read_json

_LINE_END = re.compile(rb"\r\n|\n|\r")


@dataclass
class Choice:
    """What came of one choice."""

    index: int
    message: dict[str, Any] = field(default_factory=dict)
    finish_reason: str | None = None
    token_ids: list[Any] | None = None
    entries: list[Any] | None = None
    """`logprobs.content`, one entry a token."""
    record_id: str | None = None
    fault: str | None = None
    """What of it has a shape that no completion has; None if all is well."""
    slots: dict[int | None, int] = field(default_factory=dict)
    """Which tool call the parts of a stream with this index belong to now."""


@dataclass
class Reply:
    """What came of one exchange."""

    choices: list[Choice] = field(default_factory=list)
    policy: str | None = None
    sampling: Mapping[str, Any] | None = None
    prompt_ids: list[Any] | None = None
    prompt_fault: str | None = None
    usage: Mapping[str, Any] = field(default_factory=dict)
    error: str | None = None
    refused: bool = False
    """No answer was begun: an HTTP error, or no response at all."""
    body: Mapping[str, Any] | None = None
    """A plain body, parsed."""

    def read_extras(self, part: Mapping[str, Any]) -> None:
        """Take what a body, or one event of a stream, says of the whole exchange."""
        if isinstance(policy := part.get("art_policy"), str):
            self.policy = policy
        if isinstance(sampling := part.get("art_sampling"), Mapping):
            self.sampling = sampling
        if isinstance(usage := part.get("usage"), Mapping):
            self.usage = usage
        ids = part.get("prompt_token_ids")
        if isinstance(ids, list):
            if self.prompt_ids is not None and ids != self.prompt_ids:
                self.prompt_fault = "the stream names two different lists of prompt_token_ids"
            self.prompt_ids = ids


def read_reply(raw: bytes, status: int | None, *, streamed: bool, error: str | None) -> Reply:
    """Read a response.

    Args:
        raw: its body as received, after content decoding; whatever came before a break.
        status: HTTP status; None if no response came.
        streamed: True if `raw` is server-sent events.
        error: what broke the exchange; None if the response was read to its end. It is dropped
            where the stream had said [DONE] before.
    """
    if streamed and status is not None and status < 300:
        return _read_events(raw, error)
    return _read_body(raw, status, error)


# --- plain bodies


def _read_body(raw: bytes, status: int | None, error: str | None) -> Reply:
    body = _json(raw)
    if status is not None and status >= 300:
        return Reply(error=error or f"HTTP {status}: {_said(body, raw)}", refused=True)
    if error is not None or status is None:
        return Reply(error=error or "no response came", refused=status is None)
    if not isinstance(body, Mapping):
        return Reply(error=f"the answer is not a JSON object: {_said(None, raw)}")
    reply = Reply(body=body)
    reply.read_extras(body)
    found = (_whole_choice(part, at) for at, part in enumerate(_choices(body)))
    reply.choices = sorted(found, key=lambda choice: choice.index)
    reply.error = _body_fault(reply, body, raw)
    return reply


def _whole_choice(part: Mapping[str, Any], position: int) -> Choice:
    choice = Choice(index=_index(part, position), entries=_entries(part))
    message = part.get("message")
    if isinstance(message, Mapping):
        choice.message = dict(message)
        calls = _of_kind(choice, "tool_calls", message.get("tool_calls"), list) or []
        if not all(isinstance(call, Mapping) for call in calls):
            choice.fault = choice.fault or f"tool_calls are {calls!r:.100}, which are no calls"
        if choice.fault is not None:
            del choice.message["tool_calls"]
    else:
        choice.fault = f"message is {message!r:.100}, which no completion has"
    choice.token_ids = _of_kind(choice, "token_ids", part.get("token_ids"), list)
    _read_ending(choice, part)
    return choice


def _read_ending(choice: Choice, part: Mapping[str, Any]) -> None:
    reason = _of_kind(choice, "finish_reason", part.get("finish_reason"), str)
    record_id = _of_kind(choice, "art_record_id", part.get("art_record_id"), str)
    choice.finish_reason = reason or choice.finish_reason
    choice.record_id = record_id or choice.record_id


def _of_kind(choice: Choice, name: str, value: Any, kind: type) -> Any:
    """`value` if it is of `kind` or None; else None, and the choice has a fault."""
    if value is None or isinstance(value, kind):
        return value
    choice.fault = choice.fault or f"{name} is {value!r:.100}, which no completion has"
    return None


def _body_fault(reply: Reply, body: Mapping[str, Any], raw: bytes) -> str | None:
    if body.get("error"):
        return f"the server answered with an error: {_said(body, raw)}"
    if not reply.choices:
        return f"the answer has no choices: {_said(None, raw)}"
    return None


# --- server-sent events


def _read_events(raw: bytes, error: str | None) -> Reply:
    """Put a stream together; complete only if every choice finished, then [DONE] or the end."""
    reply = Reply()
    choices: dict[int, Choice] = {}
    done = False
    said: str | None = None
    garbled: str | None = None
    for data in events(raw):
        if data.startswith(b"[DONE]"):
            done = True
            break
        part = _json(data)
        if not isinstance(part, Mapping):
            if data.lstrip()[:1] == b"{":  # perhaps one that a break cut in two
                garbled = garbled or f"an event of the stream is not JSON: {_said(None, data)}"
            else:
                said = said or no_object(data)
            continue
        reply.read_extras(part)
        if part.get("error"):
            said = said or f"the stream ended in an error: {_said(part, data)}"
        for position, delta in enumerate(_choices(part)):
            index = _index(delta, position)
            _merge(choices.setdefault(index, Choice(index, {"role": "assistant"})), delta)
    reply.choices = [choices[index] for index in sorted(choices)]
    finished = bool(choices) and all(c.finish_reason is not None for c in reply.choices)
    if said is not None:
        reply.error = said
    elif error is not None and not (done and finished):
        reply.error = error  # an event cut in two by the break is no second fault
    elif garbled is not None:
        reply.error = garbled
    elif not finished:
        reply.error = "the stream ended without a finish_reason"
    return reply


def no_object(data: bytes) -> str:
    """What is wrong with an event's data that does not begin as a JSON object does."""
    return f"an event of the stream is no JSON object: {_said(None, data)}"


def events(raw: bytes) -> Iterator[bytes]:
    """The data of each server-sent event; the last one may lack its blank line."""
    lines: list[bytes] = []
    text = raw.removeprefix(b"\xef\xbb\xbf")
    for line in (*(_LINE_END.split(text) if b"\r" in text else text.split(b"\n")), b""):
        if not line:
            if lines:
                yield b"\n".join(lines)
            lines = []
        elif line.startswith(b"data:"):
            lines.append(line[5:].removeprefix(b" "))


def _merge(choice: Choice, part: Mapping[str, Any]) -> None:
    """Add one delta to a choice."""
    _read_ending(choice, part)
    if (ids := _of_kind(choice, "token_ids", part.get("token_ids"), list)) is not None:
        choice.token_ids = (choice.token_ids or []) + ids
    if (entries := _entries(part)) is not None:
        choice.entries = (choice.entries or []) + entries
    delta = part.get("delta")
    if not isinstance(delta, Mapping):
        return
    for key, value in delta.items():
        before = choice.message.get(key)
        if key == "tool_calls":
            for call in _of_kind(choice, key, value, list) or ():
                _merge_tool_call(choice, call)
        elif key == "role" or value is None:
            choice.message.setdefault(key, value)
        elif isinstance(value, str | list) and before:
            joined = _of_kind(choice, key, value, type(before))
            choice.message[key] = before if joined is None else before + joined
        else:
            choice.message[key] = value


def _merge_tool_call(choice: Choice, part: Any) -> None:
    """Add one part of a call."""
    if not (isinstance(part, Mapping) and isinstance(part.get("function") or {}, Mapping)):
        choice.fault = choice.fault or f"tool_calls hold {part!r:.100}, which is no call"
        return
    calls: list[dict[str, Any]] = choice.message.setdefault("tool_calls", [])
    slot = _slot(choice, part, calls)
    if slot == len(calls):
        calls.append({"id": None, "type": "function", "function": {"name": "", "arguments": ""}})
    call, said = calls[slot], part.get("function") or {}
    call["id"] = call["id"] or part.get("id")
    name = _of_kind(choice, "a tool's name", said.get("name"), str)
    if name and name != call["function"]["name"]:
        call["function"]["name"] += name
    arguments = said.get("arguments")
    if isinstance(arguments, Mapping):  # an object, where its text belongs
        arguments = json.dumps(arguments, ensure_ascii=False)
    call["function"]["arguments"] += _of_kind(choice, "arguments", arguments, str) or ""


def _slot(choice: Choice, part: Mapping[str, Any], calls: Sequence[Mapping[str, Any]]) -> int:
    """Which of the calls a part belongs to; their number, if to a new one.

    Some servers count from 1, give every call the index 0, or none at all; some repeat the id with
    every part, some give every call the same, some every part a new one. So a part under an index
    opens a call only where it names a function.
    """
    index, call_id = part.get("index"), part.get("id")
    known = index if type(index) is int else None
    slot = choice.slots.get(known, len(calls))
    if slot < len(calls) and call_id:
        call = calls[slot]
        is_other = call["id"] not in (None, call_id)
        names = bool((part.get("function") or {}).get("name"))
        if known is not None:
            is_new = is_other and names
        else:
            is_new = is_other or (names and _is_whole(call["function"]["arguments"]))
        slot = len(calls) if is_new else slot
    choice.slots[known] = slot
    return slot


def _is_whole(arguments: str) -> bool:
    return isinstance(_json(arguments.encode("utf-8", "surrogatepass")), Mapping)


# --- loose JSON


def _json(raw: bytes) -> Any:
    """Parsed JSON; None if it is none."""
    try:
        return read_json(raw)
    except (ValueError, RecursionError):  # ValueError covers wrong UTF-8
        return None


def _choices(body: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    choices = body.get("choices")
    return [c for c in choices if isinstance(c, Mapping)] if isinstance(choices, list) else []


def _index(choice: Mapping[str, Any], position: int) -> int:
    index = choice.get("index")
    return index if isinstance(index, int) else position


def _entries(choice: Mapping[str, Any]) -> list[Any] | None:
    logprobs = choice.get("logprobs")
    content = logprobs.get("content") if isinstance(logprobs, Mapping) else None
    return content if isinstance(content, list) else None


def _said(body: Any, raw: bytes) -> str:
    """What an error body says, in a line."""
    error = body.get("error") if isinstance(body, Mapping) else None
    if isinstance(error, Mapping):
        code = error.get("code")
        return f"{error.get('message')}" + (f" ({code})" if code is not None else "")
    if error:
        return str(error)
    text = raw[:200].decode("utf-8", "replace")
    return repr(text) if raw else "an empty body"
