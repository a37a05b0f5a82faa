"""Requests to a server: repeated where that is safe, their faults as typed errors.

In: a method, a path, and a body that can be made anew. Out: the response, or an error of the class
that `LocalBackend` would raise. A request is repeated if it only asks, or carries an idempotency
key: the server does a thing once for each key.
"""

from __future__ import annotations

import asyncio
import json
import logging
import math
import random
import time
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from contextlib import asynccontextmanager, suppress
from email.utils import parsedate_to_datetime
from typing import Any
from urllib.parse import urlsplit
from weakref import WeakKeyDictionary

import httpx2

from art_core.connections import is_loopback
from art_core.errors import (
    ARTError,
    BadAnswer,
    ConfigError,
    RequestRefused,
    ServerBusy,
    ServerError,
    ServerFault,
    ServerUnreachable,
    WrongKey,
)
from art_core.wire.errors import error_from_json
from art_core.wire.protocol import WIRE, WIRE_HEADER

_log = logging.getLogger(__name__)

_ATTEMPTS = 8
_FIRST_WAIT, _LONGEST_WAIT = 0.25, 15.0
"""Seconds between attempts; each wait is twice the one before, and drawn from its upper half."""
_TIMEOUT = httpx2.Timeout(60.0, connect=10.0)
_LONGEST_ASKED = 60.0
"""Seconds that a server may ask to wait; it is an error if it asks for more."""
_PASSING = (500, 502, 504)
"""A proxy's word that the server is away for a moment."""
_MAX_FAULT = 2**20
Body = Callable[[], Iterable[bytes]]
"""Makes a body; once for each attempt."""


class Http:
    """A server's address, and how it is asked. May be used on any event loop.

    Args:
        url: of the server, such as "http://gpu-box:7999".
        api_key: None sends none.

    Raises:
        ConfigError: `url` is none of a server, or `api_key` can't be sent.
    """

    def __init__(self, url: str, api_key: str | None) -> None:
        host = _host(url)
        self.url = url.rstrip("/").removesuffix("/v1")
        self._is_loopback = is_loopback(host)
        self.key = None if api_key is None else _checked(api_key)
        self._clients: WeakKeyDictionary[asyncio.AbstractEventLoop, httpx2.AsyncClient] = (
            WeakKeyDictionary()
        )

    def __repr__(self) -> str:
        return f"Http({self.url!r})"

    async def ask(
        self,
        method: str,
        path: str,
        *,
        content: dict[str, Any] | None = None,
        query: dict[str, Any] | None = None,
        headers: dict[str, str] | None = None,
        body: Body | None = None,
        repeats: bool = True,
    ) -> httpx2.Response:
        """The whole response to a request.

        Args:
            content: sent as JSON.
            body: instead, in pieces.
            repeats: it is safe to send it again.

        Raises:
            ServerError: a kind of it says what is wrong between the two.
            ARTError: what the server raised, as the same class.
        """
        for attempt in range(_ATTEMPTS if repeats else 1):
            wait = _wait(attempt)
            try:
                async with self._sent(
                    method, path, content=content, query=query, headers=headers, body=body
                ) as response:
                    await response.aread()
                    return response
            except (ServerUnreachable, ServerBusy) as error:
                if attempt == _ATTEMPTS - 1 or not repeats:
                    raise
                if isinstance(error, ServerBusy) and error.retry_after is not None:
                    wait = _asked_for(error, error.retry_after)
                _log.info("%s %s is sent again in %.1f s: %s", method, path, wait, error)
                await asyncio.sleep(wait)
        raise AssertionError("unreachable")

    @asynccontextmanager
    async def stream(
        self, method: str, path: str, *, headers: dict[str, str] | None = None
    ) -> AsyncIterator[httpx2.Response]:
        """A response whose body is read as it comes; asked for once.

        Raises:
            ServerError, ARTError: as `ask`.
        """
        async with self._sent(method, path, headers=headers) as response:
            yield response

    async def close(self) -> None:
        """Close the connections of this event loop; those of loops that ended went with them."""
        client = self._clients.pop(asyncio.get_running_loop(), None)
        if client is not None:
            await client.aclose()

    @asynccontextmanager
    async def _sent(
        self,
        method: str,
        path: str,
        *,
        content: dict[str, Any] | None = None,
        query: dict[str, Any] | None = None,
        headers: dict[str, str] | None = None,
        body: Body | None = None,
    ) -> AsyncIterator[httpx2.Response]:
        told = {WIRE_HEADER: str(WIRE), **(headers or {})}
        if self.key is not None:
            told["authorization"] = f"Bearer {self.key}"
        pieces = None if body is None else _in_thread(body())
        try:
            async with self._client().stream(
                method, self.url + path, json=content, params=query, headers=told, content=pieces
            ) as response:
                if not response.is_success:
                    raise await _fault(response, self.url)
                yield response
        except httpx2.HTTPError as error:
            raise ServerUnreachable(
                f"the server does not answer ({type(error).__name__}: {error})",
                got=self.url,
                fix="Check that `art-langgraph serve` runs there, the port, and what is between.",
            ) from error

    def _client(self) -> httpx2.AsyncClient:
        loop = asyncio.get_running_loop()
        if loop not in self._clients:
            self._clients[loop] = httpx2.AsyncClient(
                timeout=_TIMEOUT, follow_redirects=False, trust_env=not self._is_loopback
            )
        return self._clients[loop]


