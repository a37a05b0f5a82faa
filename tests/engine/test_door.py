"""The door over real sockets: keys, names, web pages; clients that send too much, or too slowly."""

from __future__ import annotations

import asyncio
import json
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

import httpx
import pytest

from art_core.engine.door import Door, DoorLimits
from art_core.engine.openai_routes import create_app
from art_core.engine.patient_http import PatientHTTP
from art_core.engine.serving import LoopbackServer
from art_core.errors import ConfigError
from tests.engine.conftest import Endpoint, user
from tests.engine.test_serving import connect, in_thread, wait_for

KEY = "k-123"


@pytest.fixture
def locked(endpoint: Endpoint) -> Iterator[LoopbackServer]:
    with LoopbackServer(create_app(endpoint.service), api_key=KEY) as server:
        yield server


def answer_to(server: LoopbackServer, raw: bytes) -> tuple[int, bytes]:
    """Status and all of the answer to `raw`, after which the connection is closed by us."""
    with connect(server) as connection:
        connection.sendall(raw)
        answer = connection.recv(65_536)
        return int(answer.split()[1]), answer


def get(path: str, *lines: bytes) -> bytes:
    head = b"\r\n".join([b"GET %b HTTP/1.1" % path.encode(), b"Host: localhost", *lines])
    return head + b"\r\n\r\n"


def until_closed(connection: socket.socket) -> bytes:
    """What comes until the server closes."""
    with suppress(ConnectionResetError):
        return b"".join(iter(lambda: connection.recv(65_536), b""))
    return b""


# --- the key


def test_the_network_needs_a_key(endpoint: Endpoint) -> None:
    app = create_app(endpoint.service)
    with pytest.raises(ConfigError, match=r"0\.0\.0\.0"):
        LoopbackServer(app, host="0.0.0.0")
    LoopbackServer(app, host="0.0.0.0", api_key="k")


@pytest.mark.parametrize("key", ["", "   ", "\n", "k\x00", "clé"])
def test_a_key_that_no_client_could_send_is_refused(endpoint: Endpoint, key: str) -> None:
    """Case 071, configured_as: an empty key is not no key."""
    with pytest.raises(ConfigError, match="the API key can't be used") as caught:
        LoopbackServer(create_app(endpoint.service), api_key=key)
    assert not key.strip() or key not in str(caught.value)


KEYS = {
    b"Authorization: Bearer k-123": 200,
    b"authorization: bearer k-123": 200,
    b"Authorization: BEARER k-123": 200,
    b"Authorization: Bearer   k-123": 200,
    b"x-api-key: k-123": 200,
    b"x-api-key: k-124": 401,
    b"x-api-key: k-124\r\nAuthorization: Bearer k-123": 401,
    b"x-nothing: ": 401,
    b"Authorization: Bearer": 401,
    b"Authorization: Bearer ": 401,
    b"Authorization: k-123": 401,
    b"Authorization: Basic azoxMjM=": 401,
    b"Authorization: Bearer k-124": 401,
    b"Authorization: Bearer k-123x": 401,
    b"Authorization: Bearer caf\xe9": 401,
    b"Authorization: Bearer k-123\r\nAuthorization: Bearer k-124": 401,
}


@pytest.mark.parametrize("configured", [KEY, "k-123\n"])
async def test_case_071_forms_of_the_key(endpoint: Endpoint, configured: str) -> None:
    """A line end after the key, as a file has it, is no part of it."""

    def work() -> dict[bytes, int]:
        with LoopbackServer(create_app(endpoint.service), api_key=configured) as server:
            asked = {line: get("/v1/models?api_key=k-123", line) for line in KEYS}
            return {line: answer_to(server, raw)[0] for line, raw in asked.items()}

    assert await in_thread(work) == KEYS


