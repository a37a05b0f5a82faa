"""The wire tee: HTTP transports that send each chat completion where it belongs, and record it.

In: a request of an OpenAI client, and a `Route` that says where it goes and which scope it belongs
to. Out: the response, and one `ModelCall` a choice in the scope: request as sent, response bytes as
received, recorded at the latest when the response is closed, whatever closes it. Other paths than
/chat/completions pass unrecorded. It leaves out who asks: `Route.origin` comes from the caller.
"""

from __future__ import annotations

import asyncio
import functools
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from dataclasses import replace
from http.cookiejar import CookieJar, DefaultCookiePolicy
from typing import Any

import httpx2 as httpx  # the one that openai >= 3 is built on
import openai

from art_core.calls import ModelCall
from art_core.capture import Scope, Target
from art_core.connections import Connections
from art_core.exchange import calls_of_reply
from art_core.json_bytes import read_json, write_json
from art_core.reply import Reply, read_reply
from art_core.route import Route, prepare_body
from art_core.slim import SlimStream, slim_body

PLACEHOLDER_URL = "http://art.invalid/v1"
"""Base URL of a client that learns its endpoint call by call; RFC 2606 keeps it unreachable."""
HOLD_TIMEOUT = 1200.0
"""Seconds a client waits for an answer: calls are held while the policy trains."""
ROLLOUT_HEADER = "x-art-rollout"

_CLOSED = "the client closed the response before its end"
_CANCELLED = "CancelledError"
CALLER_LEFT = (_CLOSED, _CANCELLED)
"""Errors of calls that their own caller did not wait for."""

_OF_OPENAI = ("OpenAI-Organization", "OpenAI-Project")
"""Headers that OpenAI's client takes from the environment; they are none of another server's."""
_CHAT = "/chat/completions"
_UNRECORDED = ("/completions", "/responses")


def async_client(route: Callable[[], Route]) -> httpx.AsyncClient:
    """The `http_client=` of an `AsyncOpenAI` that records.

    Args:
        route: asked at each HTTP attempt, in the caller's context.
    """
    return openai.DefaultAsyncHttpxClient(transport=AsyncTee(route), **_settings())


def sync_client(route: Callable[[], Route]) -> httpx.Client:
    """The `http_client=` of an `OpenAI` that records; `route` as for `async_client`."""
    return openai.DefaultHttpxClient(transport=SyncTee(route), **_settings())


def _settings() -> dict[str, Any]:
    """No redirects, no cookies: a client serves many targets, and none may lead it to another."""
    return {
        "timeout": httpx.Timeout(HOLD_TIMEOUT, connect=10.0),
        "follow_redirects": False,
        "headers": {"Accept-Encoding": "identity"},
        "cookies": CookieJar(DefaultCookiePolicy(allowed_domains=[])),
    }


# --- the transports


class SyncTee(httpx.BaseTransport):
    """Sends and records the requests of a sync client."""

    def __init__(self, route: Callable[[], Route]) -> None:
        self._route = route

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        exchange = _address(request, self._route())
        if exchange is None:
            return _CONNECTIONS.for_thread(request.url).handle_request(request)
        try:
            inner = _CONNECTIONS.for_thread(request.url)
            response = inner.handle_request(request)
        except BaseException as error:
            exchange.finish(_name(error))
            raise
        exchange.answered(response)
        if exchange.streamed:
            response.stream = _SyncBody(response.stream, exchange)
            return response
        body: Any = response.stream
        try:
            for chunk in body:
                exchange.received(chunk)
            exchange.finish()
        except BaseException as error:
            exchange.finish(_name(error))
            raise
        finally:
            body.close()
        response.stream = httpx.ByteStream(exchange.slimmed())
        return response


class AsyncTee(httpx.AsyncBaseTransport):
    """Sends and records the requests of an async client, from any event loop."""

    def __init__(self, route: Callable[[], Route]) -> None:
        self._route = route

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        exchange = _address(request, self._route())
        if exchange is None:
            inner = await _CONNECTIONS.for_loop(request.url)
            return await inner.handle_async_request(request)
        try:
            inner = await _CONNECTIONS.for_loop(request.url)
            response = await inner.handle_async_request(request)
        except BaseException as error:
            exchange.finish(_name(error))
            raise
        exchange.answered(response)
        if exchange.streamed:
            response.stream = _AsyncBody(response.stream, exchange)
            return response
        body: Any = response.stream
        try:
            async for chunk in body:
                exchange.received(chunk)
            exchange.finish()
        except BaseException as error:
            exchange.finish(_name(error))
            raise
        finally:
            await body.aclose()
        response.stream = httpx.ByteStream(exchange.slimmed())
        return response


class _SyncBody(httpx.SyncByteStream):
    """A response body that is noted down as it is read."""

    def __init__(self, inner: Any, exchange: _Exchange) -> None:
        self._inner = inner
        self._exchange = exchange

    def __iter__(self) -> Iterator[bytes]:
        try:
            for chunk in self._inner:
                yield self._exchange.received(chunk)
            self._exchange.finish()
            yield self._exchange.rest()
        except BaseException as error:
            self._exchange.finish(_name(error))
            raise

    def close(self) -> None:
        try:
            self._inner.close()
        finally:
            self._exchange.finish(_CLOSED)


