"""Many small connection pools that look like one, for hundreds of calls at once.

In: what makes a pool. Out: an httpx transport that sends each request through the first pool with
room. httpcore looks at every connection of its pool at every request, which is a third of the time
a call takes where 256 run side by side.
"""

from __future__ import annotations

import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import httpx2 as httpx  # the one that openai >= 3 is built on

T = TypeVar("T")

SIDE_BY_SIDE = 16
"""Requests that one pool carries at once."""
_IDLE = 5.0
"""Seconds after which the last pool, if nobody uses it, is closed."""


@dataclass
class _Pool(Generic[T]):
    transport: T
    busy: int = 0
    used: float = 0.0
    """When its last response was closed."""


class _Pools(Generic[T]):
    """Which request goes through which pool. Safe from any thread."""

    def __init__(self, make: Callable[[], T]) -> None:
        self._make = make
        self._pools: list[_Pool[T]] = []
        self._lock = threading.Lock()

    def take(self) -> _Pool[T]:
        """A pool with room for one more; give it back."""
        with self._lock:
            pool = next((pool for pool in self._pools if pool.busy < SIDE_BY_SIDE), None)
            if pool is None:
                pool = _Pool(self._make())
                self._pools.append(pool)
            pool.busy += 1
            return pool

    def give_back(self, pool: _Pool[T]) -> None:
        with self._lock:
            pool.busy -= 1
            pool.used = time.monotonic()

    def drop_idle(self) -> T | None:
        """The transport of the last pool if nobody has used it for a while; close it."""
        with self._lock:
            last = self._pools[-1] if len(self._pools) > 1 else None
            if last is None or last.busy or time.monotonic() - last.used < _IDLE:
                return None
            return self._pools.pop().transport

    def drop_all(self) -> list[T]:
        with self._lock:
            pools, self._pools = self._pools, []
        return [pool.transport for pool in pools]


class SyncPools(httpx.BaseTransport):
    """For sync callers, from any thread."""

    def __init__(self, make: Callable[[], httpx.BaseTransport]) -> None:
        self._pools = _Pools(make)

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        pool = self._pools.take()
        try:
            if idle := self._pools.drop_idle():  # before there is a response that would be lost
                idle.close()
            response = pool.transport.handle_request(request)
        except BaseException:
            self._pools.give_back(pool)
            raise
        response.stream = _SyncBody(response.stream, lambda: self._pools.give_back(pool))
        return response

    def close(self) -> None:
        for transport in self._pools.drop_all():
            transport.close()


class AsyncPools(httpx.AsyncBaseTransport):
    """For the callers of one event loop."""

    def __init__(self, make: Callable[[], httpx.AsyncBaseTransport]) -> None:
        self._pools = _Pools(make)

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        pool = self._pools.take()
        try:
            if idle := self._pools.drop_idle():  # before there is a response that would be lost
                await idle.aclose()
            response = await pool.transport.handle_async_request(request)
        except BaseException:
            self._pools.give_back(pool)
            raise
        response.stream = _AsyncBody(response.stream, lambda: self._pools.give_back(pool))
        return response

    async def aclose(self) -> None:
        for transport in self._pools.drop_all():
            await transport.aclose()


class _SyncBody(httpx.SyncByteStream):
    """A body that says when it is closed."""

    def __init__(self, inner: Any, closed: Callable[[], None]) -> None:
        self._inner = inner
        self._closed: Callable[[], None] | None = closed

    def __iter__(self) -> Iterator[bytes]:
        return iter(self._inner)

    def close(self) -> None:
        closed, self._closed = self._closed, None
        try:
            self._inner.close()
        finally:
            if closed is not None:
                closed()


class _AsyncBody(httpx.AsyncByteStream):
    """As `_SyncBody`."""

    def __init__(self, inner: Any, closed: Callable[[], None]) -> None:
        self._inner = inner
        self._closed: Callable[[], None] | None = closed

    def __aiter__(self) -> AsyncIterator[bytes]:
        return aiter(self._inner)

    async def aclose(self) -> None:
        closed, self._closed = self._closed, None
        try:
            await self._inner.aclose()
        finally:
            if closed is not None:
                closed()