async def test_case_071_no_route_is_open_but_health(locked: LoopbackServer) -> None:
    """Whatever else is wrong with a request: a stranger is told nothing else."""
    requests = [
        *(
            get(path)
            for path in ("/v1/models", "//v1/models", "/v1/../health", "/health/", "/docs", "/x")
        ),
        b"HEAD /v1/models HTTP/1.1\r\nHost: localhost\r\n\r\n",
        b"OPTIONS /v1/models HTTP/1.1\r\nHost: localhost\r\n\r\n",
        b"BREW /v1/models HTTP/1.1\r\nHost: localhost\r\n\r\n",
        b"GET /v1/models HTTP/1.1\r\nHost: evil.example\r\n\r\n",
        b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 1\r\n\r\n{",
        b"POST /v1/tokenize HTTP/1.1\r\nHost: localhost\r\nContent-Length: 3221225472\r\n\r\n",
    ]

    def work() -> None:
        for raw in requests:
            status, answer = answer_to(locked, raw)
            assert (status, raw) == (401, raw)
            assert b"www-authenticate: Bearer" in answer
        assert answer_to(locked, get("/health"))[0] == 200

    await in_thread(work)


# --- names, and web pages


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({}, 200),
        ({"host": "localhost:1"}, 200),
        ({"host": "LOCALHOST"}, 200),
        ({"host": "[::1]"}, 200),
        ({"origin": "http://localhost:3000"}, 200),
        ({"host": "evil.example"}, 403),
        ({"host": "localhost.evil.example"}, 403),
        ({"host": "127.0.0.1@evil.example"}, 403),
        ({"host": "[bad"}, 403),
        ({"origin": "https://evil.example"}, 403),
        ({"origin": "null"}, 403),
    ],
)
async def test_web_pages_can_not_reach_in(
    server: LoopbackServer, headers: dict[str, str], status: int
) -> None:
    async with httpx.AsyncClient() as client:
        response = await client.get(f"{server.base_url}/models", headers=headers)
    assert response.status_code == status
    assert not any(name.startswith("access-control") for name in response.headers)


@pytest.mark.parametrize(
    ("hosts", "headers", "status"),
    [
        ((), {"host": "any.example"}, 200),
        ((), {"host": "any.example:1", "origin": "https://any.example"}, 200),
        ((), {"host": "any.example", "origin": "https://evil.example"}, 403),
        ((), {"host": "[bad", "origin": "null"}, 403),
        (("GPU.example",), {"host": "gpu.example:7999"}, 200),
        (("GPU.example",), {"host": "localhost"}, 200),
        (("GPU.example",), {"host": "evil.example"}, 403),
        (("GPU.example",), {"host": "gpu.example", "origin": "https://gpu.example"}, 200),
        (("GPU.example",), {"host": "gpu.example", "origin": "https://evil.example"}, 403),
    ],
)
async def test_on_other_addresses_names_may_be_listed(
    endpoint: Endpoint, hosts: tuple[str, ...], headers: dict[str, str], status: int
) -> None:
    app = create_app(endpoint.service)
    door = Door(app, api_key=KEY, is_loopback=False, hosts=hosts)
    transport = httpx.ASGITransport(door)
    async with httpx.AsyncClient(transport=transport, base_url="http://x") as client:
        headers = {"authorization": f"Bearer {KEY}", **headers}
        assert (await client.get("/v1/models", headers=headers)).status_code == status


# --- too much


async def test_case_073_a_body_said_to_be_3_gib_is_refused_at_once(server: LoopbackServer) -> None:
    raw = (
        b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\n"
        b"Content-Length: 3221225472\r\n\r\n"
    )
    assert (await in_thread(lambda: answer_to(server, raw)))[0] == 413


async def test_case_073_a_body_in_chunks_is_refused_at_the_limit(server: LoopbackServer) -> None:
    """The limit is 16 MiB; of 200 MiB no more than that is held."""
    sent = 0

    async def chunks() -> Any:
        nonlocal sent
        for _ in range(200):
            sent += 1
            yield b" " * 2**20

    async with httpx.AsyncClient() as client:
        url = f"{server.base_url}/chat/completions"
        headers = {"content-type": "application/json"}
        response = await client.post(url, content=chunks(), headers=headers, timeout=60)
    assert response.status_code == 413
    assert "at most 16777216" in response.json()["error"]["message"]


async def test_uploads_are_left_to_their_routes(endpoint: Endpoint) -> None:
    """Of two paths only one is the door's to bound; the app bounds both at 16 MiB."""
    import re

    limits = DoorLimits(body_bytes=10, uploads=re.compile("/v1/chat/completions"))
    door = Door(create_app(endpoint.service), api_key=None, is_loopback=True, limits=limits)
    transport = httpx.ASGITransport(door)
    async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
        body = {"model": "scripted", "messages": [user()]}
        assert (await client.post("/v1/chat/completions", json=body)).status_code == 200
        assert (await client.post("/tokenize", json=body)).status_code == 413


@pytest.mark.parametrize(
    ("lines", "status"),
    [
        ([b"x-%d: y" % i for i in range(98)], 200),
        ([b"x-%d: y" % i for i in range(101)], 431),
        ([b"x: " + b"y" * 200_000], 400),
    ],
)
async def test_headers_are_bounded(server: LoopbackServer, lines: list[bytes], status: int) -> None:
    """98 and a Host are 99 of 100; 200,000 letters are more than 64 KiB and one read."""
    assert (await in_thread(lambda: answer_to(server, get("/v1/models", *lines))))[0] == status


