"""The trainer's process, seen from the one that serves: started, asked, watched, ended.

In: a `Loading`, and asks of training/apart.py. Out: answers, or the error that the trainer met, as
the class that it was; where the process ended or fell silent, `TrainerDied` with the cause and the
end of its log. A keeper (engine/keeper.py) ends it if this process is killed. Left out: what was in
it and has to be opened again (workbench_apart.py). For one thread.
"""

from __future__ import annotations

import logging
import math
import os
import signal
import socket
import struct
import sys
import threading
import time
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import art_core
from art_core.engine.kept_process import KeptProcess
from art_core.errors import TrainerDied
from art_core.training.apart import Answer, Ask, Heard, Request, Stop
from art_core.training.requests import Loaded, Loading
from art_core.training.watch import OnProgress, stopped

_log = logging.getLogger(__name__)

LOG = "trainer.log"
_TAIL_LINES = 15
_CRASH = "Fatal Python error"
"""What Python's faulthandler begins with."""
_LOOK_SECONDS = 0.1
"""Between two looks whether it is to stop."""
_KILLED = -9
"""Status of a process that SIGKILL ended; Windows has no such signal."""
_GRACE = 0.0
"""Seconds: what it has in memory is on disk, or is not wanted."""
_END_SECONDS = 15.0
"""Between the end of its line and its own."""
_GOES_ON = (
    "What was saved before goes on serving, and the next call starts a new trainer from there."
)
_BOOT = """
import sys
root, file = sys.argv[1:]
if root not in sys.path:
    sys.path.insert(0, root)
from art_core.training.apart import main
main(int(file))
"""
"""It runs the very package that runs here, however that one was found."""


@dataclass(frozen=True)
class Patience:
    """How long nothing may be heard of it, in seconds."""

    start: float = 1800.0
    """While it loads the base model: from a slow disk a big one takes long."""
    silence: float = 1800.0
    """Then it hangs. Each row is heard, each line of log and each answer; the longest rows of big
    models take minutes on a processor."""
    stop: float = 60.0
    """Until a step that is to stop has come to its next row; then the process is ended instead."""


