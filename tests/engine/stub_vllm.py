"""A stand-in for vLLM's server, run as a process of its own: real HTTP, a real engine process.

In: vLLM's command line, and `--stub-*` flags that say how it misbehaves. Out: the routes that the
supervisor asks, and `/stub/...` for tests. Like vLLM it has a child that answers for it and that
does not notice when its parent is gone. `program` makes it callable as vLLM's Python is.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import signal
import sys
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from multiprocessing.connection import Connection
from pathlib import Path
from threading import Lock
from typing import Any


def program(folder: Path) -> Path:
    """A Python in `folder` that runs this file in the place of modules."""
    path = folder / "stub-python"
    path.write_text(
        f'#!/bin/sh\n[ "$1" = -m ] && set -- "{__file__}" "$@"\nexec "{sys.executable}" "$@"\n',
        "utf-8",
    )
    path.chmod(0o755)
    return path


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("-m", dest="module")
    parser.add_argument("--port", type=int)
    parser.add_argument("--served-model-name")
    parser.add_argument("--stub-says", type=Path, help="if it exists: say its text, end")
    parser.add_argument("--stub-forgets", action="store_true", help="remove that file first")
    parser.add_argument("--stub-slow", type=float, default=0.0, help="seconds until it listens")
    parser.add_argument("--stub-stubborn", action="store_true", help="does not stop when asked to")
    options, _ = parser.parse_known_args()
    tell("starting")
    if options.stub_says and options.stub_says.exists():
        refuse(options.stub_says, forget=options.stub_forgets)
    ours, theirs = multiprocessing.Pipe()
    engine = os.fork()
    if engine == 0:
        answer(theirs)
    Path("pids.json").write_text(json.dumps([os.getpid(), engine]))
    signal.signal(
        signal.SIGTERM, signal.SIG_IGN if options.stub_stubborn else lambda *_: stop(engine)
    )
    time.sleep(options.stub_slow)
    serve(options.port, options.served_model_name, ours)


def tell(line: str) -> None:
    sys.stdout.write(f"stub: {line}\n")
    sys.stdout.flush()


def refuse(reason: Path, *, forget: bool) -> None:
    text = reason.read_text("utf-8")
    if forget:
        reason.unlink()
    sys.stderr.write(f"{text}\n")
    sys.exit(1)


def stop(engine: int) -> None:
    """What SIGTERM does: the engine goes first."""
    tell("stopping")
    os.kill(engine, signal.SIGKILL)
    os._exit(0)


def answer(questions: Connection) -> None:
    """The engine: one question at a time, each a number of seconds to think, for ever."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    while True:
        try:
            time.sleep(questions.recv())
            questions.send("done")
        except (EOFError, OSError):
            time.sleep(1.0)


def serve(port: int, name: str, engine: Connection) -> None:
    lock = Lock()
    adapters: list[str] = []

    def ask(seconds: float) -> None:
        with lock:
            engine.send(seconds)
            engine.recv()

    class Handler(_Handler):
        def answer_to(self, body: dict[str, Any]) -> Any:
            match self.path:
                case "/v1/models":
                    return {"data": [{"id": known} for known in (name, *adapters)]}
                case "/is_sleeping":
                    ask(0.0)
                    return {"is_sleeping": False}
                case "/v1/load_lora_adapter":
                    tell("loading")
                    ask(body.get("seconds", 0.0))
                    adapters.append(body["lora_name"])
                    return {}
                case "/v1/chat/completions":
                    tell("called")
                    ask(body.get("seconds", 0.0))
                    return {"text": "hello"}
                case "/stub/about":
                    return {"environ": dict(os.environ), "argv": sys.argv[1:]}
            return None

    server = ThreadingHTTPServer(("127.0.0.1", port), Handler)
    tell("listening")
    server.serve_forever(poll_interval=0.05)


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def answer_to(self, body: dict[str, Any]) -> Any:
        raise NotImplementedError

    def do_GET(self) -> None:
        size = int(self.headers.get("Content-Length", 0))
        body = json.loads(self.rfile.read(size) or "{}")
        if self.headers.get("Authorization") != f"Bearer {os.environ['VLLM_API_KEY']}":
            return self.reply({"error": "Unauthorized"}, 401)
        value = self.answer_to(body)
        return self.reply(value, 404 if value is None else 200)

    do_POST = do_GET  # noqa: N815 - http.server's name

    def reply(self, value: Any, status: int) -> None:
        body = json.dumps(value).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        """Says nothing."""


if __name__ == "__main__":
    main()
