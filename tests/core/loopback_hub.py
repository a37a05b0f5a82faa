"""A hub on this machine with one repository, as far as the hub's client asks.

In: a folder. Out: a URL for HF_ENDPOINT. It answers the five routes that `model_info` and
`snapshot_download` of huggingface_hub 2.4 use; every other repository is a 404.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any
from urllib.parse import urlsplit

from art_core.sealed import file_sha256

COMMIT = "a" * 40


@contextmanager
def hub_with(repository: str, folder: Path) -> Iterator[str]:
    """Offer the files of `folder` as `repository` ("owner/name")."""
    handler = partial(_Handler, repository=repository, folder=folder)
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    thread = Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def __init__(self, *args: Any, repository: str, folder: Path) -> None:
        self.repository, self.folder = repository, folder
        super().__init__(*args)

    def do_GET(self) -> None:
        path = urlsplit(self.path).path
        api, files = f"/api/models/{self.repository}", f"/{self.repository}/resolve/{COMMIT}/"
        names = sorted(p.name for p in self.folder.iterdir())
        if path in (api, f"{api}/revision/main"):
            siblings = [{"rfilename": name} for name in names]
            self._answer_json({"id": self.repository, "sha": COMMIT, "siblings": siblings})
        elif path == f"{api}/tree/{COMMIT}":
            self._answer_json([self._entry(name) for name in names])
        elif path.startswith(files) and (name := path.removeprefix(files)) in names:
            self._answer((self.folder / name).read_bytes(), file_sha256(self.folder / name))
        else:
            self._refuse()

    do_HEAD = do_GET  # noqa: N815 - http.server's name for it

    def _entry(self, name: str) -> dict[str, Any]:
        size = (self.folder / name).stat().st_size
        return {"type": "file", "path": name, "size": size, "oid": "b" * 40}

    def _answer_json(self, value: Any) -> None:
        self._answer(json.dumps(value).encode(), "json")

    def _answer(self, body: bytes, etag: str) -> None:
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.send_header("ETag", f'"{etag}"')
        self.send_header("X-Repo-Commit", COMMIT)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)

    def _refuse(self) -> None:
        self.send_response(404)
        self.send_header("Content-Length", "0")
        self.send_header("X-Error-Code", "RepoNotFound")
        self.end_headers()

    def log_message(self, format: str, *args: Any) -> None:
        """Says nothing."""
