"""A coroutine under Ctrl-C: the first lets it end in good order, the second leaves at once.

In: a coroutine. Out: its result, or KeyboardInterrupt once it has ended. Leaving at once is safe:
what is on disk is whole or absent.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import Coroutine
from types import FrameType
from typing import Any, TypeVar

T = TypeVar("T")

_NOTE = (
    b"\nStopping; a step that is being learned is finished first. "
    b"Ctrl-C again leaves at once, without it.\n"
)
_CURSOR_BACK = b"\x1b[?25h"
"""A bar hides the cursor while it is drawn."""


def run(work: Coroutine[Any, Any, T], note: bytes = _NOTE) -> T:
    """As `asyncio.run`, in the main thread.

    Args:
        work: the coroutine.
        note: told at the first Ctrl-C.

    Raises:
        KeyboardInterrupt: Ctrl-C was pressed, and `work` has ended.
        Exception: what `work` raised.
    """
    with asyncio.Runner() as runner:
        loop = runner.get_loop()
        task = loop.create_task(work)

        def on_interrupt(number: int, frame: FrameType | None) -> None:
            if task.cancelling():
                _tell(_CURSOR_BACK if os.isatty(2) else b"")
                os._exit(128 + number)
            _tell(note)
            task.cancel()
            loop.call_soon_threadsafe(lambda: None)  # wakes it up

        before = signal.signal(signal.SIGINT, on_interrupt)
        try:
            return loop.run_until_complete(task)
        except asyncio.CancelledError:
            raise KeyboardInterrupt from None
        finally:
            signal.signal(signal.SIGINT, before)


def _tell(text: bytes) -> None:
    """Write past Python's buffers, which a signal may have come upon half-way."""
    if sys.stderr is not None:
        try:
            os.write(2, text)
        except OSError:
            return  # nobody reads it
