"""Time limits that don't count the time during which an engine of this process holds calls.

In: seconds, and a gate's word that holding begins and ends. Out: a limit around a block, as
`asyncio.timeout` is one. While a policy is trained its calls are held; that is no rollout's fault.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

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


@asynccontextmanager
async def time_limit(seconds: float | None) -> AsyncIterator[asyncio.Timeout]:
    """`asyncio.timeout(seconds)`, held time not counted; None sets no limit."""
    async with asyncio.timeout(None) as limit:
        loop = asyncio.get_running_loop()
        timer: asyncio.TimerHandle | None = None
        begun, held_before = time.monotonic(), HELD.seconds()

        def check() -> None:
            nonlocal timer
            assert seconds is not None
            left = seconds - (time.monotonic() - begun) + (HELD.seconds() - held_before)
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
