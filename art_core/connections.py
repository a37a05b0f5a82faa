"""Connection pools of this process: one for sync callers, one for each event loop.

In: the URL that is about to be called. Out: the httpx transport that carries it. An async pool is
tied to its loop and closed by that loop's own shutdown, so `asyncio.run` may be called as often as
one likes. Proxies come from the environment; loopback never goes through one.
"""

from __future__ import annotations

import asyncio
import atexit
import functools
import ipaddress
import os
import ssl
import threading
import urllib.request
from collections.abc import AsyncGenerator
from dataclasses import dataclass
from typing import Any

import httpx2 as httpx  # the one that openai >= 3 is built on

from art_core.pools import AsyncPools, SyncPools

_LIMITS = httpx.Limits(
    max_connections=None,
    max_keepalive_connections=None,
    keepalive_expiry=4.0,  # seconds; below the 5 s after which uvicorn hangs up on idle clients
)

_PROXY_VARIABLES = (
    *(f"{kind}_proxy" for kind in ("http", "https", "all", "no")),
    *(f"{kind}_PROXY" for kind in ("HTTP", "HTTPS", "ALL", "NO")),
    "REQUEST_METHOD",
)
"""What `urllib.request.getproxies` reads of the environment."""


@dataclass(frozen=True)
class _Door:
    """What a pool is made for."""

    tls: bool
    proxy: str | None


class Connections:
    """Pools by event loop, made at first use. Safe from any thread, and after a fork."""

    def __init__(self) -> None:
        self._sync: dict[tuple[int, _Door], SyncPools] = {}
        self._async: dict[tuple[asyncio.AbstractEventLoop, _Door], _LoopPool] = {}
        self._lock = threading.Lock()

    def for_thread(self, url: httpx.URL) -> httpx.BaseTransport:
        """The pool for a sync call to `url`."""
        key = (os.getpid(), _door(url))
        with self._lock:
            if not self._sync:
                atexit.register(self.close)
            if key not in self._sync:
                self._sync[key] = SyncPools(lambda: httpx.HTTPTransport(**_settings(key[1])))
            return self._sync[key]

    async def for_loop(self, url: httpx.URL) -> httpx.AsyncBaseTransport:
        """The pool of the running loop for a call to `url`."""
        key = (asyncio.get_running_loop(), _door(url))
        if (pool := self._async.get(key)) is not None:
            return pool.transport
        transport = AsyncPools(lambda: httpx.AsyncHTTPTransport(**_settings(key[1])))
        keeper = self._keep(key, transport)
        with self._lock:
            for other in [k for k in self._async if k[0].is_closed()]:
                del self._async[other]
            self._async[key] = _LoopPool(transport, keeper)
        await anext(keeper)
        return transport

    async def _keep(
        self, key: tuple[asyncio.AbstractEventLoop, _Door], transport: AsyncPools
    ) -> AsyncGenerator[None, None]:
        """Held open at its yield: a loop that shuts down closes the generators it has started."""
        try:
            yield
        finally:
            with self._lock:
                self._async.pop(key, None)
            await transport.aclose()

    def close(self) -> None:
        """Close this process's sync pools."""
        with self._lock:
            for (pid, _), transport in self._sync.items():
                if pid == os.getpid():
                    transport.close()
            self._sync.clear()


@dataclass(frozen=True)
class _LoopPool:
    transport: AsyncPools
    keeper: AsyncGenerator[None, None]


def _settings(door: _Door) -> dict[str, Any]:
    """Of a pool that goes through `door`."""
    return {"verify": _tls(door.tls), "proxy": door.proxy, "limits": _LIMITS}


def _door(url: httpx.URL) -> _Door:
    return _door_to(url.scheme, url.host, tuple(map(os.environ.get, _PROXY_VARIABLES)))


@functools.lru_cache(maxsize=256)
def _door_to(scheme: str, host: str, _environment: tuple[str | None, ...]) -> _Door:
    """Kept by what the environment says of proxies: to read all of it takes 70 us."""
    return _Door(tls=scheme == "https", proxy=_proxy(scheme, host))


def _proxy(scheme: str, host: str) -> str | None:
    """The proxy that the environment names for a host."""
    if is_loopback(host) or urllib.request.proxy_bypass(host):
        return None
    proxies = urllib.request.getproxies()
    return proxies.get(scheme) or proxies.get("all")


@functools.lru_cache(maxsize=256)
def is_loopback(host: str) -> bool:
    """True if `host` is this machine."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost" or host.endswith(".localhost")


def _tls(wanted: bool) -> ssl.SSLContext | bool:
    """A verifying context where TLS is spoken; reading the certificates takes 20 ms."""
    return _verifying_context() if wanted else False


@functools.cache
def _verifying_context() -> ssl.SSLContext:
    return httpx.create_ssl_context()
