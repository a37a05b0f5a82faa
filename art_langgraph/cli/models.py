"""`art-langgraph model`: base models on this machine."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from art_langgraph.cli.console import say
from art_langgraph.cli.library_noise import no_library_warnings
from art_langgraph.visible import visible

app = typer.Typer(
    no_args_is_help=True, rich_markup_mode=None, help="Fetch, look at and merge base models."
)


@app.command()
def fetch(
    name: Annotated[str, typer.Argument(help='"owner/name" on the hub, or a folder.')],
) -> None:
    """Fetch a base model, if it is not here yet, and say where it lies."""
    from art_core.nn.base_model import resolve_base_model

    _show(resolve_base_model(name, progress=lambda line: say((visible(line), "dim"))))


@app.command()
def show(
    folder: Annotated[Path, typer.Argument(help="A folder in Hugging Face format.")],
) -> None:
    """Check that a folder holds a whole base model, and say what it is."""
    _show(folder)


@app.command()
def merge(
    adapter: Annotated[Path, typer.Argument(help="A checkpoint's folder, or any LoRA of peft's.")],
    out: Annotated[Path, typer.Argument(help="The folder to make.")],
    base_model: Annotated[
        str | None, typer.Option(help="Its base model; by default the one that it names.")
    ] = None,
) -> None:
    """Write a base model with an adapter in its weights, which any server loads."""
    from art_core.nn.base_identity import named_base
    from art_core.nn.base_model import resolve_base_model
    from art_core.nn.merged_folder import write_merged

    name = base_model or named_base(adapter)
    base = resolve_base_model(name, progress=lambda line: say((visible(line), "dim")))
    with no_library_warnings():
        write_merged(base, adapter, out)
    _show(out)


def _show(folder: Path) -> None:
    from art_core.nn.base_model import inspect_base_model

    info = inspect_base_model(folder)
    for name, value in {
        "folder": info.path,
        "architecture": info.architecture,
        "context length": info.context_length or "as its kind has it",
        "vocabulary": info.vocab_size,
        "weights": info.dtype,
        "chat template": "its own" if info.has_chat_template else "none",
    }.items():
        say((f"{name:<16}", "dim"), visible(str(value)))
