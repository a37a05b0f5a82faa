"""How a server is asked: what is sent again, after how long, and what is said in the end.

Against a server of a few lines on loopback, which answers by a script.
"""

from __future__ import annotations

import asyncio
import email.utils
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from typing import Any

import pytest

import art_core as art
from art_core.client import http
from art_core.client.http import Http
from art_core.errors import (
    ARTError,
    BadAnswer,
    ConfigError,
    RequestRefused,
    ServerBusy,
    ServerUnreachable,
    WireMismatch,
    WrongKey,
)

Answer = tuple[int, dict[str, str], bytes]
OK: Answer = (200, {}, b"{}")


class Stub:
    """Answers with what is in `answers`, the last one again and again."""

    def __init__(self) -> None:
        self.answers: list[Answer] = [OK]
        self.asked: list[tuple[str, str, dict[str, str], bytes]] = []
        self.times: list[float] = []
        stub = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self) -> None:
                body = self.rfile.read(int(self.headers.get("content-length") or 0))
                if self.headers.get("transfer-encoding") == "chunked":
                    while size := int(self.rfile.readline(), 16):
                        body += self.rfile.read(size)
                        self.rfile.readline()
                    self.rfile.readline()
                stub.asked.append((self.command, self.path, dict(self.headers), body))
                stub.times.append(time.monotonic())
                status, headers, raw = stub.answers.pop(0)
                stub.answers = stub.answers or [(status, headers, raw)]
                if status == 0:  # hangs up
                    self.close_connection = True
                    self.connection.close()
                    return
                self.send_response(status)
                for name, value in {"content-length": str(len(raw)), **headers}.items():
                    self.send_header(name, value)
                self.end_headers()
                self.wfile.write(raw)

            do_POST = do_PUT = do_GET  # noqa: N815 - http.server's names

            def log_message(self, *_: Any) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self.server.server_port}"

    def waits(self) -> list[float]:
        return [after - before for before, after in zip(self.times, self.times[1:], strict=False)]


@pytest.fixture
def stub(monkeypatch: pytest.MonkeyPatch) -> Iterator[Stub]:
    monkeypatch.setattr(http, "_FIRST_WAIT", 0.02)
    found = Stub()
    thread = Thread(target=found.server.serve_forever, daemon=True)
    thread.start()
    yield found
    found.server.shutdown()
    found.server.server_close()
    thread.join()


async def ask(stub: Stub, method: str = "GET", **options: Any) -> Any:
    server = Http(stub.url, "key")
    try:
        return await server.ask(method, "/x", **options)
    finally:
        await server.close()


def date(seconds: float) -> str:
    return email.utils.formatdate(time.time() + seconds, usegmt=True)


@pytest.mark.parametrize(
    ("status", "headers", "least", "most"),
    [
        (429, lambda: {"retry-after": "0.2"}, 0.2, 1.0),
        (429, lambda: {"retry-after-ms": "250"}, 0.25, 1.0),
        (503, lambda: {"retry-after": date(2)}, 0.9, 3.0),
        (429, lambda: {"retry-after": date(-100)}, 0.0, 0.5),
        (429, lambda: {"retry-after": "-5"}, 0.0, 0.5),
        (429, lambda: {"retry-after": "abc"}, 0.0, 0.5),
        (429, dict, 0.0, 0.5),
        (500, dict, 0.0, 0.5),
        (502, dict, 0.0, 0.5),
        (504, dict, 0.0, 0.5),
        (0, dict, 0.0, 0.5),
    ],
)
async def test_case_075_what_passes_is_asked_again_when_the_server_says(
    stub: Stub, status: int, headers: Callable[[], dict[str, str]], least: float, most: float
) -> None:
    stub.answers = [(status, headers(), b""), OK]
    assert (await ask(stub)).status_code == 200
    [wait] = stub.waits()
    assert least <= wait <= most


