"""Answers in the shape of OpenAI's responses API, plain and streamed.

In: the request, and a chat completion or its parts as they come. Out: a response; or the events of
one. The extras `art_record_id` and `art_policy` stand beside the response's own fields.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from typing import Any

from art_core.engine.chat_wire import KEEP_ALIVE
from art_core.engine.dialects.chat_parts import BrokenStream, named_event

_ECHOED: dict[str, Any] = {
    "instructions": None,
    "max_output_tokens": None,
    "metadata": {},
    "parallel_tool_calls": True,
    "reasoning": None,
    "temperature": None,
    "text": {"format": {"type": "text"}},
    "tool_choice": "auto",
    "tools": [],
    "top_p": None,
}
"""What a response repeats of its request, and what it says where the request says nothing."""


def response_of(request: Mapping[str, Any], completion: Mapping[str, Any]) -> dict[str, Any]:
    """The body of an answer that was not streamed."""
    [choice] = completion["choices"]
    items = _Items(completion["system_fingerprint"])
    items.events(choice["message"], _logprobs(choice))
    items.close(choice["finish_reason"])
    return _response(request, completion, items.done, choice["finish_reason"], completion["usage"])


async def response_events(
    request: Mapping[str, Any], parts: AsyncGenerator[dict[str, Any] | None, None]
) -> AsyncGenerator[bytes, None]:
    """The events of a streamed answer; a fault within it becomes an error event, and the end."""
    number = 0
    items: _Items | None = None
    head: Mapping[str, Any] = {}
    finish, usage = None, None

    def numbered(kind: str, data: Mapping[str, Any]) -> bytes:
        nonlocal number
        number += 1
        return named_event(kind, {"sequence_number": number - 1, **data})

    try:
        async with aclosing(parts) as told:
            async for part in told:
                if part is None:
                    yield KEEP_ALIVE
                    continue
                if items is None:
                    head, items = part, _Items(part["system_fingerprint"])
                    begun = {"response": _response(request, head, [], None, None)}
                    yield numbered("response.created", begun)
                    yield numbered("response.in_progress", begun)
                usage = part.get("usage") or usage
                for choice in part["choices"]:
                    finish = choice["finish_reason"] or finish
                    for kind, data in items.events(choice["delta"], _logprobs(choice)):
                        yield numbered(kind, data)
    except BrokenStream as broken:
        fault = {"code": broken.error.get("code"), "message": str(broken), "param": None}
        yield numbered("error", {**fault, "error": broken.error})  # which OpenAI's client raises
        return
    assert items is not None  # a stream without a part has no end either
    for kind, data in items.close(finish):
        yield numbered(kind, data)
    response = _response(request, head, items.done, finish, usage)
    yield numbered(f"response.{response['status']}", {"response": response})


_Event = tuple[str, dict[str, Any]]


class _Items:
    """The items of an answer: thoughts, what was said, and calls, in the order they came.

    Each is put together part by part, also where all of it comes at once.
    """

    def __init__(self, record_id: str) -> None:
        self.done: list[dict[str, Any]] = []
        self._record_id = record_id
        self._open: dict[str, dict[str, Any]] = {}

    def events(self, delta: Mapping[str, Any], logprobs: Sequence[Any]) -> list[_Event]:
        """What one delta adds, or a whole message."""
        found: list[_Event] = []
        if thought := delta.get("reasoning_content"):
            found += self._say("reasoning", "rs", "reasoning_text", thought, [])
        if said := delta.get("content"):
            found += self._say("message", "msg", "output_text", said, logprobs)
        for call in delta.get("tool_calls") or ():
            found += self._call(call)
        return found

    def close(self, finish: str | None) -> list[_Event]:
        """The end of what is open; an answer that said nothing has an empty message."""
        found: list[_Event] = []
        if not self.done:
            found += self._begin("message", "msg", "output_text")
        for kind, item in self._open.items():
            at = self._at(item, content_index=0)
            [part] = item["content"]
            said = {"text": part["text"]}
            if kind == "message":
                said["logprobs"] = part["logprobs"]
            item["status"] = "incomplete" if finish == "length" else "completed"
            found += [
                (f"response.{part['type']}.done", {**at, **said}),
                ("response.content_part.done", {**at, "part": part}),
                ("response.output_item.done", {"output_index": at["output_index"], "item": item}),
            ]
        return found

    def _say(
        self, kind: str, prefix: str, part_kind: str, added: str, logprobs: Sequence[Any]
    ) -> list[_Event]:
        found = [] if kind in self._open else self._begin(kind, prefix, part_kind)
        item = self._open[kind]
        [part] = item["content"]
        part["text"] += added
        told: dict[str, Any] = {**self._at(item, content_index=0), "delta": added}
        if kind == "message":
            part["logprobs"] += logprobs
            told["logprobs"] = [*logprobs]
        return [*found, (f"response.{part_kind}.delta", told)]

    def _begin(self, kind: str, prefix: str, part_kind: str) -> list[_Event]:
        item: dict[str, Any] = {
            "id": f"{prefix}_{self._record_id}",
            "type": kind,
            "status": "in_progress",
            "content": [],
            **({"role": "assistant"} if kind == "message" else {"summary": []}),
        }

        def empty() -> dict[str, Any]:
            extra: dict[str, Any] = {"annotations": [], "logprobs": []} if kind == "message" else {}
            return {"type": part_kind, "text": "", **extra}

        self.done.append(item)
        at = self._at(item, content_index=0)
        found: list[_Event] = [
            ("response.output_item.added", {"output_index": at["output_index"], "item": {**item}}),
            ("response.content_part.added", {**at, "part": empty()}),
        ]
        item["content"] = [empty()]
        self._open[kind] = item
        return found

    def _call(self, call: Mapping[str, Any]) -> list[_Event]:
        """A call, which comes whole."""
        function = call["function"]
        item = {
            "id": f"fc_{call['id']}",
            "type": "function_call",
            "status": "completed",
            "call_id": call["id"],
            "name": function["name"],
            "arguments": function["arguments"],
        }
        self.done.append(item)
        at, arguments = self._at(item), function["arguments"]
        place = {"output_index": at["output_index"]}
        empty = {**item, "status": "in_progress", "arguments": ""}
        kind = "response.function_call_arguments"
        return [
            ("response.output_item.added", {**place, "item": empty}),
            (f"{kind}.delta", {**at, "delta": arguments}),
            (f"{kind}.done", {**at, "name": function["name"], "arguments": arguments}),
            ("response.output_item.done", {**place, "item": item}),
        ]

    def _at(self, item: Mapping[str, Any], **more: int) -> dict[str, Any]:
        place = next(i for i, one in enumerate(self.done) if one is item)
        return {"item_id": item["id"], "output_index": place, **more}


def _logprobs(choice: Mapping[str, Any]) -> list[Any]:
    return (choice.get("logprobs") or {}).get("content") or []


def _response(
    request: Mapping[str, Any],
    part: Mapping[str, Any],
    items: Sequence[Mapping[str, Any]],
    finish: str | None,
    usage: Mapping[str, Any] | None,
) -> dict[str, Any]:
    """A response; without a finish reason it is under way."""
    echoed = {n: v if request.get(n) is None else request[n] for n, v in _ECHOED.items()}
    status = "in_progress" if finish is None else "completed"
    if finish == "length":
        status = "incomplete"
    return {
        "id": f"resp_{part['system_fingerprint']}",
        "object": "response",
        "created_at": part["created"],
        "model": part["model"],
        "status": status,
        "output": list(items),
        "error": None,
        "incomplete_details": {"reason": "max_output_tokens"} if finish == "length" else None,
        "previous_response_id": None,
        "store": False,
        "truncation": "disabled",
        "usage": None if usage is None else _usage(usage),
        "art_record_id": part["system_fingerprint"],
        "art_policy": part["art_policy"],
        **echoed,
    }


def _usage(usage: Mapping[str, Any]) -> dict[str, Any]:
    cached = usage["prompt_tokens_details"]["cached_tokens"]
    return {
        "input_tokens": usage["prompt_tokens"],
        "input_tokens_details": {"cached_tokens": cached, "cache_write_tokens": 0},
        "output_tokens": usage["completion_tokens"],
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": usage["total_tokens"],
    }
