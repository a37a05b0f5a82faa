"""A stand-in for vLLM's server, run as a process of its own: real HTTP, a real engine process.

In: vLLM's command line, and `--stub-*` flags that say how it misbehaves. Out: the routes that the
supervisor asks, and `/stub/...` by which a test makes it die, hang or be slow. Like vLLM it has a
child, which answers for it and which ignores that its parent is gone.
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
from threading import Lock
from typing import Any


def engine(pipe: Connection) -> None:
    """The engine: answers a question at a time, for ever."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    while True:
        try:
            seconds = pipe.recv()
            time.sleep(seconds)
            pipe.send("done")
        except (EOFError, OSError):
            time.sleep(1.0)  # as vLLM's: nothing tells it that its parent is gone


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("-m")
    parser.add_argument("--port", type=int)
    parser.add_argument("--served-model-name")
    parser.add_argument("--stub-says", default="", help="printed, then it ends with status 1")
    parser.add_argument("--stub-says-once", default="", help="a file; its text is said, then gone")
    parser.add_argument("--stub-slow", type=float, default=0.0, help="seconds until it listens")
    parser.add_argument("--stub-stubborn", action="store_true", help="ignores SIGTERM")
    options, _ = parser.parse_known_args()
    print("stub: starting", flush=True)
    if options.stub_stubborn:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    fault = options.stub_says
    if options.stub_says_once and os.path.exists(options.stub_says_once):
        with open(options.stub_says_once, encoding="utf-8") as file:
            fault = file.read()
        os.remove(options.stub_says_once)
    if fault:
        print(fault, flush=True)
        sys.exit(1)
    ours, theirs = multiprocessing.Pipe()
    child = multiprocessing.get_context("fork").Process(target=engine, args=(theirs,))
    child.start()
    print(f"stub: engine {child.pid}", flush=True)
    time.sleep(options.stub_slow)
    serve(options.port, options.served_model_name, ours, int(child.pid or 0))


def serve(port: int, name: str, pipe: Connection, child: int) -> None:
    lock = Lock()
    key = f"Bearer {os.environ.get('VLLM_API_KEY')}"
    adapters: list[str] = []

    def ask(seconds: float) -> None:
        with lock:
            pipe.send(seconds)
            pipe.recv()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            if self.path.startswith("/v1") and self.headers.get("Authorization") != key:
                return self.reply({"error": "Unauthorized"}, 401)
            if self.path == "/v1/models":
                return self.reply({"data": [{"id": name}, *({"id": a} for a in adapters)]})
            if self.path == "/health":
                return self.reply({})
            if self.path == "/is_sleeping":
                ask(0.0)
                return self.reply({"is_sleeping": False})
            if self.path == "/stub/about":
                return self.reply(
                    {"environ": dict(os.environ), "argv": sys.argv, "cwd": os.getcwd(),
                     "pids": [os.getpid(), child]}
                )  # fmt: skip
            return self.reply({}, 404)

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers.get("Content-Length", 0))) or "{}")
            if self.path == "/v1/load_lora_adapter":
                ask(float(body.get("seconds", 0.0)))
                adapters.append(body["lora_name"])
                return self.reply({})
            if self.path == "/stub/call":
                ask(float(body.get("seconds", 0.0)))
                return self.reply({"text": "hello"})
            return self.reply({}, 404)

        def reply(self, value: Any, status: int = 200) -> None:
            body = json.dumps(value).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: Any) -> None:
            """Says nothing."""

    server = ThreadingHTTPServer(("127.0.0.1", port), Handler)
    server.daemon_threads = True
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0)) if signal.getsignal(
        signal.SIGTERM
    ) is signal.SIG_DFL else None
    print("stub: listening", flush=True)
    server.serve_forever(poll_interval=0.05)


if __name__ == "__main__":
    main()
