"""A trainer's process on the tiny model, and what disturbs it.

Also a program: `python -m tests.core.apart BASE FOLDER` has one with the base model in memory, says
"up", and waits until it is killed.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
from pathlib import Path

from art_core.config import LoraSettings, TrainConfig, TrainSFTConfig
from art_core.engine.keeper import start_of
from art_core.local.trainer_process import Patience
from art_core.local.workbench_apart import WorkbenchApart
from art_core.training.requests import Learned, Lesson, Loading, Opening
from art_core.training.workbench import Workbench
from tests.core.samples import policy_calls

NAME = "live"
CONFIG = TrainConfig(learning_rate=1e-2, minibatches=2, max_tokens_per_row=24)
"""Several rows, so that something can happen between two."""
_NAMED = ("adapter_config.json", "manifest.json")
PATIENCE = Patience(start=120.0, silence=60.0, stop=60.0)


def apart(base: Path, folder: Path, patience: Patience = PATIENCE) -> WorkbenchApart:
    """A workbench in a process of its own, with one thread."""
    return WorkbenchApart(Loading(base, threads=1), folder / "trainer", patience)


def opening(folder: Path, step: int | None = None) -> Opening:
    """The adapter as `step` left it; None: a fresh one."""
    checkpoints = folder / "checkpoints"
    found = None if step is None else checkpoints / f"{step:04d}"
    return Opening(NAME, LoraSettings(rank=4), 0, "adamw", checkpoints, found)


def lesson(folder: Path, step: int, config: TrainConfig | TrainSFTConfig = CONFIG) -> Lesson:
    """The step, from samples of its own."""
    return Lesson(
        adapter=NAME,
        step=step,
        checkpoints=folder / "checkpoints",
        batches=[[sample._replace(weight=1.0) for sample in policy_calls(step)]],
        config=config,
        running=0.25 * step,
        bookmarks={"pass": {"row": step}},
        probe_within=512,
    )


class Listener:
    """Hears how far a lesson is, and does something when it first does."""

    def __init__(self, bench: Workbench | WorkbenchApart) -> None:
        self.bench, self.stop = bench, threading.Event()
        self.heard: list[tuple[int, int]] = []

    def learn(self, asked: Lesson) -> Learned:
        return self.bench.learn(asked, self.hear, self.stop)

    def hear(self, done: int, total: int) -> None:
        self.heard.append((done, total))
        if len(self.heard) == 1:
            self.act()

    def act(self) -> None:
        """What happens at the first row."""


def pid(folder: Path) -> int:
    """Of the trainer's process that was started in `folder`."""
    return int(json.loads((folder / "trainer" / "process.json").read_text())["main"][0])


def kill(process: int) -> None:
    """`kill -9`, and wait until it is gone."""
    os.kill(process, signal.SIGKILL)
    until_gone(process)


def until_gone(process: int) -> None:
    deadline = time.monotonic() + 20
    while start_of(process) is not None:
        assert time.monotonic() < deadline, f"{process} still runs"
        time.sleep(0.01)


def saved(folder: Path, step: int) -> dict[str, bytes]:
    """What training left in a checkpoint, bit for bit. (peft lists the layers of an adapter in an
    order that each process has of its own; that file, and its hash, are left out.)
    """
    found = folder / "checkpoints" / f"{step:04d}"
    files = [file for file in sorted(found.iterdir()) if file.name not in _NAMED]
    return {file.name: file.read_bytes() for file in files}


if __name__ == "__main__":
    held = apart(Path(sys.argv[1]), Path(sys.argv[2]))
    print("up", flush=True)  # noqa: T201 - a program
    time.sleep(600)
