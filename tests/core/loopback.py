"""A folder served over HTTP on this machine, for tests of what fetches files.

In: a folder, and a password if one shall be asked for. Out: a URL, and the requests that came.
"""

from __future__ import annotations

import base64
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any


@dataclass
class Served:
    """A server while it runs."""

    url: str
    requests: list[tuple[str, str | None]] = field(default_factory=list)
    """(path, Authorization header) of each GET."""

    def count(self, ending: str) -> int:
        """How many GETs asked for a path with this ending."""
        return sum(path.endswith(ending) for path, _ in self.requests)


@contextmanager
def serving(folder: Path, *, user: str | None = None, json: bool = False) -> Iterator[Served]:
    """Serve `folder` on a free port of 127.0.0.1.

    Args:
        user: "name:password" that every request must carry.
        json: label HTML pages as the JSON of the simple repository API.
    """
    served = Served("")
    handler = partial(_Handler, directory=str(folder), served=served, user=user, json=json)
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    served.url = f"http://127.0.0.1:{server.server_port}"
    thread = Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield served
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


class _Handler(SimpleHTTPRequestHandler):
    def __init__(
        self, *args: Any, served: Served, user: str | None, json: bool, **kwargs: Any
    ) -> None:
        self.served, self.user, self.json = served, user, json
        super().__init__(*args, **kwargs)

    def do_GET(self) -> None:
        given = self.headers.get("Authorization")
        self.served.requests.append((self.path, given))
        asked = f"Basic {base64.b64encode((self.user or '').encode()).decode()}"
        if self.user is not None and given != asked:
            self.send_error(401)
        else:
            super().do_GET()

    def guess_type(self, path: Any) -> str:
        kind = super().guess_type(path)
        return "application/vnd.pypi.simple.v1+json" if self.json and "html" in kind else kind

    def log_message(self, format: str, *args: Any) -> None:
        """Says nothing; the test looks at `Served.requests`."""
