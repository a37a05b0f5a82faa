"""The server on a port, until it is told to stop.

In: an address, a key, and the app's settings. Out: requests answered; in the end, what runs is
stopped and nothing stays behind. The door (engine/door.py) is checked before the app.
"""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Callable, Collection, Iterator
from pathlib import Path

import uvicorn
from filelock import FileLock, Timeout

from art_core.engine.door import LOOPBACK, Door, DoorLimits, check_address
from art_core.engine.serving import http_config, listen
from art_core.errors import RunLocked
from art_core.server.app import ServerSettings, create_server
from art_core.server.run_routes import UPLOADS

_GRACE_SECONDS = 5


def serve(
    settings: ServerSettings,
    *,
    host: str,
    port: int,
    api_key: str | None,
    hosts: Collection[str] = (),
    ready: Callable[[str], None] = lambda url: None,
) -> None:
    """Serve until SIGINT or SIGTERM.

    Args:
        port: 0 takes a free one.
        api_key: clients must send it; None lets everyone on this machine in.
        hosts: names that the server goes by; none: on loopback this machine's, else any.
        ready: is told the URL once requests are answered.

    Raises:
        ConfigError: an address other than loopback without a key, or a key that can't be sent.
        RunLocked: another server has the folder.
        EngineError: the port is taken.
        RunFolderError: the folder can't be used.
    """
    key = check_address(host, api_key)
    with _sole_server(settings.path), contextlib.closing(listen(host, port)) as listener:
        app = create_server(settings)
        door = Door(
            app,
            api_key=key,
            is_loopback=host in LOOPBACK,
            hosts=hosts,
            limits=DoorLimits(uploads=UPLOADS),
        )
        config = http_config(door, lifespan="on", grace=_GRACE_SECONDS)
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
