"""What commands print: one console for our words, safe for anybody's text, on any stdout.

In: lines and tables. Out: styled text on a terminal; plain text without escapes or carriage returns
in a pipe, a file, a CI's log and on a dumb terminal. A reader who leaves (`| head`) ends the
command quietly. Left out: bars, which `art_core.progress` draws on stderr.
"""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Sequence
from functools import cache

from rich import box
from rich.console import Console
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

from art_core.config import environment

READER_LEFT = 141
"""Exit status when whoever read stdout has left: what a shell calls the end by SIGPIPE."""

Part = str | tuple[str, str]
"""Text, or text with its style. Never read as markup."""


def prepare_streams() -> None:
    """Let stdout take any text, and no file be opened in the place of a closed standard stream."""
    while (number := os.open(os.devnull, os.O_RDWR)) <= 2:
        pass
    os.close(number)
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")


def silence_stdout() -> None:
    """Send what is still to be flushed nowhere: whoever read it has left."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 1)
    os.close(nowhere)


def say(*parts: Part) -> None:
    """Print a line.

    Args:
        parts: joined; text of others goes through `visible` first.

    Raises:
        SystemExit: the reader has left.
    """
    console().print(Text.assemble(*parts), soft_wrap=not console().is_terminal)


def show_table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print rows under a head: names left, figures right; where it is too narrow, line by line."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for place, name in enumerate(head):
        justify = "right" if place else "left"
        table.add_column(
            Text(name), justify="right" if justify == "right" else "left", no_wrap=True
        )
    for row in rows:
        table.add_row(*(Text(cell) for cell in row))
    out = console()
    if Measurement.get(out, out.options.update(max_width=10_000), table).maximum <= out.width:
        out.print(table)
        return
    for name, *cells in rows:
        say((name, "bold"))
        for title, cell in zip(head[1:], cells, strict=True):
            say(f"  {title}: {cell}")


def draws_bars() -> bool:
    """True if stderr can be drawn over."""
    return _is_live(Console(stderr=True))


@cache
def console() -> Console:
    """Where commands print."""
    live = _is_live(Console())
    return _Out(force_terminal=None if live else False, highlight=False, markup=False, emoji=False)


class _Out(Console):
    def on_broken_pipe(self) -> None:
        self.quiet = True
        silence_stdout()
        raise SystemExit(READER_LEFT)


def _is_live(console: Console) -> bool:
    """True for a terminal that is looked at; a CI's log and a dumb terminal keep every byte."""
    return console.is_terminal and not console.is_dumb_terminal and not environment().ci
