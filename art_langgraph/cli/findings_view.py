"""How findings are shown: a line each, its fix below it, and how many there are of each kind.

In: findings. Out: lines on stdout. Text of others is shown letter for letter.
"""

from __future__ import annotations

import textwrap
from collections import Counter
from collections.abc import Sequence

from art_core.finding import Finding, Status
from art_langgraph.cli.console import console, say
from art_langgraph.visible import visible

_STYLES: dict[Status, str] = {
    "pass": "green",
    "warn": "yellow",
    "fail": "bold red",
    "skipped": "dim",
}
_COUNTED: dict[Status, str] = {
    "pass": "passed",
    "warn": "to look at",
    "fail": "failed",
    "skipped": "skipped",
}
_ROOM = 30
"""Characters of a line that a narrow terminal must leave for a text to be set in."""


def show_findings(findings: Sequence[Finding], *, width: int = 0) -> None:
    """Print them in order.

    Args:
        width: of the column of checks; at least the longest of these.
    """
    wide = max(width, *(len(finding.check) for finding in findings), 0)
    for finding in findings:
        _show(finding, wide)


def counted(findings: Sequence[Finding]) -> str:
    """How many passed, are to be looked at, and so on."""
    counts = Counter(finding.status for finding in findings)
    return ", ".join(f"{counts[s]} {word}" for s, word in _COUNTED.items() if counts[s])


def _show(finding: Finding, width: int) -> None:
    head = f"{finding.check:<{width}}  "
    indent = 8 + len(head)
    say((f"{finding.status:<8}", _STYLES[finding.status]), head, _set_in(finding.what, indent))
    if finding.fix:
        room = indent if console().is_terminal else 4
        say((" " * room + _set_in(finding.fix, room), "dim"))


def _set_in(text: str, indent: int) -> str:
    """`text` in lines that begin under its first, where there is somebody to look and room."""
    out, whole = console(), visible(text)
    if not out.is_terminal or out.width - indent < _ROOM:
        return whole
    return ("\n" + " " * indent).join(textwrap.wrap(whole, out.width - indent) or [""])
