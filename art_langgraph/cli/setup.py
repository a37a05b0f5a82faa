"""`art-langgraph setup`: what is installed beside art-langgraph, in environments of its own.

In: a choice of build. Out: an environment with vLLM, made now or found whole, and where it is.
Killed, it is started again by the same command.
"""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from art_langgraph.cli.console import say
from art_langgraph.visible import visible

if TYPE_CHECKING:
    from art_core.engine.runtime import VllmRuntime

app = typer.Typer(
    no_args_is_help=True, rich_markup_mode=None, help="Install what runs in its own environment."
)


@app.callback()
def _setup() -> None:
    """Install what runs in an environment of its own."""


@app.command()
def vllm(
    cpu: Annotated[
        bool | None,
        typer.Option("--cpu/--gpu", help="Which build. Default: for a GPU if there is one."),
    ] = None,
    path: Annotated[
        Path | None, typer.Option(help="Folder of the environment. Default: where it is found.")
    ] = None,
    python: Annotated[
        str | None, typer.Option(help="The Python to make it for. Default: the one in use.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Tell the result as JSON.")] = False,
) -> None:
    """Install a tested vLLM into an environment of its own, if it is not there yet."""
    from art_core.engine.runtime import has_gpu
    from art_core.engine.runtime_making import make_runtime
    from art_core.engine.runtime_recipe import CPU, GPU

    def tell(line: str) -> None:
        if as_json:
            typer.echo(visible(line), err=True)
        else:
            say((visible(line), "dim"))

    is_cpu = not has_gpu() if cpu is None else cpu
    if cpu is None:
        tell(f"{'no GPU' if is_cpu else 'a GPU'} here: the build for {'CPUs' if is_cpu else 'it'}")
    made = make_runtime(CPU if is_cpu else GPU, folder=path, python=python, progress=tell)
    _show(made, is_elsewhere=path is not None, as_json=as_json)


def _show(made: VllmRuntime, *, is_elsewhere: bool, as_json: bool) -> None:
    if as_json:
        typer.echo(json.dumps({**asdict(made), "python": str(made.python)}))
        return
    build = "for CPUs" if made.is_cpu else "for GPUs"
    say(f"vLLM {made.version} {build}, torch {made.torch}")
    say(("python  ", "dim"), visible(str(made.python)))
    if is_elsewhere:
        say("It is found there if ART_VLLM_PYTHON names it.")
