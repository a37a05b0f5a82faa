"""What goes wrong on the way to a server, and what is kept: each by hand, over real HTTP."""

from __future__ import annotations

import asyncio
import gzip
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import httpx2
import pytest

import art_core as art
from art_core.trajectories import TrajectoryGroup
from art_core.wire import protocol as wire
from art_core.wire.payload import compressed, write_payload
from tests.core.small_run import CONFIG, NAME, PROJECT, play
from tests.server.server_process import KEY, ServerProcess

pytest.importorskip("fastapi", reason="art-langgraph[server] is not installed")

HEADERS = {
    "authorization": f"Bearer {KEY}",
    "content-type": wire.PAYLOAD,
    "content-encoding": "gzip",
}
TRAIN = wire.path(wire.TRAIN, project=PROJECT, name=NAME)


@pytest.fixture(scope="module")
def server(tiny_llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    path = tmp_path_factory.mktemp("server")
    with ServerProcess(path, tiny_llama, options=("--max-body", "1")) as process:
        yield process


@pytest.fixture
async def model(server: ServerProcess, tiny_llama: Path) -> AsyncIterator[art.TrainableModel[Any]]:
    async with server.backend() as backend:
        found = server.model(tiny_llama)
        await found.register(backend)
        yield found


@pytest.fixture
async def client(server: ServerProcess) -> AsyncIterator[httpx2.AsyncClient]:
    async with httpx2.AsyncClient(base_url=server.url, headers=HEADERS) as found:
        yield found


def body(groups: list[TrajectoryGroup], kind: str = "train") -> bytes:
    request = wire.TrainRequest(config=CONFIG).model_dump(mode="json")
    return b"".join(compressed(write_payload(kind, request, groups)))


async def ended(client: httpx2.AsyncClient, job: dict[str, Any]) -> dict[str, Any]:
    path = wire.path(wire.EVENTS_OF_JOB, id=job["id"])
    async with client.stream("GET", path) as events:
        told = [line async for line in events.aiter_lines() if line.startswith("id:")]
    assert told[0] == "id: 1"
    found: dict[str, Any] = (await client.get(wire.path(wire.JOB, id=job["id"]))).json()["job"]
    return found


async def test_a_reply_that_was_lost_is_found_again_by_its_key(
    model: art.TrainableModel[Any], client: httpx2.AsyncClient
) -> None:
    before = await model.get_step()
    raw = body(await play(model, (0.0, 1.0)))
    key = {wire.KEY_HEADER: wire.new_key()}
    answers = [await client.post(TRAIN, content=raw, headers=key) for _ in range(2)]
    [first, again] = [answer.json()["job"] for answer in answers]
    assert first["id"] == again["id"]
    assert (await ended(client, first))["state"] == "done"
    late = await client.post(TRAIN, content=raw, headers=key)
    assert late.json()["job"]["result"]["step"] == before + 1
    assert await model.get_step() == before + 1
    other = wire.path(wire.TRAIN_SFT, project=PROJECT, name=NAME)
    refused = await client.post(other, content=raw, headers=key)
    assert refused.status_code == 400
    assert "for something else" in refused.json()["error"]["message"]


@pytest.mark.parametrize(
    ("raw", "headers", "status"),
    [
        (b"", {}, 400),
        (b"no gzip", {}, 400),
        (gzip.compress(b"\x80\x04."), {}, 400),
        (gzip.compress(b"x" * 10)[:-4], {}, 400),
        (gzip.compress(b""), {}, 400),
        (b"\0" * (2**20 + 1), {}, 413),
        (b"{}", {"content-type": "application/json"}, 415),
        (b"{}", {"content-encoding": "br"}, 415),
        (b"{}", {wire.KEY_HEADER: "a b"}, 400),
        (b"{}", {wire.WIRE_HEADER: "99"}, 400),
    ],
)
async def test_a_broken_request_is_refused_and_nothing_is_kept(
    server: ServerProcess,
    model: art.TrainableModel[Any],
    client: httpx2.AsyncClient,
    raw: bytes,
    headers: dict[str, str],
    status: int,
) -> None:
    answer = await client.post(TRAIN, content=raw, headers=headers)
    assert answer.status_code == status
    assert answer.json()["error"]["message"]
    assert str(server.path) not in answer.text
    assert list((server.path / "server" / "given").iterdir()) == []


async def test_a_job_of_a_broken_payload_fails_with_its_error(
    model: art.TrainableModel[Any], client: httpx2.AsyncClient
) -> None:
    whole = b"".join(write_payload("train", {"config": {"learning_rate": "x"}}, []))
    job = (await client.post(TRAIN, content=gzip.compress(whole))).json()["job"]
    job = await ended(client, job)
    assert job["state"] == "failed"
    assert job["error"]["class"] == "PayloadError"
    assert "config.learning_rate" in job["error"]["message"]


async def test_a_client_that_goes_while_it_sends_leaves_nothing(
    server: ServerProcess, model: art.TrainableModel[Any], client: httpx2.AsyncClient
) -> None:
    async def half() -> AsyncIterator[bytes]:
        yield b"\x1f\x8b"
        await asyncio.sleep(0.2)
        raise ConnectionError

    with pytest.raises(ConnectionError):
        await client.post(TRAIN, content=half())
    for _ in range(50):
        if not list((server.path / "server" / "given").iterdir()):
            break
        await asyncio.sleep(0.1)
    assert list((server.path / "server" / "given").iterdir()) == []
    assert (await client.get("/health")).status_code == 200


async def test_names_that_break_the_rule_and_jobs_that_are_not_there(
    client: httpx2.AsyncClient,
) -> None:
    asked = {"project": "..", "name": "a", "base_model": "b", "art_config": {}}
    headers = {"content-type": "application/json"}
    answer = await client.post(wire.MODELS, json=asked, headers=headers)
    assert answer.status_code == 400
    assert (await client.get(wire.path(wire.JOB, id="x"))).status_code == 404
    answer = await client.get(wire.path(wire.MODEL, project="p/../q", name="a"))
    assert answer.status_code == 404
    assert (await client.get("/api/jobs?state=odd")).status_code == 400


def test_a_damaged_ledger_is_told(tiny_llama: Path, tmp_path: Path) -> None:
    (tmp_path / "server").mkdir()
    (tmp_path / "server" / "jobs.sqlite").write_bytes(b"no database" * 100)
    with pytest.raises(RuntimeError, match=r"ledger jobs\.sqlite can't be opened"):
        ServerProcess(tmp_path, tiny_llama).start()
