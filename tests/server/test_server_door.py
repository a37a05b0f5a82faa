"""The door in front of the whole server: every route, JSON or upload."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import httpx2
import pytest

from art_core.engine.door import MAX_BODY_BYTES
from art_core.wire import protocol as wire
from tests.server.server_process import KEY, ServerProcess

pytest.importorskip("fastapi", reason="art-langgraph[server] is not installed")

from art_core.server.run_routes import UPLOADS


@pytest.fixture(scope="module")
def server(tiny_llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    with ServerProcess(tmp_path_factory.mktemp("server"), tiny_llama) as process:
        yield process


@pytest.fixture
async def client(server: ServerProcess) -> AsyncIterator[httpx2.AsyncClient]:
    headers = {"authorization": f"Bearer {KEY}", "content-type": "application/json"}
    async with httpx2.AsyncClient(base_url=server.url, headers=headers, timeout=30) as found:
        yield found


async def test_no_route_is_open_but_health(server: ServerProcess) -> None:
    paths = (
        "/metrics /api/version /api/openapi.json /api/models /api/jobs /api/nothing /v1/models "
        "/rollouts/r.0/v1/models /docs /"
    )
    async with httpx2.AsyncClient(base_url=server.url) as stranger:
        for path in paths.split():
            for method in ("GET", "POST", "PUT", "OPTIONS"):
                answer = await stranger.request(method, path)
                assert (answer.status_code, path) == (401, path)
        assert (await stranger.get("/health")).json() == {"status": "ok"}


def test_payloads_and_adapters_are_the_uploads() -> None:
    """And nothing else is left unbounded at the door."""
    names = {"project": "a b", "name": "m"}
    bounded_by_files = (
        wire.TRAIN, wire.TRAIN_SFT, wire.SFT_LOSS, wire.JOIN, wire.LOG, wire.CHECKPOINTS,
    )  # fmt: skip
    others = (wire.MODELS, wire.MODEL, wire.FORK, wire.PRUNE, wire.BOOKMARKS, wire.ROLLOUTS)
    for template in bounded_by_files:
        assert UPLOADS.fullmatch(template.format(**names)), template
    for template in others:
        assert not UPLOADS.fullmatch(template.format(**names)), template


@pytest.mark.parametrize("path", [wire.ROLLOUTS, wire.MODELS, "/v1/chat/completions"])
async def test_json_bodies_are_bounded_in_size_and_depth(
    client: httpx2.AsyncClient, path: str
) -> None:
    async def chunks() -> AsyncIterator[bytes]:
        for _ in range(MAX_BODY_BYTES // 2**20 + 2):
            yield b" " * 2**20

    assert (await client.post(path, content=chunks())).status_code == 413
    deep = b'{"model":' + b"[" * 100_000 + b"]" * 100_000 + b"}"
    for raw in (deep, b"{", b"\xff", b'{"model": NaN}', b""):
        answer = await client.post(path, content=raw)
        assert (answer.status_code, raw[:20]) == (400, raw[:20])
        assert answer.json()["error"]["message"]
    for raw in (b'{"model": 1e999}', rb'{"model": "\ud83d"}', b"[]", b"3"):
        assert (await client.post(path, content=raw)).status_code < 500


@pytest.mark.parametrize("kind", ["text/plain", "application/x-www-form-urlencoded", ""])
@pytest.mark.parametrize("path", [wire.ROLLOUTS, wire.MODELS, "/v1/chat/completions"])
async def test_json_routes_want_json(client: httpx2.AsyncClient, path: str, kind: str) -> None:
    """What a form of a web page can send."""
    answer = await client.post(path, content=b"{}", headers={"content-type": kind})
    assert answer.status_code == 415


async def test_a_foreign_host_or_page_is_refused(client: httpx2.AsyncClient) -> None:
    for headers in ({"host": "evil.example"}, {"origin": "https://evil.example"}):
        assert (await client.get(wire.VERSION, headers=headers)).status_code == 403


def test_a_blank_key_stops_the_start(tiny_llama: Path, tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="the API key can't be used"):
        ServerProcess(tmp_path, tiny_llama, key="  ").start()
