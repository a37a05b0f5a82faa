"""Threads enough for every rollout at once, while a gather runs.

In: how many rollouts may run side by side. Out: a default executor of the running loop that is as
wide, so that synchronous graph nodes (which run there) don't wait for each other; its threads start
when needed and see the scope of their rollout. Afterwards the loop has the executor it had before.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from threading import Lock
from weakref import WeakKeyDictionary

from art_core.capture import ContextExecutor

UNLIMITED = 4096
"""Width for a gather without a limit of its own."""


@contextmanager
def wide_executor(width: int | None) -> Iterator[None]:
    """Give the running loop a default executor of `width` threads; None means UNLIMITED.

    Several at once on one loop add up. asyncio has no public getter of the executor that is
    replaced: where the loop doesn't show it (uvloop), a fresh one of the usual size is put back.
    """
    loop = asyncio.get_running_loop()
    with _guard:
        widened = _of_loop.setdefault(loop, _Widened())
    widened.enter(loop, width or UNLIMITED)
    try:
        yield
    finally:
        widened.leave(loop, width or UNLIMITED)


@dataclass
class _Widened:
    """The executor of one loop, and who needs it. Only touched in the loop's thread."""

    needs: list[int] = field(default_factory=list)
    before: ThreadPoolExecutor | None = None
    now: ThreadPoolExecutor | None = None
    width: int = 0

    def enter(self, loop: asyncio.AbstractEventLoop, width: int) -> None:
        if not self.needs:
            self.before = getattr(loop, "_default_executor", None)
        self.needs.append(width)
        if sum(self.needs) > self.width:
            self.width = sum(self.needs)
            self._install(loop, ContextExecutor(self.width, thread_name_prefix="art-rollout"))

    def leave(self, loop: asyncio.AbstractEventLoop, width: int) -> None:
        self.needs.remove(width)
        if not self.needs:
            self._install(loop, self.before or ThreadPoolExecutor())
            self.before, self.now, self.width = None, None, 0

    def _install(self, loop: asyncio.AbstractEventLoop, executor: ThreadPoolExecutor) -> None:
        loop.set_default_executor(executor)
        if self.now is not None:
            self.now.shutdown(wait=False)  # what it is running, it finishes
        self.now = executor


_guard = Lock()
_of_loop: WeakKeyDictionary[asyncio.AbstractEventLoop, _Widened] = WeakKeyDictionary()
