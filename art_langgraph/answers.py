"""A server's answer as a LangChain message, with what ChatOpenAI would bend or drop.

In: a completion or a chunk of the wire, and what ChatOpenAI makes of it. Out: the same, but a tool
call whose arguments are no JSON object is an invalid call, and the reasoning is kept in
`additional_kwargs`. An answer without a choice is the server's fault, and is said so. What was
sampled is not its business: the wire is recorded below it.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import openai
from langchain_core.messages import (
    AIMessage,
    AIMessageChunk,
    BaseMessage,
    InvalidToolCall,
    ToolCall,
)
from langchain_core.messages.ai import add_ai_message_chunks
from langchain_core.outputs import ChatResult

from art_core.errors import EngineError
from art_core.types import Messages
from art_langgraph.messages import REASONING, strict_object

_BROKEN = "the arguments are not a JSON object"


# --- whole answers


def plain_answer(response: Any) -> dict[str, Any]:
    """A completion as a dict that ChatOpenAI can read.

    It has what ChatOpenAI's own way by pydantic objects fills in: absent fields are None.
    Arguments that came as an object are spelled out.

    Args:
        response: parsed JSON, changed in place; or an object of OpenAI's client.

    Raises:
        EngineError: it has no choice, one of a strange shape, or says that something failed.
    """
    answer = response
    if isinstance(response, openai.BaseModel):
        answer = response.model_dump(exclude=_PARSED, warnings=False)
    if not isinstance(answer, dict):
        raise _no_answer(f"{response!r:.200}")
    if error := answer.get("error"):
        raise EngineError(
            f"the server answered with an error ({error})", fix="Look into the server's log."
        )
    choices = answer.get("choices")
    if not isinstance(choices, list) or not choices or not all(map(_has_message, choices)):
        raise _no_answer(choices)
    for choice in choices:
        choice.setdefault("logprobs", None)
        choice["message"]["role"] = "assistant"  # some leave it out; it can't be another
        for call in _calls_of(choice["message"]):
            function = call["function"]
            function.setdefault("name", None)
            function.setdefault("arguments", None)
            _spell_out(function)
    for name in _HEAD:
        answer.setdefault(name, None)
    usage = _sound_usage(answer.get("usage"))
    answer["usage"] = None if usage is None else {**dict.fromkeys(_DETAILS), **usage}
    return answer


def take_broken_calls(answer: Mapping[str, Any]) -> list[list[InvalidToolCall]]:
    """The broken tool calls of each choice, which are taken out of the answer.

    ChatOpenAI takes `null` and `[]` for a call without arguments, and fails on a number.
    """
    broken = []
    for choice in answer["choices"]:
        message = choice["message"]
        found = [call for call in _calls_of(message) if _is_broken(call)]
        if found:
            message["tool_calls"] = [c for c in message["tool_calls"] if c not in found]
        broken.append(
            [
                _invalid(c["function"]["name"], c["function"]["arguments"], c.get("id"))
                for c in found
            ]
        )
    return broken


_PARSED: dict[str, Any] = {"choices": {"__all__": {"message": {"parsed"}}}}
"""What of a completion is no JSON."""
_HEAD = ("id", "model", "system_fingerprint")
_DETAILS = ("completion_tokens_details", "prompt_tokens_details")
_COUNTS = ("prompt_tokens", "completion_tokens", "total_tokens")


def _no_answer(got: object) -> EngineError:
    return EngineError(
        "the server's answer has no choice with a message of a known shape",
        got=got,
        expected="a chat completion",
        fix="See that ART_BASE_URL, or the model's endpoint, is that of a model server; then "
        "look into the server's log.",
    )


def _has_message(choice: Any) -> bool:
    message = choice.get("message") if isinstance(choice, dict) else None
    return isinstance(message, dict) and _says(message) and all(map(_is_call, _calls_of(message)))


def _is_call(call: Mapping[str, Any]) -> bool:
    return isinstance(call.get("function"), dict) and _is_part(call)


def _is_part(call: Mapping[str, Any]) -> bool:
    function = call.get("function") or {}
    return isinstance(function, dict) and _has_texts(call, "id") and _has_texts(function, "name")


def _spell_out(function: dict[str, Any]) -> None:
    """Arguments that came as an object become its text, in place."""
    if isinstance(arguments := function.get("arguments"), dict | list):
        function["arguments"] = json.dumps(arguments, ensure_ascii=False)


def _says(said: Mapping[str, Any]) -> bool:
    """True if a message's, or a delta's, content and calls are what LangChain can read."""
    content, calls = said.get("content") or "", said.get("tool_calls") or []
    if isinstance(content, list) and not all(isinstance(part, str | dict) for part in content):
        return False
    is_known = isinstance(content, str | list) and isinstance(calls, list)
    old_call = said.get("function_call") or {}
    return is_known and isinstance(old_call, dict) and all(isinstance(c, dict) for c in calls)


def _has_texts(given: Mapping[str, Any], *names: str) -> bool:
    return all(isinstance(given.get(name), str | None) for name in names)


def _sound_usage(usage: Any) -> dict[str, Any] | None:
    """The token counts; None if they are no such thing: an answer is one without them."""
    if not isinstance(usage, dict):
        return None
    counts = all(isinstance(usage.get(name), int | None) for name in _COUNTS)
    return usage if counts and all(_is_detail(usage.get(name)) for name in _DETAILS) else None


def _is_detail(detail: Any) -> bool:
    return detail is None or (
        isinstance(detail, dict) and all(isinstance(n, int | None) for n in detail.values())
    )


def keep_parsed(said: BaseMessage, answer: Mapping[str, Any], response: Any) -> None:
    """Put the first choice's refusal into `additional_kwargs`, and what OpenAI's client parsed.

    Args:
        said: changed in place.
        answer: from `plain_answer`.
        response: what that was made of.
    """
    if isinstance(response, openai.BaseModel):
        message = response.choices[0].message  # type: ignore[attr-defined]  # it has been read
        if hasattr(message, "parsed"):
            said.additional_kwargs["parsed"] = message.parsed
    said.additional_kwargs["refusal"] = answer["choices"][0]["message"].get("refusal")


def keep_reasoning(said: BaseMessage, wire: Mapping[str, Any]) -> None:
    """Put what the model thought into the message's `additional_kwargs`.

    Args:
        said: changed in place.
        wire: the message or delta it was made of.
    """
    for name in REASONING:
        if isinstance(text := wire.get(name), str) and text:
            said.additional_kwargs[name] = text


def drop_reasoning(said: BaseMessage) -> None:
    """Take out again what `keep_reasoning` put in."""
    for name in REASONING:
        said.additional_kwargs.pop(name, None)


def give_back_reasoning(sent: Messages, asked: Sequence[Any]) -> Messages:
    """The messages as they are sent, with the reasoning of earlier answers beside their text.

    A server whose template shows it then renders the history as it was sampled.

    Args:
        sent: in OpenAI's shape.
        asked: the LangChain messages they were made of; none if they are something else.
    """
    if not any(isinstance(said, AIMessage) and _thought(said) for said in asked):
        return sent
    return [
        {**message, **_thought(said)} if isinstance(said, AIMessage) else message
        for message, said in zip(sent, asked, strict=True)
    ]


def _thought(said: AIMessage) -> dict[str, str]:
    kept = said.additional_kwargs
    return {name: text for name in REASONING if isinstance(text := kept.get(name), str)}


def _calls_of(message: Mapping[str, Any]) -> list[dict[str, Any]]:
    return message.get("tool_calls") or []


def _is_broken(call: Mapping[str, Any]) -> bool:
    return strict_object(call["function"]["arguments"]) is None


def _invalid(name: str | None, arguments: str | None, call_id: str | None) -> InvalidToolCall:
    return InvalidToolCall(
        type="invalid_tool_call", id=call_id, name=name, args=arguments, error=_BROKEN
    )


# --- streamed answers


def ready_choices(event: dict[str, Any]) -> list[dict[str, Any]]:
    """The choices of an event, whose absent fields become None, in place, as ChatOpenAI wants.

    Raises:
        EngineError: they have a shape that no completion has.
    """
    inner = event.get("chunk")  # where OpenAI's client parses on the way
    choices = event.get("choices") or (inner.get("choices") if isinstance(inner, dict) else None)
    event["usage"] = _sound_usage(event.get("usage"))
    if not choices:
        return []
    if not isinstance(choices, list) or not all(map(_has_delta, choices)):
        raise EngineError(
            "an event of the server's stream has a shape that no completion has",
            got=choices,
            fix="Look into the server's log.",
        )
    for choice in choices:
        delta = choice.setdefault("delta", None)
        for call in (delta or {}).get("tool_calls") or ():
            call.setdefault("index", None)
            function = call["function"] = call.get("function") or {}
            _spell_out(function)
    return choices


def _has_delta(choice: Any) -> bool:
    if not isinstance(choice, dict) or not _has_texts(choice, "finish_reason"):
        return False
    delta = choice.get("delta") or {}
    return isinstance(delta, dict) and _says(delta) and all(map(_is_text_part, _calls_of(delta)))


def _is_text_part(call: Mapping[str, Any]) -> bool:
    arguments = (call.get("function") or {}).get("arguments") if _is_part(call) else 0
    return isinstance(arguments, str | dict | list | None)


# --- those that are put together for the caller

_PARTS: ContextVar[list[AIMessageChunk] | None] = ContextVar("art_call_parts", default=None)


@contextmanager
def collected_parts() -> Iterator[list[AIMessageChunk]]:
    """Collects the chunks with parts of tool calls that `note_parts` sees inside."""
    parts: list[AIMessageChunk] = []
    token = _PARTS.set(parts)
    try:
        yield parts
    finally:
        _PARTS.reset(token)


def note_parts(chunk: BaseMessage) -> None:
    """Keep a chunk for the `collected_parts` around, if it has parts of tool calls."""
    parts = _PARTS.get()
    if parts is not None and isinstance(chunk, AIMessageChunk) and chunk.tool_call_chunks:
        parts.append(chunk)


def strict_calls(result: ChatResult, parts: Sequence[AIMessageChunk]) -> ChatResult:
    """A result put together of a stream, its broken tool calls told apart as in a plain answer.

    LangChain closes a cut object, which is right while a stream goes on, and would have the call
    run at its end.

    Args:
        result: changed in place.
        parts: every chunk of the stream that had a part of a call.
    """
    if not parts or len(result.generations) != 1:
        return result
    said = result.generations[0].message
    whole = add_ai_message_chunks(*parts).tool_call_chunks
    if isinstance(said, AIMessage) and any(strict_object(c["args"]) is None for c in whole):
        said.tool_calls, said.invalid_tool_calls = [], []
        for call in whole:
            args = strict_object(call["args"])
            if args is None:
                said.invalid_tool_calls.append(_invalid(call["name"], call["args"], call["id"]))
            else:
                said.tool_calls.append(
                    ToolCall(type="tool_call", name=call["name"] or "", args=args, id=call["id"])
                )
        _drop_blocks(said)
    return result


def _drop_blocks(said: AIMessage) -> None:
    """Take broken calls out of content in LangChain's standard form, which repeats the calls."""
    broken = {call["id"] for call in said.invalid_tool_calls}
    if isinstance(said.content, list):
        said.content = [
            block
            for block in said.content
            if isinstance(block, str)
            or block.get("type") != "tool_call"
            or block.get("id") not in broken
        ]
