"""Whether the places that we write to and listen on can be used: folders, SQLite, loopback.

In: folders. Out: facts, each tried for real and cleaned up. A run's records are kept in SQLite's
write-ahead log, which some network disks can't do; everything is served on a loopback port.
"""

from __future__ import annotations

import shutil
import socket
import sqlite3
import tempfile
import urllib.request
from dataclasses import dataclass
from pathlib import Path

_SECONDS = 3.0


@dataclass(frozen=True)
class Place:
    """A folder, or the nearest above it that exists."""

    folder: Path
    free: int
    """Bytes."""
    why_not: str
    """Why it can't be written; empty if it can."""
    why_no_wal: str
    """Why SQLite can't keep a write-ahead log there; empty if it can."""


def try_folder(folder: Path) -> Place:
    """Write into `folder`, or where it would be made, and keep a database there for a moment."""
    nearest = folder.absolute()
    while not nearest.exists() and nearest != nearest.parent:
        nearest = nearest.parent
    try:
        free = shutil.disk_usage(nearest).free
        with tempfile.TemporaryDirectory(dir=nearest, prefix=".art-try-") as work:
            return Place(folder, free, "", _try_wal(Path(work) / "try.sqlite"))
    except OSError as error:
        return Place(folder, 0, error.strerror or str(error), "")


def _try_wal(file: Path) -> str:
    try:
        connection = sqlite3.connect(file)
        try:
            (mode,) = connection.execute("PRAGMA journal_mode=WAL").fetchone()
            connection.execute("CREATE TABLE t (x)")
            connection.execute("INSERT INTO t VALUES (1)")
            connection.commit()
        finally:
            connection.close()
    except sqlite3.Error as error:
        return str(error)
    return "" if mode == "wal" else f"SQLite keeps to {mode!r} there"


def try_loopback() -> str:
    """Why nothing can be served on 127.0.0.1; empty if it can."""
    try:
        with socket.create_server(("127.0.0.1", 0)) as server:
            server.settimeout(_SECONDS)
            with socket.create_connection(server.getsockname(), timeout=_SECONDS) as client:
                served, _ = server.accept()
                with served:
                    client.sendall(b"x")
                    served.settimeout(_SECONDS)
                    return "" if served.recv(1) == b"x" else "what is sent does not arrive"
    except OSError as error:
        return error.strerror or str(error)


def proxy_in_between() -> str | None:
    """Host and port of the proxy that may get what is meant for 127.0.0.1; None: there is none."""
    proxies = urllib.request.getproxies()
    found = next((proxies[kind] for kind in ("http", "https", "all") if proxies.get(kind)), None)
    if found is None or urllib.request.proxy_bypass("127.0.0.1"):
        return None
    return found.rpartition("@")[2].rpartition("//")[2]  # without a password
