"""Answers that end when their client goes away: a stream of events, or work for one plain answer.

In: a generator of events, or a coroutine. Out: an ASGI response; what it was made from is closed or
cancelled if the client leaves before the end, so that no tokens are sampled for nobody.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Coroutine
from contextlib import aclosing, suppress
from typing import Any

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

_HEADERS = {"cache-control": "no-cache", "x-accel-buffering": "no"}


async def _gone(receive: Receive) -> None:
    """Return when the client has gone away."""
    while (await receive())["type"] != "http.disconnect":
        pass


async def unless_gone(
    receive: Receive, work: Coroutine[Any, Any, dict[str, Any]]
) -> dict[str, Any] | None:
    """The result of `work`; None, and `work` cancelled, if the client goes away before."""
    working = asyncio.ensure_future(work)
    leaving = asyncio.ensure_future(_gone(receive))
    try:
        await asyncio.wait({working, leaving}, return_when=asyncio.FIRST_COMPLETED)
        return await working if working.done() else None
    finally:
        for task in (working, leaving):
            task.cancel()
        await asyncio.gather(working, leaving, return_exceptions=True)


class EventStream(Response):
    """Server-sent events; the source is closed when the client goes away."""

    media_type = "text/event-stream"

    def __init__(self, first: bytes, source: AsyncGenerator[bytes, None]) -> None:
        self._first, self._source = first, source
        self.status_code, self.background = 200, None
        self.init_headers(_HEADERS)

    @classmethod
    async def open(cls, source: AsyncGenerator[bytes, None]) -> EventStream:
        """Wait for the first event, so that a fault before it is an HTTP status."""
        return cls(await anext(source), source)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        sending = asyncio.ensure_future(self._send(send))
        leaving = asyncio.ensure_future(_gone(receive))
        try:
            await asyncio.wait({sending, leaving}, return_when=asyncio.FIRST_COMPLETED)
            if sending.done():
                await sending
        finally:
            for task in (sending, leaving):
                task.cancel()
            with suppress(asyncio.CancelledError):
                await asyncio.gather(sending, leaving, return_exceptions=True)

    async def _send(self, send: Send) -> None:
        async with aclosing(self._source) as source:
            await send(
                {
                    "type": "http.response.start",
                    "status": self.status_code,
                    "headers": self.raw_headers,
                }
            )
            await send(_part(self._first))
            async for part in source:
                await send(_part(part))
            await send({"type": "http.response.body", "body": b"", "more_body": False})


def _part(body: bytes) -> dict[str, Any]:
    return {"type": "http.response.body", "body": body, "more_body": True}
