"""A gate that holds calls while the policy changes.

In: `hold` and `release` from any thread. Out: `await wait()` on any event loop returns once the
gate is open. While it is closed, no rollout's time limit runs.
"""

from __future__ import annotations

import asyncio
import threading
from contextlib import suppress

from art_core.time_limit import HELD


class Gate:
    """Open at first."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._holds = 0
        self._waiting: dict[asyncio.Event, asyncio.AbstractEventLoop] = {}

    def hold(self) -> None:
        """Close the gate; each hold wants its own release."""
        with self._lock:
            self._holds += 1
            if self._holds == 1:
                HELD.begin()

    def __del__(self) -> None:
        """A gate that is dropped while it is closed holds nobody any more."""
        if self._holds:
            HELD.end()

    def release(self) -> None:
        """Take one hold back; with the last one, everything that waits goes on.

        Raises:
            RuntimeError: the gate is not held.
        """
        with self._lock:
            if self._holds == 0:
                raise RuntimeError("release() of a gate that is not held")
            self._holds -= 1
            if self._holds > 0:
                return
            HELD.end()
            waiting, self._waiting = self._waiting, {}
        for event, loop in waiting.items():
            with suppress(RuntimeError):  # that loop is closed, nobody waits there any more
                loop.call_soon_threadsafe(event.set)

    async def wait(self) -> None:
        """Return once the gate is open."""
        while True:
            event = asyncio.Event()
            with self._lock:
                if self._holds == 0:
                    return
                self._waiting[event] = asyncio.get_running_loop()
            try:
                await event.wait()
            finally:  # also when it is cancelled
                with self._lock:
                    self._waiting.pop(event, None)
