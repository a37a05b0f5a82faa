"""How the doctor's report is shown: the machine, the model, its memory in a table, the verdict.

In: a `Report`. Out: lines on stdout. Left out: JSON (`readiness.report`).
"""

from __future__ import annotations

from collections.abc import Sequence

from art_core.readiness.about_machine import gib
from art_core.readiness.about_memory import Row
from art_core.readiness.report import ModelReport, Report
from art_langgraph.cli.console import say, show_table
from art_langgraph.cli.findings_view import counted, show_findings
from art_langgraph.visible import visible

_LEGEND = (
    "At least: one call at a time, layers computed again for the backward pass. At ease: all calls "
    "at once, nothing computed again."
)
_FITS = {True: "fits", False: "no", None: "-"}


def show_report(report: Report) -> None:
    """Everything, the verdict last."""
    width = max(len(finding.check) for finding in report.findings)
    say(("This machine", "bold"))
    show_findings(report.machine, width=width)
    if report.model is not None:
        say()
        say((visible(report.model.name), "bold"))
        show_findings(report.model.findings, width=width)
        if report.model.table:
            _show_memory(report.model)
    say()
    _show_verdict(report)


def _show_memory(model: ModelReport) -> None:
    load = model.load
    say()
    say(
        ("Memory", "bold"),
        f", estimated: {load.calls} calls of {load.length:,} tokens at once, LoRA of rank "
        f"{load.rank}, no call longer in training",
    )
    head = ["", "at least", "at ease", "here", "smallest GPU"]
    show_table(head, [_cells(row) for row in model.table])
    say((_LEGEND, "dim"))


def _cells(row: Row) -> Sequence[str]:
    card = f"{row.card} GiB" if row.card else "none" if row.way != "embedded" else "-"
    return [row.what, gib(row.least), gib(row.most), _FITS[row.fits], card]


def _show_verdict(report: Report) -> None:
    bad = report.has_problems
    what = "This model can't be served and trained here" if report.model else "This can't work"
    about = f"{what} as it is" if bad else "Nothing stands in the way"
    say((about, "bold red" if bad else "bold green"), f": {counted(report.findings)}.")
