"""A server in a process of its own, as `art-langgraph serve` starts it, on a free port."""

from __future__ import annotations

import os
import queue
import re
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any, Self

import art_core as art
from tests.core.small_run import NAME, PROJECT, SETTINGS

KEY = "a-key"
START_SECONDS = 90.0
_MAIN = "import sys; from art_langgraph.cli import main; sys.exit(main())"


class ServerProcess:
    """Started by `with`, or by `start`; killed or ended, it can be started again.

    Args:
        path: its folder.
        base_models: what it may load.
        port: 0 takes a free one, which stays its own.
    """

    def __init__(
        self, path: Path, *base_models: Path, key: str | None = KEY, options: tuple[str, ...] = ()
    ) -> None:
        self.path, self.key, self.port = path, key, 0
        self.log: list[str] = []
        self._base_models, self._options = base_models, options
        self._process: subprocess.Popen[str] | None = None

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(self, *_: object) -> None:
        self.end()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def start(self) -> Self:
        """Returns when it answers."""
        command = [sys.executable, "-c", self.program(), "serve", "--path", str(self.path)]
        command += ["--port", str(self.port), *self._options]
        for base in self._base_models:
            command += ["--base-model", str(base)]
        environment = {k: v for k, v in os.environ.items() if k != "ART_API_KEY"}
        environment |= {"ART_API_KEY": self.key} if self.key else {}
        self._process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment
        )
        told: queue.Queue[str] = queue.Queue()
        threading.Thread(target=self._read, args=(self._process, told), daemon=True).start()
        while True:
            line = told.get(timeout=START_SECONDS)
            if not line:
                self._process.wait(30)
                raise RuntimeError(f"the server did not start:\n{''.join(self.log)}")
            if found := re.search(r"serving on http://127\.0\.0\.1:(\d+)", line):
                self.port = int(found[1])
                return self

    def program(self) -> str:
        """What the process runs."""
        return _MAIN

    def kill(self) -> None:
        """As `kill -9` does."""
        assert self._process is not None
        self._process.kill()
        self._process.wait(30)

    def end(self) -> int:
        """Ask it to end, and wait; its exit status."""
        if self._process is None or self._process.poll() is not None:
            return 0
        self._process.send_signal(signal.SIGINT)
        return self._process.wait(60)

    def backend(self, **options: Any) -> art.HttpBackend:
        """A client of it."""
        return art.HttpBackend(self.url, api_key=self.key, show_progress=False, **options)

    def model(self, base: Path, **changes: Any) -> art.TrainableModel[Any]:
        """A small model, not registered yet."""
        settings = SETTINGS.model_copy(update={"engine": art.EngineConfig()})
        fields = {"name": NAME, "project": PROJECT, "base_model": str(base), "art_config": settings}
        here = {"base_path": str(self.path / "client")}
        return art.TrainableModel(**{**fields, **here, **changes})

    def _read(self, process: subprocess.Popen[str], told: queue.Queue[str]) -> None:
        assert process.stdout is not None
        with process.stdout as lines:
            for line in lines:
                self.log.append(line)
                told.put(line)
        told.put("")
