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


def sound_answer(response: Any) -> Any:
    """A completion that ChatOpenAI can read: arguments that came as an object are spelled out.

    Raises:
        EngineError: it has no choice, or says that something failed.
    """
    if error := getattr(response, "error", None):
        raise EngineError(
            f"the server answered with an error ({error})", fix="Look into the server's log."
        )
    choices = getattr(response, "choices", None)
    if not choices or any(getattr(choice, "message", None) is None for choice in choices):
        raise EngineError(
            "the server's answer has no choice with a message",
            got=choices if hasattr(response, "choices") else f"{response!r:.200}",
            expected="a chat completion",
            fix="See that ART_BASE_URL, or the model's endpoint, is that of a model server; then "
            "look into the server's log.",
        )
    if not any(_spelled(call) for call in _calls_of(choices)):
        return response
    response = response.model_copy(deep=True)
    for call in _calls_of(response.choices):
        if _spelled(call):
            call.function.arguments = json.dumps(call.function.arguments, ensure_ascii=False)
    return response


def without_broken_calls(response: Any) -> tuple[Any, dict[int, list[InvalidToolCall]]]:
    """The completion less its broken tool calls, and those by the choice's place.

    ChatOpenAI takes `null` and `[]` for a call without arguments, and fails on a number.
    """
    broken = {
        place: [
            _invalid(call.function.name, call.function.arguments, call.id)
            for call in _calls_of([choice])
            if _is_broken(call)
        ]
        for place, choice in enumerate(response.choices)
    }
    broken = {place: calls for place, calls in broken.items() if calls}
    if not broken:
        return response, {}
    response = response.model_copy(deep=True)
    for place in broken:
        message = response.choices[place].message
        message.tool_calls = [c for c in message.tool_calls if not _is_broken(c)]
    return response, broken


def keep_reasoning(said: BaseMessage, wire: Any) -> None:
    """Put what the model thought into the message's `additional_kwargs`.

    Args:
        said: changed in place.
        wire: the message or delta it was made of, a mapping or an object.
    """
    thought: Mapping[str, Any] = wire if isinstance(wire, Mapping) else (wire.model_extra or {})
    for name in REASONING:
        if isinstance(text := thought.get(name), str) and text:
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


def _calls_of(choices: Sequence[Any]) -> Iterator[Any]:
    """The function calls of some choices."""
    for choice in choices:
        for call in choice.message.tool_calls or ():
            if getattr(call, "function", None) is not None:
                yield call


def _spelled(call: Any) -> bool:
    """True if a server sent the arguments as the object itself, not as its text."""
    return isinstance(call.function.arguments, dict | list)


def _is_broken(call: Any) -> bool:
    function = getattr(call, "function", None)
    return function is not None and strict_object(function.arguments) is None


def _invalid(name: str | None, arguments: str | None, call_id: str | None) -> InvalidToolCall:
    return InvalidToolCall(
        type="invalid_tool_call", id=call_id, name=name, args=arguments, error=_BROKEN
    )


# --- streamed answers that are put together for the caller

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
