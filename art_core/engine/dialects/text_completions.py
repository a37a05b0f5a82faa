"""OpenAI's completions API: a prompt that is gone on from as it is, without a chat template.

In: the parsed body; a chat completion, or its parts as they come. Out: the body of the chat
completion with a `prompt` in place of messages; a text completion, or its events. Such a call is
recorded and trains by its ids; it is part of no conversation.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from typing import Any

from art_core.engine.api_errors import ApiError
from art_core.engine.chat_wire import DONE, KEEP_ALIVE, event
from art_core.engine.dialects.chat_parts import BrokenStream
from art_core.engine.dialects.fields import Refused, fields_of

_MAX_TOKENS = 16
"""Of a request that names no limit, as OpenAI has it."""
_REFUSED: Refused = {
    "echo": (bool, "Put the prompt in front yourself."),
    "suffix": (bool, "Put what follows into the prompt, if the model was made for that."),
    "logprobs": (
        lambda v: v is not True and v != 0,
        "Set 0; only the sampled token's logprob is known.",
    ),
    "tools": (bool, "Use /v1/chat/completions."),
    "messages": (bool, "Use /v1/chat/completions."),
}


def chat_request(body: object) -> dict[str, Any]:
    """The body of the chat completion.

    Raises:
        ApiError: a field that is missing, of a wrong kind, or not supported.
    """
    fields = fields_of(body, _REFUSED)
    prompt = fields.get("prompt")
    if isinstance(prompt, list) and len(prompt) == 1 and isinstance(prompt[0], str | list):
        prompt = prompt[0]
    is_several = isinstance(prompt, list) and any(isinstance(one, str | list) for one in prompt)
    if prompt is None or is_several:
        raise ApiError(
            "prompt is missing, or there are several",
            got=prompt,
            expected="one text, or the ids of one",
            fix="Send a request for each.",
            param="prompt",
        )
    asked = {"max_tokens": _MAX_TOKENS, **fields, "prompt": prompt}
    return {**asked, "logprobs": "logprobs" in fields}


def text_of(completion: Mapping[str, Any]) -> dict[str, Any]:
    """The body of an answer that was not streamed."""
    choices = [_choice(c, c["message"]["content"] or "", 0) for c in completion["choices"]]
    return {**_head(completion), "choices": choices, "usage": completion["usage"]}


async def text_events(
    parts: AsyncGenerator[dict[str, Any] | None, None],
) -> AsyncGenerator[bytes, None]:
    """The events of a streamed answer; a fault within it becomes an error event, and the end."""
    said: dict[int, int] = {}
    try:
        async with aclosing(parts) as told:
            async for part in told:
                if part is None:
                    yield KEEP_ALIVE
                    continue
                choices = []
                for choice in part["choices"]:
                    text, at = choice["delta"].get("content") or "", choice["index"]
                    choices.append(_choice(choice, text, said.get(at, 0)))
                    said[at] = said.get(at, 0) + len(text)
                usage = {"usage": part["usage"]} if "usage" in part else {}
                yield event({**_head(part), "choices": choices, **usage})
    except BrokenStream as broken:
        yield event({"error": dict(broken.error)})
        return
    yield DONE


def _head(part: Mapping[str, Any]) -> dict[str, Any]:
    """What is the same in every part, the extras of chat completions with it."""
    rest = {name: v for name, v in part.items() if name not in ("choices", "usage")}
    record_id = part["system_fingerprint"]
    return {**rest, "id": f"cmpl-{record_id}", "object": "text_completion"}


def _choice(choice: Mapping[str, Any], text: str, offset: int) -> dict[str, Any]:
    """A choice, or a part of one that begins `offset` letters behind the prompt."""
    rest = {n: v for n, v in choice.items() if n not in ("message", "delta", "logprobs")}
    entries = (choice.get("logprobs") or {}).get("content")
    return {**rest, "text": text, "logprobs": _logprobs(entries, offset) if entries else None}


def _logprobs(entries: Sequence[Mapping[str, Any]], offset: int) -> dict[str, Any]:
    offsets = []
    for entry in entries:
        offsets.append(offset)
        offset += len(entry["token"])
    return {
        "tokens": [entry["token"] for entry in entries],
        "token_logprobs": [entry["logprob"] for entry in entries],
        "top_logprobs": None,
        "text_offset": offsets,
    }