class TrainerProcess:
    """Not started yet.

    Args:
        folder: of this process alone, for its log and its record.
    """

    def __init__(self, loading: Loading, folder: Path, patience: Patience | None = None) -> None:
        self.had_ended = False
        """The last ask found that it had ended before: it was never heard of."""
        self._loading, self._folder = loading, folder
        self._patience = patience or Patience()
        self._child: KeptProcess | None = None
        self._line: Connection | None = None
        self._unheard = True

    def start(self) -> Loaded:
        """Start one, in the place of any before, with the base model in memory.

        Raises:
            BaseModelError, ConfigError: as `load_module`.
            TrainerDied: it ended meanwhile.
            EngineError: another process uses the folder.
        """
        self.close()
        self._spawn()
        try:
            loaded: Loaded = self.ask(self._loading, silence=self._patience.start)
        except BaseException:
            self.close()
            raise
        return loaded

    def ask(
        self,
        request: Request,
        *,
        gives_back: bool = False,
        on_progress: OnProgress | None = None,
        stop: threading.Event | None = None,
        silence: float | None = None,
    ) -> Any:
        """Have it do something.

        Args:
            on_progress: told how far a lesson is; an error of its own ends the process.
            stop: ends a lesson, once it is set.
            silence: as `Patience.silence`, which it is if None.

        Raises:
            TrainerDied: it ended or hung; nothing of the request is left in memory.
            Exception: what it met.
        """
        asked, self._unheard, self.had_ended = Ask(request, gives_back), True, False
        told, ends = on_progress or _ignore, stop or threading.Event()
        try:
            answer = self._answered(asked, told, ends, silence or self._patience.silence)
        except BaseException:  # it may be at it still, and its answer would be taken for another's
            self.close()
            raise
        if isinstance(answer.error, TrainerDied):
            self.close()  # it said so itself; its memory is free when it is gone
        if answer.error is not None:
            raise answer.error from answer.cause
        return answer.value

    @property
    def runs(self) -> bool:
        """True while it does; what it logged by itself is passed on. Not while it is asked."""
        try:
            while self._line is not None and self._line.poll():
                _take(self._line.recv(), _ignore)
        except (EOFError, OSError):
            return False
        return self._line is not None

    def close(self) -> None:
        """End it, with all that it was doing. Safe to call twice."""
        line, self._line = self._line, None
        child, self._child = self._child, None
        if line is not None:
            line.close()
        if child is not None:
            child.stop(at_once=True)

    # How it is done

    def _spawn(self) -> None:
        ours, theirs = socket.socketpair()
        longest = struct.pack("ll", max(1, int(self._patience.silence)), 0)
        for option in (socket.SO_SNDTIMEO, socket.SO_RCVTIMEO):  # one that stops midway hangs too
            ours.setsockopt(socket.SOL_SOCKET, option, longest)
        with ours, theirs:
            root = str(Path(art_core.__file__).parents[1])
            number = str(theirs.fileno())
            self._child = KeptProcess(
                [sys.executable, "-P", "-c", _BOOT, root, number],
                environment=os.environ,
                folder=self._folder,
                log=LOG,
                grace=_GRACE,
                lent=theirs.fileno(),
            )
            self._line = Connection(ours.detach())

    def _answered(
        self, asked: Ask, on_progress: OnProgress, stop: threading.Event, silence: float
    ) -> Answer:
        """Send, and take in what comes until the answer."""
        self._send(asked)
        heard, until = time.monotonic(), math.inf
        while True:
            if stop.is_set() and until == math.inf:
                self._send(Stop())
                until = time.monotonic() + self._patience.stop
            message = self._received(_LOOK_SECONDS)
            if isinstance(message, Answer):
                return message
            now = time.monotonic()
            if message is not None:
                heard, self._unheard = now, False
                _take(message, on_progress)
            if now > until:
                raise stopped()
            if now - heard > silence:
                raise self._hung(silence)

    def _send(self, message: Ask | Stop) -> None:
        assert self._line is not None, "it was not started"
        try:
            self._line.send(message)
        except BlockingIOError:  # it does not even read
            raise self._hung(self._patience.silence) from None
        except OSError:
            raise self._died() from None

    def _received(self, within: float) -> Heard | Answer | None:
        """What comes next; None after so many seconds."""
        assert self._line is not None, "it was not started"
        try:
            message: Heard | Answer | None = self._line.recv() if self._line.poll(within) else None
        except BlockingIOError:
            raise self._hung(self._patience.silence) from None
        except (EOFError, OSError):
            raise self._died() from None
        return message

    def _hung(self, silence: float) -> TrainerDied:
        """What is said of one that is silent."""
        return TrainerDied(
            f"the trainer's process hung: nothing was heard of it for {silence:g} s",
            tail=self._tail(),
            fix=_GOES_ON,
        )

    def _died(self) -> TrainerDied:
        """What is said of one whose end of the line is gone."""
        self.had_ended = self._unheard
        status = None if self._child is None else self._child.wait(_END_SECONDS)
        cause, fix = _in_words(status)
        return TrainerDied(
            f"the trainer's process ended: {cause}", tail=self._tail(), fix=f"{_GOES_ON}{fix}"
        )

    def _tail(self) -> str:
        """The end of its log; of one that crashed, where it was."""
        told = "" if self._child is None else self._child.told()
        lines = [line for line in told.splitlines() if line.strip()]
        crashed = [at for at, line in enumerate(lines) if line.startswith(_CRASH)]
        first = crashed[-1] if crashed else -_TAIL_LINES
        return "\n".join(lines[first:][:_TAIL_LINES])


def _in_words(status: int | None) -> tuple[str, str]:
    """(how it ended, what to do)."""
    if status is None:
        return "it closed its line", ""
    if status == _KILLED:
        fix = "lower max_tokens_per_row, free memory or take a smaller base model."
        return (
            "it was killed, as the system does when memory runs out",
            f" See the system's log (dmesg). If it was that: {fix}",
        )
    if status < 0:
        return f"it was ended by {signal.Signals(-status).name}", ""
    return f"it ended with status {status}", ""


def _take(message: Heard, on_progress: OnProgress) -> None:
    """Pass on what was heard."""
    if message.progress is not None:
        on_progress(*message.progress)
    if message.line is not None:
        name, level, text = message.line
        logging.getLogger(name).log(level, "%s", text)


def _ignore(done: int, total: int) -> None:
    """Nobody looks on."""
