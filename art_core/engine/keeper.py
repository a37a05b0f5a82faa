"""A tiny process between us and a program: it ends the program's whole tree, whoever dies first.

In, as a script of its own: a record file, seconds of grace, the number of an open file that the
command gets too (or "None"), a command. Out: the command runs in a
session of its own; its exit status, or 128 plus the number of the signal that ended it. The tree
ends when stdin closes (our process is gone, even by kill -9), when "t" is read from it (stop) or
"k" (at once), or when the program's first process ends. `clear RECORD` ends what an earlier keeper
left, known by number and start time. For Linux and macOS, standard library alone.
"""

from __future__ import annotations

import ctypes
import json
import math
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

IN_USE = 75
"""Exit status of `clear` where the recorded program still has its owner."""
NOT_STARTED = 127
"""Exit status where the command can't be run."""
ORPHAN_GRACE = 2.0
"""Seconds that the program may take to stop by itself once nobody waits for it."""

_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36


def keep(record: Path, grace: float, lent: list[int], command: list[str]) -> int:
    """Run `command` until it ends or is to end; returns the exit status to leave with.

    Args:
        lent: files that it gets under the numbers that they have here.
    """
    owner = os.getppid()
    woken = _wake_on_signals()
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)  # what loses its parent comes to us, and can be waited for
    try:
        main = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            pass_fds=lent,
            start_new_session=True,
            preexec_fn=_die_with_keeper,
        )
    except OSError as error:
        sys.stderr.write(f"{command[0]} can't be run: {error}\n")
        return NOT_STARTED
    for number in lent:
        os.close(number)  # so that its end is seen at the other end
    _write_record(record, owner, main.pid)
    ends_at = math.inf  # then the whole group is terminated, and killed a second later
    is_terminated, status = False, None
    while status is None:
        wish = _wish(owner, woken, grace, within=0.5 if ends_at == math.inf else 0.05)
        now = time.monotonic()
        if wish is not None:
            if ends_at == math.inf:
                _signal(main.pid, signal.SIGTERM)
            ends_at = min(ends_at, now + wish)  # a stop gets shorter if nobody waits any more
        if now >= ends_at and not is_terminated:
            is_terminated = True
            _signal(-main.pid, signal.SIGTERM)
        if now >= ends_at + 1.0:
            _signal(-main.pid, signal.SIGKILL)
        status = _reap(main.pid)
    _end_group(main.pid)
    record.unlink(missing_ok=True)
    return status if status >= 0 else 128 - status


def clear(record: Path) -> int:
    """End what `record` names, if it is still the same processes; 0 once nothing of it runs."""
    try:
        known = json.loads(record.read_text("utf-8"))
        owner, keeper, main = (tuple(known[name]) for name in ("owner", "keeper", "main"))
        folder = str(known["folder"])
    except FileNotFoundError:
        return 0
    except (OSError, ValueError, KeyError, TypeError) as error:
        sys.stderr.write(f"{record} can't be read, so what it named is left alone: {error}\n")
        record.unlink(missing_ok=True)
        return 0
    if _is_same(owner) and _is_same(keeper):
        return IN_USE
    _wait_until_gone(keeper, ORPHAN_GRACE + 3.0)  # it is ending the tree itself
    if _is_same(keeper):
        _signal(keeper[0], signal.SIGKILL)
    if _is_same(main):
        _signal(-main[0], signal.SIGKILL)
    for pid in _left_in(folder, group=main[0]):
        _signal(pid, signal.SIGKILL)
    _wait_until_gone(main, 5.0)
    record.unlink(missing_ok=True)
    return 0


def start_of(pid: int) -> str | None:
    """When process `pid` began, as the system spells it; None if there is none (or a zombie)."""
    stat = Path(f"/proc/{pid}/stat")
    if Path("/proc/self/stat").exists():
        try:
            fields = stat.read_text("utf-8", "replace").rpartition(")")[2].split()
        except OSError:
            return None
        boot = Path("/proc/sys/kernel/random/boot_id").read_text("ascii").strip()
        return None if fields[0] in "ZX" else f"{boot} {fields[19]}"
    shown = subprocess.run(
        ["ps", "-o", "lstart=", "-p", str(pid)], capture_output=True, text=True, check=False
    )
    return shown.stdout.strip() or None


