"""The door of a server: who may come in, and how much of what they bring is taken.

In: an ASGI app, a key, the names the server goes by. Out: the same app, which sees a request only
if it has the key, and comes from no web page of another site; bodies are bounded and must keep
coming. All is checked before routing, so that an unknown route tells a stranger nothing. Left out:
what is bounded on the connection (patient_http.py), and what a route makes of a body.
"""

from __future__ import annotations

import asyncio
import hmac
import json
import re
import time
from collections.abc import Collection
from dataclasses import dataclass
from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from art_core.engine.api_errors import ApiError, error_headers, error_response
from art_core.errors import ConfigError, EngineError

LOOPBACK = frozenset({"127.0.0.1", "localhost", "::1"})
MAX_BODY_BYTES = 16 * 2**20
"""Of a request's JSON."""
OPEN_PATH = "/health"
"""The one path that asks for no key."""
_RETRY_SECONDS = 2


@dataclass(frozen=True)
class DoorLimits:
    """How much one request may bring, and how many may be under way."""

    headers: int = 100
    body_bytes: int = MAX_BODY_BYTES
    uploads: re.Pattern[str] | None = None
    """Paths of the routes that bound their bodies themselves; None: there are none."""
    json_only: bool = True
    """Bodies, but for uploads, must be called JSON: what a web page can send unasked, is not."""
    patience: float = 30.0
    """Seconds that a body may take to come, beyond those that `bytes_per_second` gives it."""
    bytes_per_second: int = 1024
    requests: int = 8192
    """Under way at once; those beyond are sent away with 503."""


def check_address(host: str, api_key: str | None) -> str | None:
    """The key as clients must send it, if a server may listen on `host` with it; None: no key.

    Raises:
        ConfigError: the key is blank or can't be sent, or the network could come in without one.
    """
    key = None if api_key is None else api_key.strip()
    if key == "" or (key is not None and not (key.isascii() and key.isprintable())):
        raise ConfigError(
            "the API key can't be used",
            got="a blank" if key == "" else "letters that a header can't carry",
            expected="printable ASCII",
            fix="Set another key, or, on a loopback address, none.",
        )
    if key is None and host not in LOOPBACK:
        raise ConfigError(
            "the server would be open to the network",
            got=host,
            expected="a loopback address, or a key",
            fix="Set ART_API_KEY (or --api-key, which others see in the list of processes).",
        )
    return key


class Door:
    """ASGI middleware: lets in who may come in, answers others in OpenAI's error shape.

    A missing or wrong key is 401, whatever else is wrong with the request. It comes as
    `Authorization: Bearer <key>` or as `x-api-key: <key>`; of several each must be right. A Host
    that is not ours, or an Origin, is 403: browsers send these for pages made to reach in.

    Args:
        api_key: None asks for none.
        is_loopback: the server listens on a loopback address: it goes by no other name than this
            machine's and `hosts`.
        hosts: names that the server goes by; none: on other addresses any, but a web page must
            come from the very name that it calls.
    """

    def __init__(
        self,
        app: ASGIApp,
        *,
        api_key: str | None,
        is_loopback: bool,
        hosts: Collection[str] = (),
        limits: DoorLimits | None = None,
    ) -> None:
        self._app = app
        self._key = None if api_key is None else api_key.encode()
        named = frozenset(host.lower() for host in hosts)
        self._hosts = named | LOOPBACK if named or is_loopback else None
        self._limits = limits or DoorLimits()
        self._under_way = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        error = self._error(scope["path"], Headers(scope=scope))
        if error is not None:
            await _refuse(send, error)
            return
        self._under_way += 1
        try:
            await self._let_in(scope, receive, send)
        finally:
            self._under_way -= 1

    async def _let_in(self, scope: Scope, receive: Receive, send: Send) -> None:
        body = _Body(receive, self._most(scope["path"]), self._limits)
        opened: Message | None = None

        async def watched(message: Message) -> None:
            nonlocal opened
            if body.error is None or opened is not None:
                opened = opened or message
                await send(message)
            elif not body.is_refused:  # whatever the app makes of it, this is what went wrong
                body.is_refused = True
                await _refuse(send, body.error)

        try:
            await self._app(scope, body, watched)
        except (
            asyncio.CancelledError
        ):  # the server stops, and this is the end of the request's task
            stopping = EngineError("the server is stopping")
            if opened is None:
                await _refuse(send, stopping, status=503)
            elif _is_event_stream(opened):
                event = b"data: %b\n\n" % json.dumps(error_response(stopping)[1]).encode()
                await send({"type": "http.response.body", "body": event})
            else:
                raise

    def _error(self, path: str, headers: Headers) -> ApiError | None:
        """Why the request is not let in."""
        if path != OPEN_PATH and not self._has_key(headers):
            return ApiError(
                "wrong API key or none",
                expected="Authorization: Bearer <key>, or x-api-key: <key>",
                code="invalid_api_key",
                status=401,
            )
        return self._stranger(headers) or self._too_much(path, headers)

    def _has_key(self, headers: Headers) -> bool:
        if self._key is None:
            return True
        told = [_bearer(value) for value in headers.getlist("authorization")]
        told += [value.strip() for value in headers.getlist("x-api-key")]
        right = [hmac.compare_digest(key.encode(), self._key) for key in told]
        return bool(right) and all(right)

    def _stranger(self, headers: Headers) -> ApiError | None:
        """A request that came by another name, or out of another site's page."""
        hosts = [_host_of(value) for value in headers.getlist("host")]
        ours = self._hosts if self._hosts is not None else set(hosts) - {None}
        origins = [_host_of(value) for value in headers.getlist("origin")]
        for name, found in (("Host", hosts), ("Origin", origins)):
            foreign = [host for host in found if host not in ours]
            if foreign:
                return ApiError(
                    f"the {name} header names another machine",
                    got=foreign[0],
                    expected="a name this server goes by",
                    status=403,
                )
        return None

    def _too_much(self, path: str, headers: Headers) -> ApiError | None:
        limits, most = self._limits, self._most(path)
        declared = headers.get("content-length", "0")
        if len(headers) > limits.headers:
            return ApiError(
                "the request has too many headers",
                got=len(headers),
                expected=f"at most {limits.headers}",
                status=431,
            )
        if most is not None and declared.isdecimal() and int(declared) > most:
            return _too_large(int(declared), most)
        kind = headers.get("content-type", "").partition(";")[0].strip().lower()
        has_body = declared != "0" or "transfer-encoding" in headers
        if limits.json_only and most is not None and has_body and kind != "application/json":
            return ApiError(
                "the content type of a request", got=kind, expected="application/json", status=415
            )
        if self._under_way >= limits.requests and path != OPEN_PATH:
            return ApiError(
                "the server has too many requests under way",
                expected=f"at most {limits.requests}",
                code="rate_limit_exceeded",
                status=503,
                retry_after=_RETRY_SECONDS,
            )
        return None

    def _most(self, path: str) -> int | None:
        """Bytes of a body; None: the route itself bounds it."""
        uploads = self._limits.uploads
        is_upload = uploads is not None and uploads.fullmatch(path) is not None
        return None if is_upload else self._limits.body_bytes