class _AsyncBody(httpx.AsyncByteStream):
    """As `_SyncBody`, for async clients."""

    def __init__(self, inner: Any, exchange: _Exchange) -> None:
        self._inner = inner
        self._exchange = exchange

    async def __aiter__(self) -> AsyncIterator[bytes]:
        try:
            async for chunk in self._inner:
                yield self._exchange.received(chunk)
            self._exchange.finish()
            yield self._exchange.rest()
        except BaseException as error:
            self._exchange.finish(_name(error))
            raise

    async def aclose(self) -> None:
        try:
            await self._inner.aclose()
        finally:
            self._exchange.finish(_CLOSED)


def _name(error: BaseException) -> str:
    """An exception in a line; leaving a generator early is the client's way to close.

    A cancel's message is between whoever cancels and its tasks: LangGraph puts an object there.
    """
    if isinstance(error, GeneratorExit):
        return _CLOSED
    if isinstance(error, asyncio.CancelledError):
        return _CANCELLED
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__


# --- one HTTP attempt


def _address(request: httpx.Request, route: Route) -> _Exchange | None:
    """Point a request at its target, in place; an `_Exchange` if it is a call to be recorded."""
    _redirect(request, route.target)
    path = request.url.path
    if request.method != "POST" or not path.endswith(_CHAT):
        if route.scope is not None and path.endswith(_UNRECORDED):
            route.scope.note(f"POST {path} was called; only {_CHAT} is recorded")
        return None
    body = read_json(request.content)
    sent = prepare_body(body, route)
    content = write_json(sent)
    request.stream = httpx.ByteStream(content)
    request.headers["Content-Length"] = str(len(content))
    if route.scope is None:
        return None
    if route.target.token_data:
        request.headers[ROLLOUT_HEADER] = route.scope.rollout_id
    return _Exchange(route, route.scope, sent, asked=body)


def _redirect(request: httpx.Request, target: Target) -> None:
    """Give a request without an endpoint its URL, and the key of its target."""
    if request.url.host != _PLACEHOLDER.host:
        return
    path = request.url.raw_path.decode().removeprefix(_PLACEHOLDER.path)
    request.url = _join(target.base_url, path)
    request.headers["Host"] = request.url.netloc.decode()
    request.headers["Authorization"] = f"Bearer {target.api_key}"
    for name in _OF_OPENAI:
        request.headers.pop(name, None)


@functools.lru_cache(maxsize=256)
def _join(base_url: str, path: str) -> httpx.URL:
    return httpx.URL(base_url.rstrip("/") + path)


class _Exchange:
    """One HTTP attempt of a call, until it is recorded. `finish` may come from any thread."""

    def __init__(
        self, route: Route, scope: Scope, sent: dict[str, Any], asked: Mapping[str, Any]
    ) -> None:
        self.streamed = False
        self._route = route
        self._scope = scope
        self._sent = sent
        self._asked = asked
        self._status: int | None = None
        self._encoding = "identity"
        self._chunks: list[bytes] = []
        self._slim: SlimStream | None = None
        self._reply: Reply | None = None
        self._lock = threading.RLock()  # a garbage collection inside may close the response
        self._finished = False
        self._started = time.time()
        self._place = scope.begin(self, route.origin.run_id)

    def answered(self, response: httpx.Response) -> None:
        """The head of the response is here."""
        self._status = response.status_code
        self._encoding = response.headers.get("content-encoding", "identity")
        kind = response.headers.get("content-type", "")
        asked = self._sent.get("stream") and response.status_code == 200 and "json" not in kind
        self.streamed = bool(asked) or kind.startswith("text/event-stream")
        if self.streamed and self._encoding == "identity":
            self._slim = SlimStream(self._asked)

    def received(self, chunk: bytes) -> bytes:
        """A part of the body is here; returns what of it goes to the client now."""
        self._chunks.append(chunk)
        return chunk if self._slim is None else self._slim.feed(chunk)

    def rest(self) -> bytes:
        """What the client has yet to get when the body has come to its end."""
        return b"" if self._slim is None else self._slim.rest()

    def finish(self, error: str | None = None) -> None:
        """Record the call; only the first time counts."""
        with self._lock:
            if self._finished:
                return
            self._finished = True
            try:
                for call in self._calls(error):
                    self._scope.add(call, self._place)
            finally:
                self._scope.end(self)

    def _calls(self, error: str | None) -> list[ModelCall]:
        raw = b"".join(self._chunks)
        if self._encoding != "identity":
            try:
                raw = _decoded(raw, self._encoding)
            except httpx.DecodingError as fault:
                error = error or f"the body can't be decoded: {fault}"
        self._reply = read_reply(raw, self._status, streamed=self.streamed, error=error)
        calls = calls_of_reply(
            self._reply,
            self._sent,
            raw,
            origin=self._route.origin,
            started=self._started,
            ended=time.time(),
        )
        return calls if self._route.target.token_data else list(map(_as_others, calls))

    def slimmed(self) -> bytes:
        """A plain body as the client gets it; what is compressed or no completion, as it came."""
        reply = self._reply
        if reply is None or not reply.choices or reply.body is None or self._encoding != "identity":
            return b"".join(self._chunks)
        return slim_body(reply.body, self._asked)


def _as_others(call: ModelCall) -> ModelCall:
    """The call as context, unless there are tokens to train, here or in our server's records."""
    has_tokens = call.sampled_ids is not None or not call.record_id.startswith("local-")
    is_told = has_tokens or call.error is not None or call.left_out is not None
    return call if is_told else replace(call, left_out="other model")


def _decoded(raw: bytes, encoding: str) -> bytes:
    if encoding == "identity":
        return raw
    return httpx.Response(200, headers={"content-encoding": encoding}, content=raw).content


_PLACEHOLDER = httpx.URL(PLACEHOLDER_URL)
_CONNECTIONS = Connections()