def _wish(owner: int, woken: int, grace: float, *, within: float) -> float | None:
    """Wait for something to happen; the seconds of grace if the program is to end, else None."""
    ready, _, _ = select.select([woken, *_line], [], [], within)
    with suppress(BlockingIOError):
        os.read(woken, 4096)
    if 0 in ready:
        word = os.read(0, 1)
        if not word:
            _line.clear()
        return {b"t": grace, b"k": 0.0}.get(word, ORPHAN_GRACE)
    if os.getppid() != owner:  # a fork of our owner holds the line open, but the owner is gone
        return ORPHAN_GRACE
    return grace if _signals & {signal.SIGTERM, signal.SIGINT, signal.SIGHUP} else None


_line = [0]
"""The file that our owner speaks through, until it is closed."""
_signals: set[int] = set()
"""Those that came."""


def _wake_on_signals() -> int:
    """Let signals end the waits of `select`; returns the file that then has bytes."""
    readable, writable = os.pipe()
    os.set_blocking(readable, False)
    os.set_blocking(writable, False)
    signal.set_wakeup_fd(writable, warn_on_full_buffer=False)
    for number in (signal.SIGCHLD, signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, lambda got, _frame: _signals.add(got))
    return readable


def _reap(main: int) -> int | None:
    """Take in every process that has ended; the status of `main`, negative for a signal."""
    status = None
    with suppress(ChildProcessError):
        while (ended := os.waitpid(-1, os.WNOHANG)) != (0, 0):
            if ended[0] == main:
                status = os.waitstatus_to_exitcode(ended[1])
    return status


def _end_group(main: int) -> None:
    """Kill what is left of the tree, those too that left the group, until nothing is."""
    deadline = time.monotonic() + 10.0
    while time.monotonic() < deadline:
        _signal(-main, signal.SIGKILL)
        for child in _children():
            _signal(child, signal.SIGKILL)
        try:
            while os.waitpid(-1, os.WNOHANG) != (0, 0):
                pass
        except ChildProcessError:
            return
        time.sleep(0.01)


def _children() -> Iterator[int]:
    """Processes whose parent is this one, where the system lists them."""
    for pid in _pids():
        with suppress(OSError):
            stat = Path(f"/proc/{pid}/stat").read_text("utf-8", "replace")
            if int(stat.rpartition(")")[2].split()[1]) == os.getpid():
                yield pid


def _left_in(folder: str, *, group: int) -> Iterator[int]:
    """Processes of the group that work in `folder`, which no other program does."""
    for pid in _pids():
        with suppress(OSError):
            if os.getpgid(pid) == group and str(Path(f"/proc/{pid}/cwd").readlink()) == folder:
                yield pid


def _pids() -> list[int]:
    proc = Path("/proc")
    return [int(entry.name) for entry in proc.glob("[0-9]*")] if proc.is_dir() else []


def _wait_until_gone(process: tuple[int, str], seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while _is_same(process) and time.monotonic() < deadline:
        time.sleep(0.05)


def _is_same(process: tuple[int, str]) -> bool:
    """True if it still runs; another process that got its number began at another time."""
    pid, start = process
    return start_of(pid) == start


def _write_record(record: Path, owner: int, main: int) -> None:
    known = {
        name: (pid, start_of(pid) or "ended")
        for name, pid in {"owner": owner, "keeper": os.getpid(), "main": main}.items()
    }
    aside = record.with_name(f".{record.name}.{os.getpid()}")
    aside.write_text(json.dumps({**known, "folder": str(Path.cwd())}), "utf-8")
    aside.replace(record)


def _signal(pid: int, number: int) -> None:
    """Send a signal to a process, or to the group -pid; fine if it is gone."""
    with suppress(ProcessLookupError, PermissionError):
        os.kill(pid, number)


def _die_with_keeper() -> None:
    """In the child, before it becomes the program: the kernel kills it if the keeper is killed."""
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def _prctl(option: int, value: int) -> None:
    if _libc is not None:
        _libc.prctl(option, value, 0, 0, 0)


_libc = ctypes.CDLL(None) if sys.platform == "linux" else None


if __name__ == "__main__":
    if sys.argv[1] == "clear":
        sys.exit(clear(Path(sys.argv[2])))
    shared = [] if sys.argv[3] == "None" else [int(sys.argv[3])]
    sys.exit(keep(Path(sys.argv[1]), float(sys.argv[2]), shared, sys.argv[4:]))
