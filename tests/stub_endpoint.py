"""A chat-completions endpoint on loopback that answers what a test tells it to.

In: answers in order, or a rule from request to answer. Out: a base URL, and the requests that came.
Real HTTP/1.1 with keep-alive, plain bodies and server-sent events, cut connections included.
"""

from __future__ import annotations

import gzip
import json
import socket
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from art_core.capture import Scope, Target, open_scope


@dataclass(frozen=True)
class Answer:
    """One response."""

    body: Any = None
    """JSON, or bytes as they are."""
    status: int = 200
    events: Sequence[Any] | None = None
    """A stream instead: JSON events, or bytes as they are."""
    headers: dict[str, str] = field(default_factory=dict)
    cut: bool = False
    """Hang up before the end."""
    compressed: bool = False
    until: threading.Event | None = None
    """Wait for it before the last event of a stream, or before a plain answer."""


@dataclass(frozen=True)
class Asked:
    """One request."""

    path: str
    headers: dict[str, str]
    """Names in lower case."""
    body: dict[str, Any]


Rule = Callable[[Asked], Answer | dict[str, Any]]


@dataclass
class Endpoint:
    """A stub while it runs."""

    base_url: str
    requests: list[Asked] = field(default_factory=list)
    came: threading.Event = field(default_factory=threading.Event)
    """Set when the first request is here."""

    def target(self, **settings: Any) -> Target:
        """A target here: model "agent@3", key "key"; `settings` replace parts of it."""
        given = {"base_url": self.base_url, "api_key": "key", "model_name": "agent@3", **settings}
        return Target(**given)

    @property
    def bodies(self) -> list[dict[str, Any]]:
        """Bodies of the requests, in order."""
        return [asked.body for asked in self.requests]


@contextmanager
def endpoint(answers: Rule | Sequence[Answer | dict[str, Any]]) -> Iterator[Endpoint]:
    """Serve on a free port of 127.0.0.1.

    Args:
        answers: in the order of requests, or a rule. A dict is the body of a 200.
    """
    stub = Endpoint("")
    lock = threading.Lock()
    left = None if callable(answers) else list(answers)

    def answer(asked: Asked) -> Answer:
        with lock:
            stub.requests.append(asked)
            stub.came.set()
            given = left.pop(0) if left is not None else None
        if given is None:
            assert callable(answers)
            given = answers(asked)
        return given if isinstance(given, Answer) else Answer(given)

    class Handler(_Handler):
        reply = staticmethod(answer)

    server = _Server(("127.0.0.1", 0), Handler)
    stub.base_url = f"http://127.0.0.1:{server.server_port}/v1"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield stub
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