async def test_requests_beyond_the_limit_are_sent_away(endpoint: Endpoint) -> None:
    endpoint.engine.delay = 0.2
    limits = DoorLimits(requests=1)
    with LoopbackServer(create_app(endpoint.service), limits=limits) as server:
        async with httpx.AsyncClient(base_url=server.base_url) as client:
            body = {"model": "scripted", "messages": [user()]}
            first = asyncio.ensure_future(client.post("/chat/completions", json=body))
            await in_thread(lambda: wait_for(lambda: endpoint.engine.running == 1))
            refused = await client.get("/models")
            assert (refused.status_code, refused.headers["retry-after"]) == (503, "2")
            root = server.base_url.removesuffix("/v1")
            assert (await client.get(f"{root}/health")).status_code == 200
            assert (await first).status_code == 200
            assert (await client.get("/models")).status_code == 200


# --- too slowly


async def test_half_a_request_is_cut(
    server: LoopbackServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing at all, half a head in one part or in drops, and half of a second one."""
    monkeypatch.setattr(PatientHTTP, "head_seconds", 0.3)
    half = b"GET /v1/models HTTP/1.1\r\nHost: loc"

    def seconds_of(send: Callable[[socket.socket], object]) -> float:
        with connect(server) as connection:
            begun = time.monotonic()
            send(connection)
            until_closed(connection)
            return time.monotonic() - begun

    def drop_by_drop(connection: socket.socket) -> None:
        with suppress(OSError):
            for letter in half * 20:
                connection.sendall(bytes([letter]))
                time.sleep(0.005)

    def after_a_whole_one(connection: socket.socket) -> None:
        connection.sendall(get("/health"))
        assert b"200" in connection.recv(65_536)
        connection.sendall(half)

    def work() -> list[float]:
        sends: list[Callable[[socket.socket], object]] = [
            lambda c: None,
            lambda c: c.sendall(half),
            drop_by_drop,
            after_a_whole_one,
        ]
        return [seconds_of(send) for send in sends]

    assert all(0.2 < seconds < 4.0 for seconds in await in_thread(work))


async def test_a_body_that_does_not_come_is_408(endpoint: Endpoint) -> None:
    limits = DoorLimits(patience=0.3, bytes_per_second=10_000)

    def work() -> tuple[bytes, float]:
        with LoopbackServer(create_app(endpoint.service), limits=limits) as server:
            with connect(server) as connection:
                begun = time.monotonic()
                connection.sendall(
                    b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\n"
                    b"Content-Type: application/json\r\nContent-Length: 100\r\n\r\n{"
                )
                return until_closed(connection), time.monotonic() - begun

    answer, seconds = await in_thread(work)
    assert answer.startswith(b"HTTP/1.1 408")
    assert answer.count(b"HTTP/1.1") == 1
    assert b"1 bytes are there" in answer
    assert seconds < 4
    assert endpoint.asked == []


async def test_a_body_that_comes_slowly_enough_is_taken(endpoint: Endpoint) -> None:
    """In 0.6 s, twice the patience; but 2000 bytes a tenth of a second give it 0.2 s more each."""
    limits = DoorLimits(patience=0.3, bytes_per_second=10_000)
    body = json.dumps({"model": "scripted", "messages": [user("x" * 12_000)]}).encode()

    async def parts() -> Any:
        for start in range(0, len(body), 2000):
            yield body[start : start + 2000]
            await asyncio.sleep(0.1)

    with LoopbackServer(create_app(endpoint.service), limits=limits) as server:
        async with httpx.AsyncClient() as client:
            url = f"{server.base_url}/chat/completions"
            headers = {"content-type": "application/json"}
            answer = await client.post(url, content=parts(), headers=headers)
            assert answer.status_code == 200


async def test_case_069_a_reader_that_takes_nothing_is_cut_and_its_call_recorded(
    endpoint: Endpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    """64 MB of events to a client that reads none: what waits is bounded, and then given up."""
    monkeypatch.setattr(PatientHTTP, "stall_seconds", 0.5)
    endpoint.says = "abc" * 200_000
    body = {"model": "scripted", "messages": [user()], "stream": True, "logprobs": True}
    raw = json.dumps({**body, "max_tokens": 600_000}).encode()
    endpoint.engine.context_length = 1_000_000

    def work() -> None:
        with LoopbackServer(create_app(endpoint.service)) as server, connect(server) as connection:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            connection.sendall(
                b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nX-Art-Rollout: slow\r\n"
                b"Content-Type: application/json\r\nContent-Length: %d\r\n\r\n" % len(raw) + raw
            )
            wait_for(lambda: endpoint.engine.cancelled == 1, seconds=30)
            wait_for(lambda: len(endpoint.records.of_rollout("slow")) == 1)

    await in_thread(work)
    [record] = endpoint.records.of_rollout("slow")
    assert record.complete is False
    assert 0 < len(record.sampled_ids) < 600_000
