"""An app on a loopback port, served by a thread of its own.

In: an ASGI app. Out: a base URL that sync and async code of this process can call, and `stop`.
Several servers may run side by side; none touches signal handlers. The door is checked before
the app sees a request: the key, and that no web page is talking to us through a user's browser.
"""

from __future__ import annotations

import asyncio
import hmac
import json
import socket
import threading
from types import TracebackType
from typing import Any, Self
from urllib.parse import urlsplit

import uvicorn
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from art_core.engine.api_errors import ApiError, error_response
from art_core.errors import ConfigError, EngineError

LOOPBACK = frozenset({"127.0.0.1", "localhost", "::1"})
_START_SECONDS = 30.0
_KEEP_ALIVE_SECONDS = 75
"""Longer than clients keep an idle connection: at 5, as by default, a busy client sends into one
that is just being closed."""
_GRACE_SECONDS = 2
"""How long running calls may go on once the server is asked to stop."""


class LoopbackServer:
    """Serves `app` over HTTP.

    Args:
        host: address to listen on; any other than loopback needs a key.
        port: 0 takes a free one.
        api_key: clients must send it as `Authorization: Bearer <key>`; None lets everyone in.

    Raises:
        ConfigError: an address other than loopback without a key.
    """

    def __init__(
        self, app: ASGIApp, host: str = "127.0.0.1", port: int = 0, api_key: str | None = None
    ) -> None:
        if host not in LOOPBACK and not api_key:
            raise ConfigError(
                "the server would be open to the network",
                got=host,
                expected="a loopback address, or a key",
                fix="Set api_key.",
            )
        self._host, self._port = host, port
        self._app = Door(app, api_key=api_key, is_loopback=host in LOOPBACK)
        self._server: _Server | None = None
        self._thread: threading.Thread | None = None
        self._fault: BaseException | None = None

    def start(self) -> Self:
        """Listen and serve; returns once requests are answered.

        Raises:
            EngineError: the port is taken, or the server did not come up.
        """
        if self._thread is not None:
            return self
        listener = listen(self._host, self._port)
        self._port = listener.getsockname()[1]
        config = uvicorn.Config(
            self._app,
            log_config=None,
            access_log=False,
            lifespan="off",
            ws="none",
            timeout_keep_alive=_KEEP_ALIVE_SECONDS,
            timeout_graceful_shutdown=_GRACE_SECONDS,
        )
        self._server = _Server(config)
        self._thread = threading.Thread(
            target=self._serve,
            args=(self._server, listener),
            name=f"art-endpoint-{self._port}",
            daemon=True,
        )
        self._thread.start()
        self._server.is_ready.wait(_START_SECONDS)
        if not self._server.started:
            self.stop()
            raise EngineError(f"the endpoint did not start ({self._fault!r})") from self._fault
        return self

    @property
    def base_url(self) -> str:
        """Ends in "/v1"; known after `start`."""
        host = f"[{self._host}]" if ":" in self._host else self._host
        return f"http://{host}:{self._port}/v1"

    def stop(self, timeout: float = 10.0) -> None:
        """Stop listening, let running calls end for a moment, then cancel them.

        Safe to call twice, and from any thread.

        Args:
            timeout: seconds after which the thread is left behind.
        """
        thread, server = self._thread, self._server
        if thread is None or server is None:
            return
        server.should_exit = True
        thread.join(timeout / 2)
        if thread.is_alive():
            server.force_exit = True
            thread.join(timeout / 2)
        self._thread = self._server = None

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.stop()

    def _serve(self, server: _Server, listener: socket.socket) -> None:
        """The thread: an event loop with the server on it."""
        try:
            asyncio.run(server.serve(sockets=[listener]))
        except BaseException as error:
            self._fault = error
            raise
        finally:
            server.is_ready.set()
            listener.close()


def listen(host: str, port: int) -> socket.socket:
    """A socket that takes connections.

    Args:
        port: 0 takes a free one.

    Raises:
        EngineError: the address can't be had.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
        listener.listen(2048)
    except OSError as error:
        listener.close()
        raise EngineError(
            f"can't listen on {host}:{port} ({error})",
            fix="Choose another port, or 0 for a free one.",
        ) from error
    listener.setblocking(False)
    return listener


class _Server(uvicorn.Server):
    """uvicorn's server, which says when it is there."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.is_ready = threading.Event()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self.is_ready.set()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Calls that were cancelled get the time to write their records."""
        await super().shutdown(sockets)
        if self.server_state.tasks:
            await asyncio.wait(self.server_state.tasks, timeout=_GRACE_SECONDS)


class Door:
    """ASGI middleware: lets in who may come in, answers others in OpenAI's error shape.

    Args:
        api_key: 401 without it, but for /health; None asks for none.
        is_loopback: 403 for a Host or an Origin that is not this machine, which is what a web
            page sends that was made to reach into it.
    """

    def __init__(self, app: ASGIApp, *, api_key: str | None, is_loopback: bool) -> None:
        self._app, self._key, self._is_loopback = app, api_key, is_loopback

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        is_open = scope.get("path") == "/health"
        error = self._error(Headers(scope=scope), is_open) if scope["type"] == "http" else None
        if error is not None:
            await _refuse(send, *error_response(error))
            return
        opened: Message | None = None

        async def watched(message: Message) -> None:
            nonlocal opened
            opened = opened or message
            await send(message)

        try:
            await self._app(scope, receive, watched)
        except (
            asyncio.CancelledError
        ):  # the server stops, and this is the end of the request's task
            _, body = error_response(EngineError("the server is stopping"))
            if opened is None:
                await _refuse(send, 503, body)
            elif _is_event_stream(opened):
                event = b"data: %b\n\n" % json.dumps(body).encode()
                await send({"type": "http.response.body", "body": event})
            else:
                raise

    def _error(self, headers: Headers, is_open: bool) -> ApiError | None:
        if self._is_loopback:
            for name, value in (("Host", headers.get("host")), ("Origin", headers.get("origin"))):
                if value is not None and _host_of(value) not in LOOPBACK:
                    return ApiError(
                        f"the {name} header names another machine",
                        got=value,
                        expected="localhost",
                        status=403,
                    )
        if self._key is not None and not is_open:
            kind, _, key = ",".join(headers.getlist("authorization")).partition(" ")
            is_right = hmac.compare_digest(key.strip().encode(), self._key.encode())
            if kind.lower() != "bearer" or not is_right:
                return ApiError(
                    "wrong API key or none",
                    expected="Authorization: Bearer <key>",
                    code="invalid_api_key",
                    status=401,
                )
        return None


def _is_event_stream(start: Message) -> bool:
    kind = Headers(raw=start["headers"]).get("content-type", "")
    return kind.startswith("text/event-stream")


async def _refuse(send: Send, status: int, content: dict[str, Any]) -> None:
    body = json.dumps(content).encode()
    headers = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(body))]
    if status == 401:
        headers.append((b"www-authenticate", b"Bearer"))
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})


def _host_of(value: str) -> str | None:
    """The host in a Host ("a:1") or an Origin ("http://a:1") header; None if there is none."""
    try:
        return urlsplit(value if "//" in value else f"//{value}").hostname
    except ValueError:
        return None
