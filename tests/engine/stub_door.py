"""A stand-in for vLLM with the door in it: real HTTP on loopback, answers of constant ids.

It says what vLLM would to what is asked of it, keeps a list of that, and can be slow, asleep, or
started again. For what a real vLLM on a CPU can't show (sleep does nothing there) or only slowly.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from typing import Any

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from art_core.engine.inside_vllm import art_token_door as door
from art_core.engine.serving import LoopbackServer

ANSWER = [104, 105, 257]
"""Ids of every answer."""


class StubVllm:
    """Implements `vllm_http.Server`."""

    def __init__(self) -> None:
        self.headers: dict[str, str] = {}
        self.starts = 0
        self.asked: list[str] = []
        """What came, in order: paths, and for calls the adapter."""
        self.loaded: dict[str, str] = {}
        self.is_asleep = False
        self.delay = 0.0
        """Seconds before each token."""
        self.load_delay = self.unload_delay = 0.0
        self.breaks: list[int] = []
        """For each call to come, after how many tokens its connection breaks."""
        self.reason = "stop"
        self.refuses_wake = False
        self.stays_down = False
        self.start()

    def start(self) -> None:
        """A new process: nothing is loaded."""
        routes = [
            Route(door.PATH, self._generate, methods=["POST"]),
            Route("/art/version", self._version),
            Route("/v1/load_lora_adapter", self._load, methods=["POST"]),
            Route("/v1/unload_lora_adapter", self._unload, methods=["POST"]),
            Route("/sleep", self._sleep, methods=["POST"]),
            Route("/wake_up", self._wake, methods=["POST"]),
            Route("/reset_prefix_cache", self._reset, methods=["POST"]),
        ]
        self.loaded, self.is_asleep = {}, False
        self._http = LoopbackServer(Starlette(routes=routes)).start()
        self.starts += 1  # last: then it answers, as where a supervisor says that it is ready

    @property
    def base_url(self) -> str:
        return self._http.base_url.removesuffix("/v1")

    async def ready(self, timeout: float) -> None:
        """Like a supervisor that has not seen yet that it is down."""

    def look_now(self) -> None:
        self.asked.append("look")

    @contextmanager
    def patiently(self) -> Iterator[None]:
        yield

    @contextmanager
    def staying_down(self) -> Iterator[None]:
        self.stays_down = True
        yield
        self.stays_down = False

    def stop(self) -> None:
        self._http.stop()

    async def _version(self, request: Request) -> Response:
        return JSONResponse({"door": door.VERSION})

    async def _generate(self, request: Request) -> Response:
        body = await request.body()
        (size,) = door.HEAD.unpack_from(body)
        head = json.loads(body[door.HEAD.size : door.HEAD.size + size])
        name = head["adapter"]
        self.asked.append(f"call {name and name.rpartition('-')[0]}")
        if self.is_asleep:
            return JSONResponse({"error": "asleep", "message": "asleep"}, 500)
        if name is not None and name not in self.loaded:
            return JSONResponse({"error": "LookupError", "message": "not loaded"}, 404)
        broken = self.breaks.pop(0) if self.breaks else None
        return StreamingResponse(self._frames(head, broken))

    async def _frames(self, head: dict[str, Any], broken: int | None) -> AsyncIterator[bytes]:
        for count, token in enumerate(ANSWER):
            await asyncio.sleep(self.delay)
            if count == broken:
                raise ConnectionError("the stub dies")
            yield door._tokens([token], [-0.5])
        yield door._end({"finish_reason": self.reason, "cached_tokens": 2})

    async def _load(self, request: Request) -> Response:
        told = await request.json()
        self.asked.append(f"load {told['lora_name'].rpartition('-')[0]}")
        await asyncio.sleep(self.load_delay)
        self.loaded[told["lora_name"]] = told["lora_path"]
        return Response("done")

    async def _unload(self, request: Request) -> Response:
        told = await request.json()
        self.asked.append(f"unload {told['lora_name'].rpartition('-')[0]}")
        await asyncio.sleep(self.unload_delay)
        if self.loaded.pop(told["lora_name"], None) is None:
            return JSONResponse({"error": {"message": "not loaded"}}, 404)
        return Response("done")

    async def _sleep(self, request: Request) -> Response:
        self.asked.append(f"sleep {request.url.query}")
        self.is_asleep = True
        return JSONResponse({"status": "sleeping"})

    async def _wake(self, request: Request) -> Response:
        self.asked.append("wake")
        if self.refuses_wake:
            return JSONResponse({"error": {"message": "no memory"}}, 500)
        self.is_asleep = False
        return JSONResponse({"status": "awake"})

    async def _reset(self, request: Request) -> Response:
        self.asked.append("reset")
        return JSONResponse({"success": True})
