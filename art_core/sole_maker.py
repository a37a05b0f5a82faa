"""One process at a time makes a folder that several may want, such as a model that is fetched.

In: the folder, and what is made of it in words. Out: a context that one process at a time is in;
the others wait, and are told so. The lock is a file beside the folder, and ends with its process.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from filelock import FileLock, Timeout

from art_core.errors import ARTError

Progress = Callable[[str], None]
"""Is told what happens, line by line."""


@contextmanager
def sole_maker(
    target: Path, doing: str, say: Progress, error: type[ARTError], *, seconds: float
) -> Iterator[None]:
    """Hold the lock under which `target` is made.

    Args:
        doing: what another process may be at, as in "fetching the same model".
        error: is raised after `seconds` of waiting.
    """
    lock = FileLock(target.parent / f".{target.name}.lock")
    try:
        lock.acquire(timeout=0)
    except Timeout:
        say(f"another process is {doing}; waiting for it")
        try:
            lock.acquire(timeout=seconds)
        except Timeout as late:
            raise error(
                f"another process has been {doing} for {seconds:g} s",
                got=str(target),
                fix=f"End that process, then try again. The lock is {lock.lock_file}.",
            ) from late
    try:
        yield
    finally:
        lock.release()


def silent(line: str) -> None:
    """Tells nobody."""
