"""`art-langgraph times`: where the time of a run's steps went.

In: a run folder, or its `history.jsonl`. Out: a table of phases, or JSON; perhaps a picture.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from art_core.errors import RunFolderError
from art_core.files import replace_file
from art_core.plural import plural
from art_langgraph.cli.console import say, show_table
from art_langgraph.visible import visible


def run_times(
    run: Annotated[Path, typer.Argument(help="A run folder (.art/PROJECT/models/NAME).")],
    as_json: Annotated[bool, typer.Option("--json", help="One JSON document on stdout.")] = False,
    svg: Annotated[Path | None, typer.Option(help="Write a picture to this file.")] = None,
) -> None:
    """How long gathering, packing, forward and backward passes and swaps took, step by step."""
    from art_core.metrics import MetricsLog
    from art_core.step_chart import chart
    from art_core.step_times import document, times_of

    history = run / "history.jsonl" if run.is_dir() else run
    if not history.is_file():
        raise RunFolderError(
            "no run is there",
            got=str(run),
            expected="a folder with history.jsonl",
            fix="Give the run's own folder, such as .art/my-project/models/agent-001.",
        )
    times = times_of(MetricsLog(history).read())
    if svg is not None:
        text = chart(times)
        replace_file(svg, lambda aside: aside.write_text(text, "utf-8"))
    told = document(times)
    if as_json:
        typer.echo(json.dumps(told, indent=2))
        return
    _show(told)
    if svg is not None:
        say(("picture  ", "dim"), visible(str(svg)))


def _show(told: dict[str, Any]) -> None:
    steps, phases = told["steps"], told["phases"]
    if not steps:
        say("no step of this run has been timed")
        return
    rows = [
        [name, f"{phase['median_seconds']:.3g} s", f"{phase['share']:.1%}"]
        for name, phase in phases.items()
    ]
    show_table(["phase", f"median of {plural(len(steps), 'step')}", "of all time"], rows)
