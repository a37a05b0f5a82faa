"""HTTP to one vLLM on loopback: calls through the door, and the requests that steer it.

In: a `Server`, which may be started again under another address. Out: frames of a call, or the JSON
of an answer; every failure as an `EngineError` that says whether vLLM was there at all.
"""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator
from contextlib import AbstractContextManager, aclosing
from typing import Any, Protocol, cast

import httpx2 as httpx  # the one that openai >= 3 is built on

from art_core.connections import Connections
from art_core.engine.vllm_wire import PATH, End, FrameReader, Tokens
from art_core.errors import EngineError

_CONNECT_SECONDS = 10.0
_STEER_SECONDS = 300.0
"""To load an adapter, to sleep or to wake may take its time. A vLLM that hangs is ended by the one
that watches over it, which ends every request too."""


class Server(Protocol):
    """A vLLM that somebody keeps alive, such as a `VllmProcess`."""

    @property
    def base_url(self) -> str:
        """Where it answers now: "http://127.0.0.1:PORT"."""
        ...

    @property
    def headers(self) -> dict[str, str]:
        """What each request must carry."""
        ...

    @property
    def starts(self) -> int:
        """How often it was started; what was loaded before the last start is gone."""
        ...

    async def ready(self, timeout: float) -> None:
        """Return once it answers.

        Raises:
            EngineError: it is down for good, or not up after `timeout` seconds.
        """
        ...

    def look_now(self) -> None:
        """A call has just failed: see whether it is alive."""
        ...

    def patiently(self) -> AbstractContextManager[None]:
        """Within it no silence is a hang."""
        ...

    def staying_down(self) -> AbstractContextManager[None]:
        """Should it die within, it is not started again before the end of it."""
        ...

    def stop(self) -> None:
        """End it. Safe to call twice."""
        ...


class EngineUnreachable(EngineError):
    """The connection broke, or there was none: vLLM died, or was started again."""


class Refused(EngineError):
    """vLLM answered that it won't; `status` is HTTP's."""

    def __init__(self, what: str, *, status: int) -> None:
        super().__init__(what)
        self.status = status


class VllmHttp:
    """Speaks to `server`, from any event loop."""

    def __init__(self, server: Server) -> None:
        self.server = server
        self._connections = Connections()

    async def frames(self, body: bytes) -> AsyncGenerator[Tokens | End, None]:
        """Call the door; closing the generator cancels the call.

        Raises:
            Refused: the adapter is not loaded (404), or a setting is wrong (400).
            EngineUnreachable: there is no vLLM, or it died meanwhile.
            EngineError: it failed in the midst of the call.
        """
        reader = FrameReader()
        async with aclosing(self._chunks("POST", PATH, body, read=None)) as chunks:
            async for chunk in chunks:
                for frame in reader.feed(chunk):
                    yield frame

    async def post(self, path: str, body: dict[str, Any] | None = None) -> Any:
        """Send a request that steers vLLM; returns the JSON of its answer, or its text.

        Raises:
            Refused, EngineUnreachable: as in `frames`.
        """
        return await self._ask("POST", path, json.dumps(body).encode() if body else b"")

    async def get(self, path: str) -> Any:
        """As `post`, without a body."""
        return await self._ask("GET", path, b"")

    async def _ask(self, method: str, path: str, body: bytes) -> Any:
        chunks = self._chunks(method, path, body, read=_STEER_SECONDS)
        async with aclosing(chunks):
            return _parsed(b"".join([chunk async for chunk in chunks]))

    async def _chunks(
        self, method: str, path: str, body: bytes, *, read: float | None
    ) -> AsyncGenerator[bytes, None]:
        url = httpx.URL(self.server.base_url + path)
        limits = {"connect": _CONNECT_SECONDS, "read": read, "write": None, "pool": None}
        headers = {
            "content-type": "application/json",
            "host": url.netloc.decode(),
            **self.server.headers,
        }
        request = httpx.Request(
            method, url, content=body, headers=headers, extensions={"timeout": limits}
        )
        try:
            transport = await self._connections.for_loop(url)
            response = await transport.handle_async_request(request)
            stream = cast(httpx.AsyncByteStream, response.stream)
            try:
                if response.status_code >= 400:
                    text = b"".join([chunk async for chunk in stream])
                    raise _refused(path, response.status_code, text)
                async for chunk in stream:
                    yield chunk
            finally:
                await stream.aclose()
        except httpx.TransportError as error:
            self.server.look_now()
            raise EngineUnreachable(
                f"vLLM at {self.server.base_url} can't be reached ({error!r})",
                fix="Ask again; its log says why it ended.",
            ) from error


def _parsed(data: bytes) -> Any:
    text = data.decode("utf-8", "replace")
    try:
        return json.loads(text)
    except ValueError:
        return text


def _refused(path: str, status: int, data: bytes) -> EngineError:
    told = _parsed(data)
    if isinstance(told, dict):
        fault = told.get("error", told)
        told = told.get("message") or (fault.get("message") if isinstance(fault, dict) else fault)
    return Refused(f"vLLM refused {path} with {status}: {told}", status=status)
