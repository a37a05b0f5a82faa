"""A supervised stub of vLLM, and what tests look at: its processes, its answers, its parent.

Run as a script, it is the parent: it starts the stub, says "up", and does what its argument says
until it is killed.
"""

from __future__ import annotations

import json
import sys
import time
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

from art_core.engine.keeper import start_of
from art_core.engine.vllm_process import Supervision, VllmProcess
from art_core.engine.vllm_settings import VllmSettings
from tests.engine.stub_vllm import program

HANG_AFTER = 0.6
QUICK = Supervision(
    start_within=20.0,
    look_every=0.1,
    hang_after=HANG_AFTER,
    stop_within=1.0,
    restarts=2,
    first_pause=0.05,
)


def supervised(
    folder: Path, *flags: str, supervision: Supervision = QUICK, **given: Any
) -> VllmProcess:
    """A process that is not started yet, in `folder`, whose stub gets `flags`."""
    folder.mkdir(parents=True, exist_ok=True)
    settings = VllmSettings(model=Path("/models/m"), served_name="m", extra_args=flags)
    return VllmProcess(
        settings, python=program(folder), folder=folder / "run", supervision=supervision, **given
    )


def ask(process: VllmProcess, path: str, **body: Any) -> Any:
    """The answer to a POST, as text if it is no JSON.

    Raises:
        OSError: there is none.
    """
    request = urllib.request.Request(
        f"{process.base_url}{path}",
        json.dumps(body).encode(),
        {**process.headers, "Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=20) as response:
        text = response.read().decode()
    return json.loads(text) if text.startswith("{") else text


def pids(folder: Path) -> list[int]:
    """The server and its engine, as the newest stub in `folder` wrote them down."""
    found: list[int] = json.loads((folder / "run" / "work" / "pids.json").read_text())
    return found


def keeper(folder: Path) -> int:
    """The keeper's pid."""
    return int(json.loads((folder / "run" / "process.json").read_text())["keeper"][0])


def wait_for(what: Callable[[], object], seconds: float = 20.0) -> None:
    """Return once `what` is true; an AssertionError if it never is."""
    deadline = time.monotonic() + seconds
    while not what():
        assert time.monotonic() < deadline, "it never came"
        time.sleep(0.02)


def all_gone(numbers: list[int]) -> bool:
    return all(start_of(pid) is None for pid in numbers)


def said(folder: Path, line: str) -> bool:
    """True if the stub in `folder` has written `line`."""
    log = folder / "run" / "vllm.log"
    return log.is_file() and f"stub: {line}" in log.read_text()


def be_a_parent(folder: Path, moment: str) -> None:
    """Bring the stub to `moment`, and stay there."""
    flags = {
        "starting": ["--stub-slow=60"],
        "stopping": ["--stub-stubborn"],
    }.get(moment, [])
    process = supervised(folder, *flags, supervision=Supervision(stop_within=60.0))
    process.start()
    if moment == "calling":
        ask(process, "/v1/chat/completions", seconds=60)
    elif moment == "loading":
        ask(process, "/v1/load_lora_adapter", lora_name="a", seconds=60)
    elif moment == "stopping":
        sys.stdout.write("stopping\n")
        sys.stdout.flush()
        process.stop()
    time.sleep(60)


if __name__ == "__main__":
    be_a_parent(Path(sys.argv[1]), sys.argv[2])
