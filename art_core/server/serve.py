"""The server on a port, until it is told to stop.

In: an address, a key, and the app's settings. Out: requests answered; in the end, what runs is
stopped and nothing stays behind. The door (engine/serving.py) is checked before the app.
"""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Callable, Iterator
from pathlib import Path

import uvicorn
from filelock import FileLock, Timeout

from art_core.engine.serving import LOOPBACK, Door, listen
from art_core.errors import ConfigError, RunLocked
from art_core.server.app import ServerSettings, create_server

_KEEP_ALIVE_SECONDS = 75
_GRACE_SECONDS = 5
_MAX_HEADER_BYTES = 64 * 2**10


def serve(
    settings: ServerSettings,
    *,
    host: str,
    port: int,
    api_key: str | None,
    ready: Callable[[str], None] = lambda url: None,
) -> None:
    """Serve until SIGINT or SIGTERM.

    Args:
        port: 0 takes a free one.
        api_key: clients must send it; None lets everyone on this machine in.
        ready: is told the URL once requests are answered.

    Raises:
        ConfigError: an address other than loopback without a key.
        RunLocked: another server has the folder.
        EngineError: the port is taken.
        RunFolderError: the folder can't be used.
    """
    if api_key is not None and not (api_key := api_key.strip()):
        raise ConfigError(
            "the server's key is empty",
            expected="a key, or none at all",
            fix="Set ART_API_KEY to a long random text, or unset it.",
        )
    if host not in LOOPBACK and api_key is None:
        raise ConfigError(
            "the server would be open to the network",
            got=host,
            expected="a loopback address, or a key",
            fix="Set ART_API_KEY (or --api-key, which others see in the list of processes).",
        )
    with _sole_server(settings.path), contextlib.closing(listen(host, port)) as listener:
        app = create_server(settings)
        config = uvicorn.Config(
            Door(app, api_key=api_key, is_loopback=host in LOOPBACK),
            log_config=None,
            access_log=False,
            lifespan="on",
            ws="none",
            timeout_keep_alive=_KEEP_ALIVE_SECONDS,
            timeout_graceful_shutdown=_GRACE_SECONDS,
            h11_max_incomplete_event_size=_MAX_HEADER_BYTES,
        )
        name = f"[{host}]" if ":" in host else host
        url = f"http://{name}:{listener.getsockname()[1]}"
        _Server(config, lambda: ready(url)).run(sockets=[listener])


class _Server(uvicorn.Server):
    """uvicorn's server, which says when it is there; what stops its start is raised."""

    def __init__(self, config: uvicorn.Config, ready: Callable[[], None]) -> None:
        super().__init__(config)
        self._ready = ready

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        if not self.should_exit:
            self._ready()


@contextlib.contextmanager
def _sole_server(path: Path) -> Iterator[None]:
    path.mkdir(parents=True, exist_ok=True)
    lock = FileLock(path / ".server.lock")
    try:
        lock.acquire(timeout=0)
    except Timeout as error:
        raise RunLocked(
            "another server has this folder",
            got=str(path),
            fix="Stop it, or choose another --path.",
        ) from error
    try:
        yield
    finally:
        lock.release()
