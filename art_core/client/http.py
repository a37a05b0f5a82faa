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
from urllib.parse import SplitResult, urlsplit

import httpx2

from art_core.connections import Connections
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
_LONGEST_TOLD = 60.0
"""Seconds that a server may ask to wait; a longer wait is the caller's decision."""
_FAULTS = 3
"""How often a fault of the server's own is asked for: it may pass, and seldom does."""
_PASSING = (502, 503, 504)
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
        _check_url(url)
        self.url = url.rstrip("/").removesuffix("/v1")
        self.key = None if api_key is None else _checked(api_key)
        self._client = httpx2.AsyncClient(
            transport=_Pooled(), timeout=_TIMEOUT, follow_redirects=False
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
        for attempt in range(1, _ATTEMPTS + 1):
            try:
                async with self._sent(
                    method, path, content=content, query=query, headers=headers, body=body
                ) as response:
                    await response.aread()
                    return response
            except (ServerUnreachable, ServerBusy, ServerFault) as error:
                most = _FAULTS if isinstance(error, ServerFault) else _ATTEMPTS
                if attempt >= most or not repeats:
                    raise
                wait = _wait(attempt, error)
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
            async with self._client.stream(
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


class _Pooled(httpx2.AsyncBaseTransport):
    """Each event loop's own connections; loopback goes through no proxy."""

    async def handle_async_request(self, request: httpx2.Request) -> httpx2.Response:
        inner = await _CONNECTIONS.for_loop(request.url)
        return await inner.handle_async_request(request)


_CONNECTIONS = Connections()


def _check_url(url: str) -> None:
    try:
        parts: SplitResult | None = urlsplit(url)
        assert parts is not None
        is_good = bool(parts.scheme in ("http", "https") and parts.hostname and not parts.query)
        _ = parts.port
    except ValueError:
        parts, is_good = None, False
    if parts is not None and parts.username is not None:
        raise ConfigError(
            "the URL of a server holds a name or a password",
            expected='such as "http://gpu-box:7999"',
            fix='Give the key apart: art.HttpBackend(url, api_key="...").',
        )
    if not is_good:
        raise ConfigError(
            "the URL of a server",
            got=url,
            expected='such as "http://gpu-box:7999"',
            fix="Give what `art-langgraph serve` prints.",
        )


def _checked(api_key: str) -> str:
    """The key without the line end that a file has; never told in an error."""
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
    raw = b""
    with suppress(httpx2.HTTPError):
        async for part in response.aiter_bytes():
            raw += part
            if len(raw) > _MAX_FAULT:
                break
    if response.is_redirect:
        return BadAnswer(
            f"{url} sends its clients elsewhere",
            status=status,
            got=response.headers.get("location", ""),
            fix="Give the URL that it leads to: a key is not carried along.",
        )
    try:
        told = json.loads(raw)
        message = str(told["error"]["message"])
    except (ValueError, KeyError, TypeError, RecursionError):
        told, message = {}, ""
    if status == 429 or (status == 503 and _after(response) is not None):
        return _busy(status, message, _after(response))
    if isinstance(told, dict) and "art" in told:
        return error_from_json(told["art"])
    if status in _PASSING:
        return ServerUnreachable(f"the server is away: {status}", status=status, got=url)
    if status == 401:
        return WrongKey(
            message or "the server asks for a key",
            status=status,
            fix='Give it: art.HttpBackend(url, api_key="...").',
        )
    if not message and status < 500:
        return BadAnswer(
            f"what answers at {url} is no art-langgraph server: {status}",
            status=status,
            got=raw[:200].decode("utf-8", "replace"),
            fix="Check the URL, and the proxy in between.",
        )
    kind: type[ServerError] = ServerFault if status >= 500 else RequestRefused
    return kind(message or "the server failed and says no more", status=status)


def _busy(status: int, message: str, after: float | None) -> ServerBusy:
    fix = "Ask again later, or give it less at once."
    if after is not None and after > _LONGEST_TOLD:
        fix = f"It asks to wait {after:g} s; nothing here waits longer than {_LONGEST_TOLD:g} s."
    return ServerBusy(message or "the server is busy", status=status, retry_after=after, fix=fix)


def _after(response: httpx2.Response) -> float | None:
    """Seconds that the server asks to wait, by a number or a date; None if it is not clear."""
    told = response.headers.get("retry-after", "").strip()
    try:
        if milliseconds := response.headers.get("retry-after-ms"):
            seconds = float(milliseconds) / 1000
        elif told[:1].isalpha():
            seconds = max(0.0, parsedate_to_datetime(told).timestamp() - time.time())
        else:
            seconds = float(told)
    except (ValueError, OverflowError):
        return None
    return seconds if 0 <= seconds < math.inf else None


def _wait(attempt: int, error: ServerError) -> float:
    """Seconds before the next attempt.

    Raises:
        ServerBusy: `error`, which asks to wait for too long.
    """
    told = error.retry_after if isinstance(error, ServerBusy) else None
    if told is not None and told > _LONGEST_TOLD:
        raise error
    if told is not None:
        return told + random.random() / 4  # so that those who wait do not come at once
    longest = min(_LONGEST_WAIT, _FIRST_WAIT * 2.0 ** (attempt - 1))
    return longest * (0.5 + random.random() / 2)
