"""HttpBackend against what stands before a server, and against a server that is late.

Each answer is written down, so that those can be had which our server never gives: a proxy's page,
a redirect, an event stream that ends at once. What is sent again, and when, is in test_http.py.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Event, Thread
from typing import Any

import pytest

import art_core as art
from art_core.errors import (
    BadAnswer,
    ConfigError,
)
from art_core.wire import protocol as wire

KEY = "k-secret-1"
Answer = tuple[int, dict[str, str], bytes]


@dataclass
class Stand:
    """A server that answers as it is told."""

    answer: Callable[[str, str], Answer]
    """Of method and path with its query."""
    url: str = ""
    asked: list[tuple[float, str, str]] = field(default_factory=list)
    """(monotonic seconds, method, path)."""

    def count(self, part: str) -> int:
        return sum(part in f"{method} {path}" for _, method, path in self.asked)


@contextmanager
def standing(answer: Callable[[str, str], Answer]) -> Iterator[Stand]:
    stand = Stand(answer)
    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(_Handler, stand))
    server.daemon_threads = True
    stand.url = f"http://127.0.0.1:{server.server_port}"
    thread = Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield stand
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


class _Handler(BaseHTTPRequestHandler):
    def __init__(self, stand: Stand, *args: Any) -> None:
        self.stand = stand
        super().__init__(*args)

    def do_GET(self) -> None:
        while self.headers.get("transfer-encoding") and self._chunk():
            pass
        self.rfile.read(int(self.headers.get("content-length", 0)))
        self.stand.asked.append((time.monotonic(), self.command, self.path))
        status, headers, body = self.stand.answer(self.command, self.path)
        self.send_response(status)
        for name, value in {"content-length": str(len(body)), **headers}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)

    def do_POST(self) -> None:
        self.do_GET()

    def _chunk(self) -> int:
        size = int(self.rfile.readline(), 16)
        self.rfile.read(size + 2)
        return size

    def log_message(self, format: str, *args: Any) -> None:
        """Says nothing."""


def told(value: Any, status: int = 200) -> Answer:
    return status, {"content-type": "application/json"}, json.dumps(value).encode()


def job(state: str, **more: Any) -> dict[str, Any]:
    known = {"id": "j", "kind": "train", "project": "p", "name": "m", "state": state, "created": 1}
    return {"job": {**known, **more}}


def model() -> art.TrainableModel[Any]:
    return art.TrainableModel(name="m", project="p", base_model="b")


GROUPS = [art.TrajectoryGroup([art.Trajectory(reward=1.0)])]
RESULT = {"step": 1, "trained": True, "metrics": {}, "skipped": [], "reason": None}


# --- what is no server of ours


@pytest.mark.parametrize(
    "answer",
    [
        (200, {"content-type": "text/html"}, b"<html>Sign in</html>"),
        (403, {"content-type": "text/html"}, b"<html>Forbidden</html>"),
        (200, {"content-type": "application/json"}, b"[" * 20000),
        (302, {"location": "https://login.example/"}, b""),
    ],
)
async def test_a_proxys_page_is_told(answer: Answer) -> None:
    """A redirect too: it may lead the key elsewhere; and a log that nobody took is no log."""
    with standing(lambda *_: answer) as stand:
        backend = art.HttpBackend(stand.url, keep_log=False)
        with pytest.raises(BadAnswer):
            await backend.register(model())
        if answer[0] != 200:
            with pytest.raises(BadAnswer):
                await backend.log(model(), GROUPS, split="val")


async def test_a_page_instead_of_a_registered_model_is_told() -> None:
    def answer(method: str, path: str) -> Answer:
        version = {"version": "1", "wire": wire.WIRE}
        return told(version) if path == wire.VERSION else (200, {}, b"<html>")

    with standing(answer) as stand:
        with pytest.raises(BadAnswer):
            await art.HttpBackend(stand.url).register(model())


# --- the key


async def test_the_key_is_in_no_repr_and_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def answer(method: str, path: str) -> Answer:
        if path == wire.VERSION:
            return told({"version": "1", "wire": wire.WIRE})
        return told({"model_name": "m", "step": 0})

    with standing(answer) as stand:
        backend = art.HttpBackend(stand.url, api_key=f" {KEY}\n")  # as a file has it
        inference = await backend.register(model())
    assert inference.api_key == KEY
    assert KEY not in repr((backend, inference, vars(backend)))
    for key in (f"{KEY}\nx: y", f"{KEY}é", "   "):
        with pytest.raises(ConfigError) as caught:
            art.HttpBackend(stand.url, api_key=key)
        assert KEY not in str(caught.value)
    for url in (f"http://me:{KEY}@127.0.0.1:1", f"ftp://me:{KEY}@127.0.0.1:1"):
        with pytest.raises(ConfigError) as caught:
            art.HttpBackend(url)
        assert KEY not in str(caught.value)
    with pytest.raises(ConfigError):
        art.HttpBackend("http://127.0.0.1:port")


# --- jobs


async def test_a_job_is_cancelled_whose_answer_had_not_come_yet() -> None:
    """The server took the job, and its caller left before it was told so."""
    arrived, cancelled = Event(), Event()

    def answer(method: str, path: str) -> Answer:
        if path.endswith("/train"):
            arrived.set()
            cancelled.wait(5.0)  # the answer is late
            return told(job("queued"), 202)
        if path.startswith(f"{wire.JOBS}?"):
            return told({"jobs": [job("queued")["job"]]})
        if path.endswith("/cancel"):
            cancelled.set()
        return told(job("cancelled"))

    with standing(answer) as stand:
        backend = art.HttpBackend(stand.url, keep_log=False, show_progress=False)
        training = asyncio.create_task(backend.train(model(), GROUPS, art.TrainConfig()))
        await asyncio.to_thread(arrived.wait, 5.0)
        training.cancel()
        with pytest.raises(asyncio.CancelledError):
            await training
        assert cancelled.is_set()
    assert stand.count("POST /api/jobs/j/cancel") == 1
    key = next(path for _, _, path in stand.asked if "?" in path).partition("key=")[2]
    assert len(key) == 32


async def test_a_stream_of_events_that_a_proxy_ends_at_once_is_no_busy_loop() -> None:
    begun = time.monotonic()

    def answer(method: str, path: str) -> Answer:
        if path.endswith("/train"):
            return told(job("queued"), 202)
        if path.endswith("/events"):
            return 200, {"content-type": "text/event-stream"}, b""
        over = time.monotonic() - begun > 1.5
        return told(job("done", result=RESULT) if over else job("running"))

    with standing(answer) as stand:
        backend = art.HttpBackend(stand.url, keep_log=False, show_progress=False)
        result = await backend.train(model(), GROUPS, art.TrainConfig())
    assert result.step == 1
    assert stand.count("/events") <= 4  # one a second, and the first two


async def test_an_event_may_hold_any_separator() -> None:
    """Only line feeds and carriage returns end a line of an event stream (case 069)."""
    event = {"id": 1, "kind": "progress", "text": "a\u2028b\x0bc\x85d", "progress": {"done": 3}}
    stream = f": ping\r\nid: 1\r\ndata:{json.dumps(event, ensure_ascii=False)}\r\n\r\n".encode()

    def answer(method: str, path: str) -> Answer:
        if path.endswith("/train"):
            return told(job("queued"), 202)
        if path.endswith("/events"):
            return 200, {"content-type": "text/event-stream"}, stream
        return told(job("done", result=RESULT))

    with standing(answer) as stand:
        backend = art.HttpBackend(stand.url, keep_log=False, show_progress=False)
        assert (await backend.train(model(), GROUPS, art.TrainConfig())).step == 1


async def test_an_answer_cut_in_its_middle_is_asked_for_again() -> None:
    def answer(method: str, path: str) -> Answer:
        status, headers, body = told({"checkpoints": []})
        cut = {"content-length": "100"} if len(stand.asked) == 1 else {}
        return status, {**headers, **cut}, body

    with standing(answer) as stand:
        assert await art.HttpBackend(stand.url).checkpoints(model()) == []
    assert len(stand.asked) == 2
