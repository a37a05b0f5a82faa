"""`art-langgraph doctor`: what this machine can do, and what a base model needs.

In: perhaps a base model, by name or folder, and how long its calls are. Out: a table of what was
found, each problem with its fix; status 0 if nothing is wrong, 1 if something can't work. No
weights are read, nothing is fetched but the small files of a model that is not here. Left out: the
checks (art_core/readiness), how they look (doctor_view.py).
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from art_core.errors import ARTError, RuntimeMissing
from art_core.finding import Finding
from art_langgraph.cli.console import say
from art_langgraph.visible import visible

if TYPE_CHECKING:
    from art_core.readiness.about_machine import VllmSeen
    from art_core.readiness.chat import Chat
    from art_core.readiness.machine import Machine
    from art_core.readiness.memory import Load
    from art_core.readiness.model_files import ModelFiles
    from art_core.readiness.report import ModelReport, Report


def run_doctor(
    base_model: Annotated[
        str | None,
        typer.Option(help='A base model to look at: "owner/name" on the hub, or a folder.'),
    ] = None,
    max_length: Annotated[
        int, typer.Option(min=16, help="Tokens of a call, prompt and answer.")
    ] = 4096,
    calls: Annotated[int, typer.Option(min=1, help="Calls answered at once.")] = 16,
    rank: Annotated[int, typer.Option(min=1, help="Rank of the LoRA.")] = 8,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON document on stdout.")] = False,
) -> None:
    """What can this machine do, and can a base model be served and trained on it?"""
    from art_core.readiness.memory import Load
    from art_core.readiness.report import document

    report = _examine(base_model, Load(length=max_length, calls=calls, rank=rank), quiet=as_json)
    if as_json:
        typer.echo(json.dumps(document(report), indent=2))
    else:
        from art_langgraph.cli.doctor_view import show_report

        show_report(report)
    raise typer.Exit(int(report.has_problems))


def _examine(base_model: str | None, load: Load, *, quiet: bool) -> Report:
    from art_core.nn.base_model import models_home
    from art_core.readiness.about_machine import about_machine
    from art_core.readiness.machine import look_around
    from art_core.readiness.places import proxy_in_between, try_folder, try_loopback
    from art_core.readiness.report import Report

    machine = look_around()
    places = {"models": try_folder(models_home()), "runs": try_folder(Path(".art"))}
    findings = about_machine(machine, places, try_loopback(), _vllm(), proxy_in_between())
    model = None if base_model is None else _model(base_model, machine, load, quiet=quiet)
    return Report(findings, model)


def _vllm() -> VllmSeen:
    from art_core.engine.runtime import find_runtime
    from art_core.readiness.about_machine import VllmSeen

    try:
        found = find_runtime()
    except RuntimeMissing as error:
        return VllmSeen(None, why_not=error.what, fix=error.fix)
    return VllmSeen(found.version, found.is_cpu)


def _model(name: str, machine: Machine, load: Load, *, quiet: bool) -> ModelReport:
    """The report of a model; one that can't be read is one finding."""
    from art_core.readiness.report import ModelReport

    try:
        return _look_at(name, machine, load, quiet=quiet)
    except ARTError as error:
        finding = Finding("base model", "fail", error.what, error.fix)
        return ModelReport(name, [finding], [], load, None, None)


def _look_at(name: str, machine: Machine, load: Load, *, quiet: bool) -> ModelReport:
    from art_core.readiness.about_memory import about_memory, rows
    from art_core.readiness.about_model import about_model
    from art_core.readiness.computes import Computed, how_it_computes
    from art_core.readiness.memory import needs
    from art_core.readiness.model_files import find_model, read_model
    from art_core.readiness.report import ModelReport
    from art_core.readiness.shape import shape_of
    from art_core.readiness.sizes import sizes_of

    files = read_model(find_model(name, say=lambda line: _tell(line, quiet=quiet)))
    computed = how_it_computes(files.folder)
    shape = shape_of(files.config, computed.config if isinstance(computed, Computed) else None)
    sizes = sizes_of(shape)
    chat = _chat(files)
    table = rows(needs(shape, sizes, load), machine) if sizes else []
    findings = about_model(files, shape, sizes, chat, computed, load)
    if table:
        findings += about_memory(table, machine)
    return ModelReport(
        name,
        findings,
        table,
        load,
        tool_parser=None if isinstance(chat, ARTError) else chat.tool_parser.name,
        reasoning_parser=None if isinstance(chat, ARTError) else chat.reasoning_parser.name,
    )


def _chat(files: ModelFiles) -> Chat | ARTError:
    """How the model is talked to, or why it can't be."""
    from art_core.engine.chat_template import hermes_chatml
    from art_core.readiness.chat import chat_of

    try:
        return chat_of(files, hermes_chatml())
    except ARTError as error:
        return error


def _tell(line: str, *, quiet: bool) -> None:
    if not quiet:
        say((visible(line), "dim"))
