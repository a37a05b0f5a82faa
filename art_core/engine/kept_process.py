"""A program that never outlives this process: started under a keeper, stopped with its whole tree.

In: a command, its environment, a folder of its own. Out: whether it runs, how it ended, its log.
The keeper (keeper.py) is a process of its own, so that the tree ends even if this one is killed.
Left out: what the program is for. Linux and macOS.
"""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from art_core.engine.keeper import IN_USE
from art_core.errors import EngineError

_KEEPER = Path(__file__).with_name("keeper.py")
_LONGEST_LOG = 10_000_000
"""Bytes of log above which a start puts it aside, as `<name>.1`."""
_LONGEST_TOLD = 200_000
"""Bytes of log that are read back."""
_CLEAR_SECONDS = 30.0
_END_SECONDS = 15.0
"""Longest that the keeper may take beyond the grace."""


class KeptProcess:
    """A running program. It works in `folder`/work, where nobody else does.

    Args:
        command: program and arguments.
        environment: all that it sees.
        folder: holds its log, its record (`process.json`) and the folder it works in; one program
            at a time.
        log: name of its log there.
        grace: seconds that it may take to stop by itself.
        lent: an open file that it gets, under the number that it has here.

    Raises:
        EngineError: another process runs a program in `folder`, or this is Windows.
        OSError: the folder can't be written.
    """

    def __init__(
        self,
        command: Sequence[str],
        *,
        environment: Mapping[str, str],
        folder: Path,
        log: str,
        grace: float,
        lent: int | None = None,
    ) -> None:
        check_platform()
        self._record = folder.resolve() / "process.json"
        work = folder.resolve() / "work"
        work.mkdir(parents=True, exist_ok=True)
        clear_leftovers(self._record)
        self.log = folder / log
        self._log_start = _room_in(self.log)
        self._grace = grace
        self._line = threading.Lock()  # to the keeper; its number is another file's once closed
        with self.log.open("ab") as out:
            self._keeper = subprocess.Popen(
                [*_keeper(), str(self._record), str(grace), str(lent), *command],
                bufsize=0,
                pass_fds=() if lent is None else (lent,),
                stdin=subprocess.PIPE,
                stdout=out,
                stderr=subprocess.STDOUT,
                env=dict(environment),
                cwd=work,
                start_new_session=True,  # Ctrl-C on the terminal is our business, not its
            )

    def wait(self, timeout: float) -> int | None:
        """Its exit status once it has ended with its whole tree; None after `timeout` seconds.

        A negative status is the signal that ended it.
        """
        try:
            status = self._keeper.wait(timeout)
        except subprocess.TimeoutExpired:
            return None
        self._hang_up()
        if status < 0:  # the keeper itself was killed
            clear_leftovers(self._record)
        return 128 - status if status > 128 else status

    def stop(self, *, at_once: bool = False) -> None:
        """End it and wait until nothing of it is left. Safe to call twice and from any thread.

        Args:
            at_once: don't wait for it to stop by itself.
        """
        self._say(b"k" if at_once else b"t")
        if self.wait(self._grace + _END_SECONDS) is None:
            self._keeper.kill()
            self.wait(_END_SECONDS)

    def _say(self, word: bytes) -> None:
        """Tell the keeper, if it is there."""
        with self._line, suppress(OSError):
            if self._keeper.stdin is not None and not self._keeper.stdin.closed:
                self._keeper.stdin.write(word)

    def _hang_up(self) -> None:
        with self._line, suppress(OSError):
            if self._keeper.stdin is not None:
                self._keeper.stdin.close()

    def told(self) -> str:
        """What it has written to its log since it was started; of much only the end."""
        try:
            with self.log.open("rb") as file:
                size = file.seek(0, os.SEEK_END)
                file.seek(max(self._log_start, size - _LONGEST_TOLD))
                return file.read().decode("utf-8", "replace")
        except FileNotFoundError:  # somebody tidied up
            return ""


def clear_leftovers(record: Path) -> None:
    """End what a crashed process left behind, if `record` still names the same processes.

    Raises:
        EngineError: it is not left behind: its owner lives.
    """
    done = subprocess.run(
        [*_keeper(), "clear", str(record)],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        timeout=_CLEAR_SECONDS,
        check=False,
    )
    if done.returncode == IN_USE:
        raise EngineError(
            "a program runs there already",
            got=str(record.parent),
            expected="a folder for each engine and each trainer",
            fix="Stop the other one, or choose another folder.",
        )


def check_platform() -> None:
    """See that programs can be kept here.

    Raises:
        EngineError: this is Windows.
    """
    if os.name == "nt":
        raise EngineError(
            "vLLM does not run on Windows",
            fix="Use it under WSL 2, or a server on Linux; training and serving without vLLM work.",
        )


def _keeper() -> list[str]:
    """Started without site packages and settings of Python: it is small and always the same."""
    return [sys.executable, "-I", "-S", str(_KEEPER)]


def _room_in(log: Path) -> int:
    """Put a long log aside; the place where the next line will be written."""
    if not log.is_file():
        return 0
    if (size := log.stat().st_size) <= _LONGEST_LOG:
        return size
    log.replace(log.with_name(f"{log.name}.1"))
    return 0
