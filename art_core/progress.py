"""How far a loop is: a bar on a terminal, else plain lines, on stderr.

In: a total, ticks, and a text of figures. Out: what people see, never a fault: a display that
breaks (a closed pipe) falls silent. It leaves out what the figures mean.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Protocol

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from art_core.config import environment

LINE_INTERVAL = 10.0
"""Seconds between two plain lines, at least; the last line comes at the end."""


class Display(Protocol):
    """What a loop tells of itself."""

    def show(self, done: int, total: int | None, figures: str) -> None:
        """`done` of `total` (None: not known) are through."""
        ...


@contextmanager
def progress(description: str, *, shown: bool = True) -> Iterator[Display]:
    """A display for the time of the context.

    Args:
        description: stands before the bar; not read as markup.
        shown: False is silent.
    """
    if not shown or sys.stderr is None:
        yield _Silent()
    elif _is_live(_console()):
        columns = (
            TextColumn("{task.description}", markup=False),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[figures]}", markup=False),
            TimeElapsedColumn(),
        )
        with Progress(*columns, console=_console()) as bar:
            yield _Bar(bar, description)
    else:
        lines = _Lines(description)
        try:
            yield lines
        finally:
            lines.end()


class _Silent:
    def show(self, done: int, total: int | None, figures: str) -> None:
        pass


class _Bar:
    def __init__(self, bar: Progress, description: str) -> None:
        self._bar = bar
        self._task = bar.add_task(description, total=None, figures="")

    def show(self, done: int, total: int | None, figures: str) -> None:
        self._bar.update(self._task, completed=done, total=total, figures=figures)


class _Lines:
    def __init__(self, description: str) -> None:
        self._description = description
        self._begun = self._written = time.monotonic()
        self._line: str | None = None
        self._broken = False

    def show(self, done: int, total: int | None, figures: str) -> None:
        of = "" if total is None else f"/{total}"
        self._line = f"{self._description}: {done}{of}  {figures}"
        if time.monotonic() - self._written >= LINE_INTERVAL:
            self.end()

    def end(self) -> None:
        """Write the newest line, if it is not written yet."""
        line, self._line = self._line, None
        self._written = time.monotonic()
        if line is not None and not self._broken:
            try:
                sys.stderr.write(f"{line}  {self._written - self._begun:.0f} s\n")
                sys.stderr.flush()
            except (OSError, ValueError):  # closed; nobody looks on
                self._broken = True


@cache
def _console() -> Console:
    """One for all bars, so that rich can draw several at once."""
    return Console(stderr=True)


def _is_live(console: Console) -> bool:
    """True if lines can be drawn over; a CI's log and a dumb terminal keep every one."""
    live = (console.is_terminal and not console.is_dumb_terminal) or console.is_jupyter
    return live and not environment().ci
