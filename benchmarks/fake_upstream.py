"""A chat-completions endpoint that costs next to nothing, in a process of its own on loopback.

In: requests of a ReAct agent. Out: fixed answers, plain or streamed: a tool call until the history
holds `turns - 1` tool results, then text. Ids, logprobs and our own fields are there if they are
asked for, as a server does it; else the answer is any provider's. GET /answered tells the record
ids given out since the last time it was asked. It leaves out models: nothing is sampled.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

_TOOL_RESULT = (b'"role":"tool"', b'"role": "tool"')
_STREAM = (b'"stream":true', b'"stream": true')
_IDS = b'"return_token_ids"'
_RECORD = b"0123456789abcdef0123"
"""Stands for the record id in a fixed answer."""
_ARGUMENTS = '{"city":"Paris","unit":"celsius"}'
_TEXT = "It is mild in Paris today, with a light wind from the west. "


@contextmanager
def fake_upstream(turns: int, prompt: int, sampled: int) -> Iterator[str]:
    """Serve while the block runs; gives the base URL.

    Args:
        turns: calls of one run, the last of which is answered with text.
        prompt: prompt ids of each answer.
        sampled: sampled ids and logprobs of each answer.
    """
    arguments = [
        sys.executable,
        "-m",
        "benchmarks.fake_upstream",
        *map(str, (turns, prompt, sampled)),
    ]
    with subprocess.Popen(arguments, stdout=subprocess.PIPE, text=True) as server:
        try:
            assert server.stdout is not None
            yield f"http://127.0.0.1:{int(server.stdout.readline())}/v1"
        finally:
            server.terminate()


# --- the answers


def plain_body(*, last: bool, full: bool, prompt: int, sampled: int) -> bytes:
    """A whole completion."""
    message = {"role": "assistant", "content": _TEXT} if last else _tool_message()
    choice = {
        "index": 0,
        "message": message,
        "finish_reason": "stop" if last else "tool_calls",
        "logprobs": None,
    }
    if full:
        choice |= _tokens(0, sampled) | {"art_record_id": _RECORD.decode()}
    body = _head("chat.completion", full) | {"choices": [choice], "usage": _usage(prompt, sampled)}
    if full:
        body["prompt_token_ids"] = _ids(prompt)
    return json.dumps(body, separators=(",", ":")).encode()


def stream_body(*, last: bool, full: bool, prompt: int, sampled: int) -> bytes:
    """The same as server-sent events, one for each token."""
    pieces = _deltas(last, sampled)
    events = []
    for place, delta in enumerate(pieces):
        choice = {"index": 0, "delta": delta, "finish_reason": None, "logprobs": None}
        event = _head("chat.completion.chunk", full) | {"choices": [choice]}
        if full:
            choice |= _tokens(place, 1) | {"art_record_id": _RECORD.decode()}
            if place == 0:
                event["prompt_token_ids"] = _ids(prompt)
        events.append(event)
    ending = {"index": 0, "delta": {}, "finish_reason": "stop" if last else "tool_calls"}
    events.append(_head("chat.completion.chunk", full) | {"choices": [ending]})
    events.append(
        _head("chat.completion.chunk", full) | {"choices": [], "usage": _usage(prompt, sampled)}
    )
    told = [b"data: " + json.dumps(event, separators=(",", ":")).encode() for event in events]
    return b"\n\n".join([*told, b"data: [DONE]", b""])


def _head(kind: str, full: bool) -> dict[str, Any]:
    record = _RECORD.decode()
    head: dict[str, Any] = {
        "id": f"chatcmpl-{record}",
        "object": kind,
        "created": 1_700_000_000,
        "model": "agent",
        "system_fingerprint": record,
    }
    return head | {"art_policy": "agent@3"} if full else head


def _usage(prompt: int, sampled: int) -> dict[str, int]:
    return {
        "prompt_tokens": prompt,
        "completion_tokens": sampled,
        "total_tokens": prompt + sampled,
    }


def _tokens(begin: int, number: int) -> dict[str, Any]:
    ids = [1000 + place for place in range(begin, begin + number)]
    entries: list[dict[str, Any]] = [
        {
            "token": f" word{i}",
            "logprob": -0.0123456789 * (i % 97),
            "bytes": None,
            "top_logprobs": [],
        }
        for i in ids
    ]
    return {"token_ids": ids, "logprobs": {"content": entries}}


def _ids(number: int) -> list[int]:
    return [(7919 * place) % 49_152 for place in range(number)]


def _tool_message() -> dict[str, Any]:
    function = {"name": "weather", "arguments": _ARGUMENTS}
    call = {"id": f"call_{_RECORD.decode()}", "type": "function", "function": function}
    return {"role": "assistant", "content": None, "tool_calls": [call]}


def _deltas(last: bool, number: int) -> list[dict[str, Any]]:
    if last:
        return [{"role": "assistant", "content": "It"}, *[{"content": " is"}] * (number - 1)]
    call = dict(_tool_message()["tool_calls"][0], index=0)
    first = {"role": "assistant", "content": None}
    size = -(-len(_ARGUMENTS) // (number - 1))
    parts = [_ARGUMENTS[i * size : (i + 1) * size] for i in range(number - 1)]
    named = call | {"function": {"name": "weather", "arguments": parts[0]}}
    rest = [{"tool_calls": [{"index": 0, "function": {"arguments": p}}]} for p in parts[1:]]
    return [first, {"tool_calls": [named]}, *rest]


# --- the server


class _Connection(asyncio.Protocol):
    """One client. Requests come one after the other."""

    answers: dict[tuple[bool, bool, bool], bytes]
    """By streamed, full, last."""
    turns: int
    answered: list[str]
    numbers: Iterator[int]

    def __init__(self) -> None:
        self._part = b""

    def connection_made(self, transport: Any) -> None:
        self._transport: asyncio.WriteTransport = transport

    def data_received(self, data: bytes) -> None:
        self._part += data
        head, blank, rest = self._part.partition(b"\r\n\r\n")
        if not blank:
            return
        size = _content_length(head)
        if len(rest) < size:
            return
        self._part = rest[size:]
        if head.startswith(b"GET"):
            content, self.answered[:] = json.dumps(self.answered).encode(), []
            self._send(b"application/json", content)
        else:
            self._complete(rest[:size])

    def _complete(self, body: bytes) -> None:
        streamed = any(mark in body for mark in _STREAM)
        last = sum(map(body.count, _TOOL_RESULT)) >= self.turns - 1
        record = f"{next(self.numbers):020x}"
        self.answered.append(record)
        answer = self.answers[streamed, _IDS in body, last].replace(_RECORD, record.encode())
        self._send(b"text/event-stream" if streamed else b"application/json", answer)

    def _send(self, kind: bytes, content: bytes) -> None:
        head = b"HTTP/1.1 200 OK\r\ncontent-type: %b\r\ncontent-length: %d\r\n\r\n"
        self._transport.write(head % (kind, len(content)) + content)


def _content_length(head: bytes) -> int:
    for line in head.lower().split(b"\r\n"):
        if line.startswith(b"content-length:"):
            return int(line[15:])
    return 0


async def _serve(turns: int, prompt: int, sampled: int) -> None:
    sides = (False, True)
    _Connection.turns, _Connection.answered, _Connection.numbers = turns, [], itertools.count()
    _Connection.answers = {
        (streamed, full, last): (stream_body if streamed else plain_body)(
            last=last, full=full, prompt=prompt, sampled=sampled
        )
        for streamed in sides
        for full in sides
        for last in sides
    }
    loop = asyncio.get_running_loop()
    server = await loop.create_server(_Connection, "127.0.0.1", 0, backlog=1024)
    print(server.sockets[0].getsockname()[1], flush=True)
    await server.serve_forever()


if __name__ == "__main__":
    with suppress(KeyboardInterrupt):
        asyncio.run(_serve(*map(int, sys.argv[1:])))
