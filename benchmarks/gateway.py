"""What the server's surface costs a call: the whole server beside the bare endpoint.

Both answer from a script, through the same chat service with records on disk, each in a process of
its own on loopback. The bare endpoint is what `LocalBackend` opens; the server adds the door's key,
rollout URLs, the wire's version, counts, turns between models. Gate: every call is recorded once.
Unit: chat completions a second. Goal: at least 0.97 of the bare endpoint's.
`--load`: so many streamed chats at once on the server for some time: nothing may fail, be lost or
be recorded twice, and memory may not grow.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import resource
import socket
import sqlite3
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx2
import numpy as np
import uvicorn

from art_core.engine.chat_service import ChatService
from art_core.engine.door import Door
from art_core.engine.model_registry import ModelRegistry
from art_core.engine.openai_routes import create_app
from art_core.engine.scripted import ScriptedEngine
from art_core.engine.serving import http_config, listen
from art_core.local.backend import LocalBackend
from art_core.records import RecordStore
from art_core.server.app import ServerSettings, create_server
from benchmarks.comparison import MIN_REPEATS, Comparison, at_least_five, compare_seconds, machine

KEY = "a-key"
TEXT = "The order is on its way, and will be there on Tuesday or Wednesday next week."
BODY = {"model": "scripted", "messages": [{"role": "user", "content": "Where is my order 10437?"}]}


class Scripted(LocalBackend):
    """A backend that answers one scripted model."""

    def __init__(self, path: Path, delay: float) -> None:
        super().__init__(path, endpoint="/v1")
        self._service = service_of(path, delay)

    def services(self) -> list[ChatService]:
        """The scripted one."""
        return [self._service]


def service_of(folder: Path, delay: float) -> ChatService:
    """A chat service over a script, with records on disk."""
    engine = ScriptedEngine(lambda prompt, request: TEXT, delay=delay)
    store = RecordStore(folder / "records.sqlite")
    return ChatService(engine, store, ModelRegistry("scripted"), keyed=False)


def run(kind: str, folder: Path, port: int, delay: float) -> None:
    """The process of one side."""
    if kind == "bare":
        app: Any = create_app(service_of(folder, delay))
    else:
        app = create_server(ServerSettings(folder), lambda _: Scripted(folder, delay))
    door = Door(app, api_key=KEY if kind == "server" else None, is_loopback=True)
    lifespan: Any = "on" if kind == "server" else "off"
    config = http_config(door, lifespan=lifespan, grace=2)
    uvicorn.Server(config).run(sockets=[listen("127.0.0.1", port)])


class Side:
    """One of the two, running."""

    def __init__(self, kind: str, folder: Path, delay: float = 0.0) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.url = f"http://127.0.0.1:{free.getsockname()[1]}"
            port = free.getsockname()[1]
        self.records = folder / "records.sqlite"
        self.process = multiprocessing.get_context("spawn").Process(
            target=run, args=(kind, folder, port, delay)
        )
        self.process.start()
        until = time.monotonic() + 60
        while time.monotonic() < until:
            try:
                httpx2.get(f"{self.url}/health").raise_for_status()
                return
            except httpx2.HTTPError:
                time.sleep(0.1)
        raise RuntimeError(f"the {kind} side did not start")

    def resident(self) -> float:
        """MiB of its process."""
        pages = Path(f"/proc/{self.process.pid}/statm").read_text().split()[1]
        return int(pages) * resource.getpagesize() / 2**20

    def recorded(self) -> tuple[int, int]:
        """Records, and distinct ids of them."""
        with sqlite3.connect(self.records) as db:
            found: tuple[int, int] = db.execute(
                "SELECT COUNT(*), COUNT(DISTINCT record_id) FROM token_records"
            ).fetchone()
        return found

    def stop(self) -> None:
        """End it."""
        self.process.terminate()
        self.process.join(20)


@contextmanager
def side(kind: str, delay: float = 0.0) -> Iterator[Side]:
    """One of the two, in a folder that goes with it."""
    with tempfile.TemporaryDirectory() as folder:
        found = Side(kind, Path(folder), delay)
        try:
            yield found
        finally:
            found.stop()


async def calls(url: str, number: int, concurrent: int) -> None:
    """So many chat completions."""
    limits = httpx2.Limits(max_connections=concurrent, max_keepalive_connections=concurrent)
    headers = {"authorization": f"Bearer {KEY}"}
    left = iter(range(number))
    async with httpx2.AsyncClient(base_url=url, limits=limits, headers=headers) as client:

        async def worker() -> None:
            for _ in left:
                (await client.post("/v1/chat/completions", json=BODY)).raise_for_status()

        await asyncio.gather(*(worker() for _ in range(concurrent)))


async def streams(url: str, concurrent: int, seconds: float) -> tuple[list[float], int]:
    """Streamed chats for so long: seconds of each, and how many failed."""
    took: list[float] = []
    failed = 0
    until = time.monotonic() + seconds
    limits = httpx2.Limits(max_connections=concurrent, max_keepalive_connections=concurrent)
    headers = {"authorization": f"Bearer {KEY}"}
    async with httpx2.AsyncClient(
        base_url=url, limits=limits, headers=headers, timeout=120
    ) as client:

        async def worker() -> None:
            nonlocal failed
            while time.monotonic() < until:
                began = time.monotonic()
                path, body = "/v1/chat/completions", {**BODY, "stream": True}
                async with client.stream("POST", path, json=body) as answer:
                    lines = [line async for line in answer.aiter_lines() if line]
                failed += answer.status_code != 200 or lines[-1] != "data: [DONE]"
                took.append(time.monotonic() - began)

        await asyncio.gather(*(worker() for _ in range(concurrent)))
    return took, failed


def load(concurrent: int, seconds: float, delay: float) -> None:
    """Streamed chats at once, on the server; print what came of it."""
    with side("server", delay) as server:
        asyncio.run(streams(server.url, concurrent, 5.0))  # connections, caches
        before, (known, _) = server.resident(), server.recorded()
        took, failed = asyncio.run(streams(server.url, concurrent, seconds))
        after, (records, ids) = server.resident(), server.recorded()
    p50, p99 = np.percentile(took, [50, 99])
    found = {
        "name": "gateway load",
        "streams": concurrent,
        "calls": len(took),
        "failed": failed,
        "recorded": records - known,
        "doubled": records - ids,
        "seconds_p50_p99": [round(float(p50), 3), round(float(p99), 3)],
        "calls_a_second": round(len(took) / seconds, 1),
        "mib_before_after": [round(before), round(after)],
        "machine": machine(),
    }
    print(json.dumps(found))
    if failed or records - known != len(took) or records != ids:
        raise RuntimeError("calls failed, were lost, or were recorded twice")


def main() -> None:
    """Measure and print the line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="200 calls a run")
    parser.add_argument("--calls", type=int, default=1500, help="of a run")
    parser.add_argument("--concurrent", type=int, default=64)
    parser.add_argument("--repeats", type=at_least_five, default=9)
    parser.add_argument("--load", type=int, help="streamed chats at once, instead")
    parser.add_argument("--seconds", type=float, default=60.0, help="of the load")
    parser.add_argument("--delay", type=float, default=0.2, help="seconds a delta, of the load")
    args = parser.parse_args()
    if args.load:
        load(args.load, args.seconds, args.delay)
        return
    number, repeats = (200, MIN_REPEATS) if args.quick else (args.calls, args.repeats)
    with side("server") as server, side("bare") as bare:

        def timed(url: str) -> float:
            began = time.perf_counter()
            asyncio.run(calls(url, number, args.concurrent))
            return time.perf_counter() - began

        mine, theirs, ratio, spread = compare_seconds(
            lambda: timed(server.url), lambda: timed(bare.url), repeats=repeats
        )
        asked = number * (repeats + 1)
        for each in (server, bare):
            if each.recorded() != (asked, asked):
                raise RuntimeError(f"{asked} calls left {each.recorded()} records and ids")
    found = Comparison(
        name="gateway",
        ours=round(number / mine, 1),
        peer=round(number / theirs, 1),
        peer_name="the bare endpoint",
        ratio=round(ratio, 3),
        goal=">= 0.97 of the bare endpoint's calls a second",
        spread=(round(spread[0], 3), round(spread[1], 3)),
        machine=machine(),
    )
    print(found.line())


if __name__ == "__main__":
    main()
