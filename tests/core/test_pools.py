"""Many small pools as one transport, against real loopback connections."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import httpx2 as httpx
import pytest

from art_core import pools
from art_core.pools import SIDE_BY_SIDE, AsyncPools, SyncPools
from tests.stub_endpoint import Answer, Asked, completion, endpoint, streamed

MANY = 2 * SIDE_BY_SIDE + 1
"""Requests that need three pools."""


class Made:
    """Makes real pools, and counts them and those that were closed."""

    def __init__(self) -> None:
        self.made = self.closed = 0

    def sync(self) -> httpx.BaseTransport:
        self.made += 1
        transport = httpx.HTTPTransport()
        self._count(transport, "close")
        return transport

    def of_loop(self) -> httpx.AsyncBaseTransport:
        self.made += 1
        transport = httpx.AsyncHTTPTransport()
        self._count(transport, "aclose")
        return transport

    def _count(self, transport: Any, name: str) -> None:
        close: Callable[[], Any] = getattr(transport, name)

        def counted() -> Any:
            self.closed += 1
            return close()

        setattr(transport, name, counted)


@contextmanager
def crowd(number: int) -> Iterator[str]:
    """The URL of an endpoint whose first `number` answers come when so many have been asked for."""
    barrier = threading.Barrier(number)
    left = iter(range(number))

    def answer(_: Asked) -> dict[str, Any]:
        if next(left, None) is not None:
            barrier.wait(20)
        return completion("x")

    with endpoint(answer) as stub:
        yield f"{stub.base_url}/chat/completions"


async def test_so_many_pools_as_are_needed_and_the_first_is_used_first(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made = Made()
    with crowd(MANY) as url:
        async with httpx.AsyncClient(transport=AsyncPools(made.of_loop), timeout=30) as client:
            answers = await asyncio.gather(*(client.post(url, json={}) for _ in range(MANY)))
            assert {a.status_code for a in answers} == {200}
            assert made.made == 3
            for _ in range(5):
                await client.post(url, json={})
            assert (made.made, made.closed) == (3, 0)
            monkeypatch.setattr(pools, "_IDLE", 0.0)
            for _ in range(3):
                await client.post(url, json={})
            assert (made.made, made.closed) == (3, 2)  # the first stays
    assert made.closed == 3


def test_threads_share_them(monkeypatch: pytest.MonkeyPatch) -> None:
    made = Made()
    with crowd(MANY) as url, ThreadPoolExecutor(MANY) as threads:
        with httpx.Client(transport=SyncPools(made.sync), timeout=30) as client:
            answers = list(threads.map(lambda _: client.post(url, json={}), range(MANY)))
            assert {a.status_code for a in answers} == {200}
            monkeypatch.setattr(pools, "_IDLE", 0.0)
            for _ in range(3):
                client.post(url, json={})
            assert (made.made, made.closed) == (3, 2)
    assert made.closed == 3


async def test_a_request_that_fails_or_is_left_gives_its_place_back() -> None:
    made = Made()
    until = threading.Event()
    with endpoint(lambda _: Answer(events=streamed("ab").events, until=until)) as stub:
        url = f"{stub.base_url}/chat/completions"
        async with httpx.AsyncClient(transport=AsyncPools(made.of_loop)) as client:
            for _ in range(SIDE_BY_SIDE + 1):
                with pytest.raises(httpx.ConnectError):
                    await client.post("http://127.0.0.1:1/", json={})
                with pytest.raises(TimeoutError):
                    async with asyncio.timeout(0.01):
                        await client.post(url, json={})
                async with client.stream("POST", url, json={}) as answer:
                    assert answer.status_code == 200
        until.set()
    assert made.made == 1


async def test_a_caller_who_leaves_while_an_idle_pool_is_closed_loses_no_place(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Cancelled there, a response that had come was never closed: its call was lost for good."""
    made = Made()
    asked = 0

    def slow_to_close() -> httpx.AsyncBaseTransport:
        transport = made.of_loop()
        close = transport.aclose

        async def slowly() -> None:
            await close()
            await asyncio.sleep(30)

        monkeypatch.setattr(transport, "aclose", slowly)
        return transport

    def answer(_: Asked) -> dict[str, Any]:
        nonlocal asked
        asked += 1
        return completion("x")

    with crowd(SIDE_BY_SIDE + 1) as url, endpoint(answer) as stub:
        transport = AsyncPools(slow_to_close)
        client = httpx.AsyncClient(transport=transport, timeout=30)
        await asyncio.gather(*(client.post(url, json={}) for _ in range(SIDE_BY_SIDE + 1)))
        monkeypatch.setattr(pools, "_IDLE", 0.0)
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.5):
                await client.post(f"{stub.base_url}/chat/completions", json={})
        assert asked == 0, "an answer was asked for and left"
        assert [pool.busy for pool in transport._pools._pools] == [0]
        monkeypatch.undo()
        await client.aclose()
