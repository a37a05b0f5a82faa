"""An app on a loopback port, served by a thread of its own.

In: an ASGI app. Out: a base URL that sync and async code of this process can call, and `stop`.
Several servers may run side by side; none touches signal handlers. Left out: who may come in
(door.py).
"""

from __future__ import annotations

import asyncio
import socket
import threading
from types import TracebackType
from typing import Literal, Self

import uvicorn
from starlette.types import ASGIApp

from art_core.engine.door import LOOPBACK, Door, DoorLimits, check_address
from art_core.engine.patient_http import PatientHTTP
from art_core.errors import EngineError

_START_SECONDS = 30.0
_KEEP_ALIVE_SECONDS = 75
"""Longer than clients keep an idle connection: at 5, as by default, a busy client sends into one
that is just being closed."""
_MAX_HEADER_BYTES = 64 * 2**10
_GRACE_SECONDS = 2
"""How long running calls may go on once the server is asked to stop."""


class LoopbackServer:
    """Serves `app` over HTTP.

    Args:
        host: address to listen on; any other than loopback needs a key.
        port: 0 takes a free one.
        api_key: clients must send it, see `Door`; None lets everyone in.
        limits: of requests; None: the usual ones.

    Raises:
        ConfigError: an address other than loopback without a key, or a key that can't be sent.
    """

    def __init__(
        self,
        app: ASGIApp,
        host: str = "127.0.0.1",
        port: int = 0,
        api_key: str | None = None,
        *,
        limits: DoorLimits | None = None,
    ) -> None:
        key = check_address(host, api_key)
        self._host, self._port = host, port
        self._app = Door(app, api_key=key, is_loopback=host in LOOPBACK, limits=limits)
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
        config = http_config(self._app, lifespan="off", grace=_GRACE_SECONDS)
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


def http_config(app: Door, *, lifespan: Literal["on", "off"], grace: int) -> uvicorn.Config:
    """How uvicorn serves an app behind its door.

    Args:
        grace: seconds that running calls may go on once the server is asked to stop.
    """
    return uvicorn.Config(
        app,
        http=PatientHTTP,
        log_config=None,
        access_log=False,
        server_header=False,
        lifespan=lifespan,
        ws="none",
        timeout_keep_alive=_KEEP_ALIVE_SECONDS,
        timeout_graceful_shutdown=grace,
        h11_max_incomplete_event_size=_MAX_HEADER_BYTES,
    )


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