@contextmanager
def recording(
    answers: Rule | Sequence[Answer | dict[str, Any]], **settings: Any
) -> Iterator[tuple[Endpoint, Scope]]:
    """An endpoint, and a scope whose calls go there; `settings` are of its target."""
    with endpoint(answers) as stub, open_scope(None, {None: stub.target(**settings)}) as scope:
        yield stub, scope


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    block_on_close = False
    request_queue_size = 512

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Say nothing of clients that hung up: tests make them do so."""
        if not isinstance(sys.exc_info()[1], ConnectionError):
            super().handle_error(request, client_address)


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    wbufsize = -1  # one write a response: Nagle would hold the second back for 40 ms
    reply: Callable[[Asked], Answer]

    def do_GET(self) -> None:
        self._answer({})

    def do_POST(self) -> None:
        raw = self.rfile.read(int(self.headers["Content-Length"]))
        self._answer(json.loads(raw))

    def _answer(self, body: dict[str, Any]) -> None:
        headers = {name.lower(): value for name, value in self.headers.items()}
        answer = type(self).reply(Asked(self.path, headers, body))
        with suppress(BrokenPipeError, ConnectionResetError):
            if answer.events is not None:
                self._stream(answer)
            else:
                self._plain(answer)
            self.wfile.flush()

    def _plain(self, answer: Answer) -> None:
        if answer.until is not None:
            answer.until.wait(5)
        raw = answer.body if isinstance(answer.body, bytes) else json.dumps(answer.body).encode()
        self.send_response(answer.status)
        if answer.compressed:
            raw = gzip.compress(raw)
            self.send_header("Content-Encoding", "gzip")
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(raw)))
        self._end_head(answer)
        self.wfile.write(raw[: len(raw) // 2] if answer.cut else raw)
        if answer.cut:
            self._hang_up()

    def _stream(self, answer: Answer) -> None:
        self.send_response(answer.status)
        self.send_header("Content-Type", "text/event-stream")
        self.send_header("Transfer-Encoding", "chunked")
        self._end_head(answer)
        events = list(answer.events or ())
        for position, event in enumerate(events):
            if answer.until is not None and position == len(events) - 1:
                answer.until.wait(5)
            raw = event if isinstance(event, bytes) else b"data: " + json.dumps(event).encode()
            raw = raw if isinstance(event, bytes) else raw + b"\n\n"
            self.wfile.write(f"{len(raw):x}\r\n".encode() + raw + b"\r\n")
            self.wfile.flush()
        if answer.cut:
            self._hang_up()
        else:
            self.wfile.write(b"0\r\n\r\n")

    def _end_head(self, answer: Answer) -> None:
        for name, value in answer.headers.items():
            self.send_header(name, value)
        self.end_headers()

    def _hang_up(self) -> None:
        self.wfile.flush()
        self.close_connection = True
        self.connection.shutdown(socket.SHUT_RDWR)

    def log_message(self, format: str, *args: Any) -> None:
        """Quiet."""


# --- bodies as vLLM sends them


def completion(
    content: str | None = "ok",
    ids: Sequence[int] | None = (1,),
    *,
    prompt_ids: Sequence[int] | None = (11, 12, 13),
    tool_calls: Sequence[dict[str, Any]] | None = None,
    finish_reason: str = "stop",
    **extras: Any,
) -> dict[str, Any]:
    """A chat completion with token data; logprobs are -0.1, -0.11, -0.12, ..."""
    message: dict[str, Any] = {"role": "assistant", "content": content}
    if tool_calls is not None:
        message["tool_calls"] = list(tool_calls)
        finish_reason = "tool_calls" if finish_reason == "stop" else finish_reason
    choice: dict[str, Any] = {"index": 0, "message": message, "finish_reason": finish_reason}
    if ids is not None:
        choice |= {"token_ids": list(ids), "logprobs": {"content": logprobs(ids)}}
    body = {
        "id": "chatcmpl-1",
        "object": "chat.completion",
        "created": 1,
        "model": "agent@3",
        "choices": [choice],
        "usage": usage(len(prompt_ids or ()), len(ids or ())),
    }
    if prompt_ids is not None:
        body["prompt_token_ids"] = list(prompt_ids)
    return {**body, **extras}


def event(
    content: str | None = None,
    ids: Sequence[int] | None = None,
    *,
    finish_reason: str | None = None,
    **extras: Any,
) -> dict[str, Any]:
    """One event of a stream."""
    delta: dict[str, Any] = {} if content is None else {"role": "assistant", "content": content}
    choice: dict[str, Any] = {"index": 0, "delta": delta, "finish_reason": finish_reason}
    if ids is not None:
        choice |= {"token_ids": list(ids), "logprobs": {"content": logprobs(ids)}}
    return {
        "id": "chatcmpl-1",
        "object": "chat.completion.chunk",
        "created": 1,
        "model": "agent@3",
        "choices": [choice],
        **extras,
    }


def streamed(content: str = "ok", ids: Sequence[int] = (1,)) -> Answer:
    """A whole stream: a letter an event, the ids with the last letter, then usage and [DONE]."""
    letters = [event(letter) for letter in content]
    letters[0]["prompt_token_ids"] = [11, 12, 13]
    letters[-1] = {**event(content[-1], ids), "prompt_token_ids": [11, 12, 13]}
    counted = {**event(), "choices": [], "usage": usage(3, len(ids))}
    return Answer(events=[*letters, event(finish_reason="stop"), counted, DONE])


def call(name: str, arguments: str = "{}", call_id: str = "c1") -> dict[str, Any]:
    """A tool call."""
    return {
        "id": call_id,
        "type": "function",
        "function": {"name": name, "arguments": arguments},
    }


def logprobs(ids: Sequence[int]) -> list[dict[str, Any]]:
    """`logprobs.content` with tokens spelled as ids."""
    return [
        {"token": f"token_id:{i}", "bytes": None, "logprob": -0.1 - n / 100, "top_logprobs": []}
        for n, i in enumerate(ids)
    ]


def usage(prompt: int, completion: int) -> dict[str, int]:
    """Token counts."""
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
    }


def refusal(status: int, message: str = "no", code: str | None = None) -> Answer:
    """An error in OpenAI's shape."""
    error = {"message": message, "type": "error", "param": None, "code": code}
    return Answer({"error": error}, status=status)


DONE = b"data: [DONE]\n\n"