async def test_case_075_a_day_is_not_slept(stub: Stub) -> None:
    stub.answers = [(429, {"retry-after": "86400"}, b"")]
    with pytest.raises(ServerBusy, match=r"asks to wait 86400 s.*at most 60 s") as caught:
        await ask(stub)
    assert caught.value.retry_after == 86400
    assert len(stub.asked) == 1


def told(message: str) -> bytes:
    return b'{"error": {"message": "%s", "type": "x"}}' % message.encode()


@pytest.mark.parametrize(
    ("status", "raw", "kind", "says"),
    [
        (400, told("no such field"), RequestRefused, "no such field"),
        (401, told("wrong API key"), WrongKey, "api_key"),
        (401, b"", WrongKey, "asks for a key"),
        (404, b"<html>nginx</html>", BadAnswer, "no art-langgraph server"),
        (400, b'{"art": {"class": "StaleCall", "message": "old"}, "error": {"message": "old"}}',
         art.errors.StaleCall, "old"),
        (422, b'{"art": 3, "error": {"message": "x"}}', ARTError, "on the wire"),
    ],
)  # fmt: skip
async def test_case_075_what_is_wrong_is_said_and_not_asked_again(
    stub: Stub, status: int, raw: bytes, kind: type[Exception], says: str
) -> None:
    stub.answers = [(status, {}, raw)]
    with pytest.raises(kind, match=says):
        await ask(stub)
    assert len(stub.asked) == 1


async def test_case_075_what_may_not_be_sent_twice_is_not(stub: Stub) -> None:
    stub.answers = [(0, {}, b""), OK]
    with pytest.raises(ServerUnreachable):
        await ask(stub, "POST", content={}, repeats=False)
    assert len(stub.asked) == 1


async def test_a_body_is_made_anew_for_each_attempt(stub: Stub) -> None:
    stub.answers = [(503, {}, b""), OK]
    made: list[int] = []

    def body() -> list[bytes]:
        made.append(1)
        return [b"ab", b"c"]

    await ask(stub, "POST", body=body)
    assert len(made) == 2
    assert [raw for _, _, _, raw in stub.asked] == [b"abc", b"abc"]
    assert {headers["x-art-wire"] for _, _, headers, _ in stub.asked} == {"1"}


async def test_the_last_fault_is_raised_when_all_attempts_failed(stub: Stub) -> None:
    stub.answers = [(500, {}, b"")]
    with pytest.raises(ServerUnreachable, match="500"):
        await ask(stub)
    assert len(stub.asked) == 8


async def test_case_075_loopback_goes_through_no_proxy(
    stub: Stub, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("HTTP_PROXY", "http_proxy", "ALL_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    assert (await ask(stub)).status_code == 200


async def test_a_server_of_another_wire_is_told_at_connect_time(stub: Stub) -> None:
    stub.answers = [(200, {}, b'{"version": "9.0", "wire": 99}')]
    model: art.TrainableModel[Any] = art.TrainableModel(name="a", project="p", base_model="b")
    async with art.HttpBackend(stub.url) as backend:
        with pytest.raises(WireMismatch, match=r"9\.0"):
            await model.register(backend)
    stub.answers = [(200, {}, b"<html>hello</html>")]
    async with art.HttpBackend(stub.url) as backend:
        with pytest.raises(BadAnswer, match="ServerVersion"):
            await model.register(backend)


def test_one_backend_serves_several_event_loops(stub: Stub) -> None:
    server = Http(stub.url, None)

    async def once() -> None:
        assert (await server.ask("GET", "/x")).status_code == 200
        await server.close()

    for _ in range(2):
        asyncio.run(once())
    assert "authorization" not in {n.lower() for n in stub.asked[0][2]}


@pytest.mark.parametrize("url", ["gpu-box:7999", "ftp://a", "http://", "", "http://a/?x=1"])
def test_what_is_no_url_of_a_server_is_refused(url: str) -> None:
    with pytest.raises(ConfigError, match="URL of a server"):
        art.HttpBackend(url)


def test_a_key_is_not_shown() -> None:
    assert "secret" not in repr(art.HttpBackend("http://a:1", api_key="secret"))