class _Body:
    """A request's body as the app receives it: not larger, and not slower, than may be."""

    def __init__(self, receive: Receive, most: int | None, limits: DoorLimits) -> None:
        self._receive, self._most, self._limits = receive, most, limits
        self._size, self._waited, self._is_whole = 0, 0.0, False
        self.error: ApiError | None = None
        """What is wrong with it; it is raised in the app too."""
        self.is_refused = False
        """The client was told so."""

    async def __call__(self) -> Message:
        if self._is_whole:
            return await self._receive()
        begun = time.monotonic()
        left = self._limits.patience + self._size / self._limits.bytes_per_second - self._waited
        try:
            async with asyncio.timeout(max(0.0, left)):
                message = await self._receive()
        except TimeoutError:
            self.error = ApiError(
                f"the body does not come: {self._size} bytes are there",
                expected="all of it, in time",
                status=408,
            )
            raise self.error from None
        self._waited += time.monotonic() - begun
        self._size += len(message.get("body", b""))
        self._is_whole = not message.get("more_body", False)
        if self._most is not None and self._size > self._most:
            self.error = _too_large(self._size, self._most)
            raise self.error
        return message


def _too_large(size: int, most: int) -> ApiError:
    return ApiError(
        "the body is too large",
        got=f"{size} bytes or more",
        expected=f"at most {most}",
        status=413,
    )


def _bearer(value: str) -> str:
    """The key in an Authorization header; empty if it is of another kind."""
    kind, _, key = value.partition(" ")
    return key.strip() if kind.lower() == "bearer" else ""


def _is_event_stream(start: Message) -> bool:
    kind = Headers(raw=start["headers"]).get("content-type", "")
    return kind.startswith("text/event-stream")


async def _refuse(send: Send, error: Exception, *, status: int | None = None) -> None:
    usual, content = error_response(error)
    body = json.dumps(content).encode()
    headers = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(body))]
    if usual == 401:
        headers.append((b"www-authenticate", b"Bearer"))
    if usual == 408:
        headers.append((b"connection", b"close"))
    headers += [(name.encode(), value.encode()) for name, value in error_headers(error).items()]
    await send({"type": "http.response.start", "status": status or usual, "headers": headers})
    await send({"type": "http.response.body", "body": body})


def _host_of(value: str) -> str | None:
    """The host in a Host ("a:1") or an Origin ("http://a:1") header; None if there is none."""
    try:
        return urlsplit(value if "//" in value else f"//{value}").hostname
    except ValueError:
        return None
