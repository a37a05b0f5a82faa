"""A `Workbench` in a process of its own: the trainer's, whose end is not the end of serving.

In, over a socket that it was started with: a `Loading`, then an `Ask` at a time, and `Stop` for
the step under way. Out: that an ask was heard, progress, log lines, the answer or the error. It
ends with the socket: nobody asks any more. local/trainer_process.py starts it.

The messages are pickled. Both ends are this package, one started by the other, and the socket has
no name that a third could open; what came from a network was made into our own records before, and
of what comes back only errors of known packages are more than plain values.
"""

from __future__ import annotations

import faulthandler
import logging
import os
import pickle
import queue
import threading
import traceback
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, TypeAlias

import torch
from transformers.utils.logging import disable_progress_bar

from art_core.errors import ARTError, ForeignError, TrainerDied
from art_core.nn.memory import keep_freed_memory
from art_core.training.out_of_memory import free
from art_core.training.requests import Lesson, Loading, Opening, Question
from art_core.training.workbench import Workbench, load_module

Request: TypeAlias = Loading | Opening | Lesson | Question
_KNOWN = ("art_core", "builtins", "torch")
"""Packages whose errors go over as they are. To read another's would import it at the other end,
and some of them change the process that imports them."""
_FIRST_TO_GO = "500"
"""Of 1000: where memory ends, Linux shall take the trainer rather than what serves."""


@dataclass(frozen=True)
class Ask:
    """Do this."""

    request: Request
    gives_back: bool = False
    """The GPU's memory that it took is another's afterwards."""


@dataclass(frozen=True)
class Stop:
    """End the step under way at its next row."""


@dataclass(frozen=True)
class Heard:
    """Sent when an ask is begun, after each row, and with `line` for the log."""

    progress: tuple[int, int] | None = None
    """(positions done, in all)."""
    line: tuple[str, int, str] | None = None
    """(logger, level, message)."""


@dataclass(frozen=True)
class Answer:
    """An ask is done."""

    value: Any
    error: BaseException | None = None
    cause: BaseException | None = None


def main(file: int) -> None:
    """Serve until nobody asks any more."""
    faulthandler.enable()
    with suppress(OSError):  # not Linux
        Path("/proc/self/oom_score_adj").write_text(_FIRST_TO_GO)
    line = _Line(Connection(file))
    logging.basicConfig(level=logging.INFO, handlers=[_Forwarded(line)])
    disable_progress_bar()  # nobody sees it here, and it is the end of a log that tells
    keep_freed_memory()
    torch.set_flush_denormal(True)
    bench: Workbench | None = None
    while True:
        asked = line.next()
        line.send(Heard())
        try:
            if isinstance(asked.request, Loading):
                bench = _loaded(asked.request)
                line.send(Answer(bench.loaded))
            else:
                assert bench is not None, "nothing was loaded"
                line.send(Answer(_done(bench, asked, line)))
        except Exception as error:  # noqa: BLE001 - it goes to the one that asked
            if lost := _lost_gpu():
                line.send(_failed(lost))
                os._exit(1)
            line.send(_failed(error))


def _loaded(loading: Loading) -> Workbench:
    if loading.threads:
        torch.set_num_threads(loading.threads)
    return Workbench(load_module(loading))


def _done(bench: Workbench, asked: Ask, line: _Line) -> Any:
    """The answer to anything but a `Loading`."""
    try:
        match asked.request:
            case Opening():
                return bench.open(asked.request)
            case Lesson():
                return bench.learn(asked.request, line.progress, line.stop)
            case Question():
                return bench.loss(asked.request)
    finally:
        if asked.gives_back:
            free()


def _lost_gpu() -> TrainerDied | None:
    """The end of a process whose GPU answers no more: after a fault in a kernel nothing that it
    does there will work again. None: it is well, or there is none."""
    if not torch.cuda.is_initialized():
        return None
    try:
        torch.cuda.synchronize()
    except RuntimeError as error:
        return TrainerDied(
            f"the trainer's process has lost its GPU ({error})",
            tail="",
            fix="The step is undone, and the next call starts a new trainer from the last one.",
        )
    return None


def _failed(error: BaseException) -> Answer:
    """The error, made ready to go over, with what caused it."""
    if not isinstance(error, ARTError):
        trace = "".join(traceback.format_exception(error))
        error.add_note(f"In the trainer's process:\n{trace}")
    cause = None if error.__cause__ is None else _portable(error.__cause__)
    return Answer(None, _portable(error), cause)


def _portable(error: BaseException) -> BaseException:
    """An error that the other end can read."""
    if type(error).__module__.split(".")[0] in _KNOWN:
        with suppress(Exception):
            pickle.loads(pickle.dumps(error))  # noqa: S301 - our own of a moment ago
            return error
    told = ForeignError(str(error), kind=type(error).__name__)
    for note in getattr(error, "__notes__", ()):
        told.add_note(note)
    return told


class _Line:
    """To the process that asks."""

    def __init__(self, connection: Connection) -> None:
        self.stop = threading.Event()
        """Set by `Stop`, until the next ask."""
        self._connection = connection
        self._asked: queue.Queue[Ask] = queue.Queue()
        self._turn = threading.Lock()
        threading.Thread(target=self._read, name="art-line", daemon=True).start()

    def next(self) -> Ask:
        """Wait for the next ask."""
        return self._asked.get()

    def send(self, message: Heard | Answer) -> None:
        with self._turn:
            self._connection.send(message)

    def progress(self, done: int, total: int) -> None:
        self.send(Heard(progress=(done, total)))

    def _read(self) -> None:
        with suppress(EOFError, OSError):
            while True:
                message = self._connection.recv()
                if isinstance(message, Stop):
                    self.stop.set()
                else:
                    self.stop.clear()
                    self._asked.put(message)
        os._exit(0)  # whatever is under way: nobody wants it


class _Forwarded(logging.Handler):
    """Log lines go to the process that asks, whose loggers know what to do with them."""

    def __init__(self, line: _Line) -> None:
        super().__init__()
        self.setFormatter(logging.Formatter("%(message)s"))
        self._line = line

    def emit(self, record: logging.LogRecord) -> None:
        with suppress(OSError):
            self._line.send(Heard(line=(record.name, record.levelno, self.format(record))))
