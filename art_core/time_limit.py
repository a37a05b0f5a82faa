"""Time limits that don't count the time during which an engine of this process holds calls.

In: seconds, and a gate's word that holding begins and ends. Out: a limit around a block, as
`asyncio.timeout` is one. While a policy is trained its calls are held; that is no rollout's fault.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager

_RECHECK_SECONDS = 0.02
"""Shortest wait before a limit that held time has moved is looked at again."""


class _HeldTime:
    """A clock that runs while anything is held. Every method may be called from any thread."""

    def __init__(self) -> None:
        self._lock = threading.RLock()  # a gate may be collected inside
        self._holds = 0
        self._since = 0.0
        self._total = 0.0

    def begin(self) -> None:
        """Something is held from now on; each call wants its own `end`."""
        with self._lock:
            if self._holds == 0:
                self._since = time.monotonic()
            self._holds += 1

    def end(self) -> None:
        """One thing is no longer held."""
        with self._lock:
            self._holds -= 1
            if self._holds == 0:
                self._total += time.monotonic() - self._since

    def seconds(self) -> float:
        """How long the clock has run."""
        with self._lock:
            running = time.monotonic() - self._since if self._holds else 0.0
            return self._total + running


HELD = _HeldTime()
"""Of this process: the gates of its engines tell it when they close and open."""


class Waiting:
    """Time that one limit does not count beside held time: somebody else is waited for."""

    def __init__(self) -> None:
        self._total = 0.0
        self._begun: float | None = None

    @contextmanager
    def on(self) -> Iterator[None]:
        """The time of the block is not counted; blocks don't overlap."""
        self._begun = _unheld()
        try:
            yield
        finally:
            self._total, self._begun = self.seconds(), None

    def seconds(self) -> float:
        """How long it was waited, without held time, which no limit counts anyhow."""
        return self._total + (0.0 if self._begun is None else _unheld() - self._begun)


def _unheld() -> float:
    """A clock that stands still while anything is held."""
    return time.monotonic() - HELD.seconds()


@asynccontextmanager
async def time_limit(
    seconds: float | None, waiting: Waiting | None = None
) -> AsyncIterator[asyncio.Timeout]:
    """`asyncio.timeout(seconds)`, held time not counted; None sets no limit.

    Args:
        waiting: time that is not counted either.
    """
    async with asyncio.timeout(None) as limit:
        loop = asyncio.get_running_loop()
        timer: asyncio.TimerHandle | None = None
        begun = _unheld()

        def check() -> None:
            nonlocal timer
            assert seconds is not None
            left = seconds - (_unheld() - begun) + (waiting.seconds() if waiting else 0.0)
            if left <= 0.0:
                limit.reschedule(loop.time())
            else:
                timer = loop.call_later(max(left, _RECHECK_SECONDS), check)

        if seconds is not None:
            timer = loop.call_later(seconds, check)
        try:
            yield limit
        finally:
            if timer is not None:
                timer.cancel()