def _host(url: str) -> str:
    """The host in a server's URL; neither name nor password may stand before it."""
    try:
        parts = urlsplit(url)
        host, is_open = parts.hostname, "@" not in parts.netloc
        is_whole = parts.scheme in ("http", "https") and not parts.query and parts.port != 0
    except ValueError:
        host, is_open, is_whole = None, "@" not in url, False
    if host and is_whole and is_open:
        return host
    raise ConfigError(
        "the URL of a server",
        got=url if is_open else "one with a name or a password, which is not shown",
        expected='such as "http://gpu-box:7999"',
        fix='Give what `art-langgraph serve` prints, and the key apart: api_key="...".',
    )


def _checked(api_key: str) -> str:
    """The key without the line end that a file has; an error never shows it."""
    key = api_key.strip()
    if not key or not all("!" <= character <= "~" for character in key):
        raise ConfigError(
            "the API key of a server is blank, or holds what a header can't",
            expected="visible ASCII characters",
        )
    return key


async def _in_thread(chunks: Iterable[bytes]) -> AsyncIterator[bytes]:
    """Pieces of a body, each made in a thread, so that the event loop goes on."""
    source: Iterator[bytes] = iter(chunks)
    while True:
        chunk = await asyncio.to_thread(next, source, None)
        if chunk is None:
            return
        yield chunk


async def _fault(response: httpx2.Response, url: str) -> ARTError:
    """The error that an answer tells of."""
    status = response.status_code
    if status < 400:
        return BadAnswer(
            f"what answers at {url} sends its clients elsewhere: {status}",
            status=status,
            got=response.headers.get("location", ""),
            fix="Give the URL that it leads to: the key is not carried along.",
        )
    raw = b""
    with suppress(httpx2.HTTPError):
        async for part in response.aiter_bytes():
            raw += part
            if len(raw) > _MAX_FAULT:
                break
    try:
        told = json.loads(raw)
        message = str(told["error"]["message"])
    except (ValueError, KeyError, TypeError, RecursionError):
        told, message = {}, ""
    if status in (429, 503):
        return ServerBusy(
            message or "the server is busy", status=status, retry_after=_after(response.headers)
        )
    if status in _PASSING and not message:
        return ServerUnreachable(f"the server is away: {status}", status=status, got=url)
    if isinstance(told, dict) and "art" in told:
        return error_from_json(told["art"])
    if status == 401:
        return WrongKey(
            message or "the server asks for a key",
            status=status,
            fix='Give it: art.HttpBackend(url, api_key="...").',
        )
    if not message:
        return BadAnswer(
            f"what answers at {url} is no art-langgraph server: {status}",
            status=status,
            got=raw[:200].decode("utf-8", "replace"),
            fix="Check the URL, and the proxy in between.",
        )
    kind: type[ServerError] = ServerFault if status >= 500 else RequestRefused
    return kind(message, status=status)


def _asked_for(error: ServerBusy, seconds: float) -> float:
    """The wait before the next attempt.

    Raises:
        ServerBusy: it is longer than anybody waits.
    """
    if seconds > _LONGEST_ASKED:
        raise ServerBusy(
            f"the server asks to wait {seconds:.0f} s; {error.what}",
            status=error.status,
            retry_after=seconds,
            expected=f"at most {_LONGEST_ASKED:.0f} s",
            fix="Try again later.",
        ) from error
    return seconds + random.random() * _FIRST_WAIT


def _after(headers: httpx2.Headers) -> float | None:
    """Seconds that the server asks to wait, as a number or a date; None: it does not say."""
    for name, unit in (("retry-after-ms", 1000.0), ("retry-after", 1.0)):
        told = headers.get(name, "").strip()
        try:
            seconds = float(told) / unit
        except ValueError:
            seconds = _until(told)
        if 0.0 <= seconds < math.inf:
            return seconds
    return None


def _until(date: str) -> float:
    """Seconds until an HTTP date, 0 if it is over; NaN if it is none."""
    try:
        return max(0.0, parsedate_to_datetime(date).timestamp() - time.time())
    except (ValueError, TypeError, OverflowError):
        return math.nan


def _wait(attempt: int) -> float:
    longest = min(_LONGEST_WAIT, _FIRST_WAIT * 2.0**attempt)
    return longest * (0.5 + random.random() / 2)
