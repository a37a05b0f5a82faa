"""`art-langgraph serve`: the GPU machine's side of the split.

In: an address, a key, a folder. Out: a server for `art.HttpBackend` and for any OpenAI client,
until Ctrl-C.
"""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Annotated

import typer

from art_core.errors import ConfigError
from art_langgraph.cli.console import say
from art_langgraph.cli.train_extra import check_installed

PORT = 7999


def run_serve(
    host: Annotated[str, typer.Option(help="Any other than loopback needs a key.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="0 takes a free one.")] = PORT,
    api_key: Annotated[
        str | None,
        typer.Option(envvar="ART_API_KEY", show_envvar=True, help="Clients must send it."),
    ] = None,
    path: Annotated[Path, typer.Option(help="The server's folder: runs, jobs, records.")] = Path(
        ".art"
    ),
    base_model: Annotated[
        list[str] | None,
        typer.Option(help="Serve this base model (a name or a folder) alone; may come again."),
    ] = None,
    allow_host: Annotated[
        list[str] | None,
        typer.Option(help="A name that clients know the server by; may come again."),
    ] = None,
    max_body: Annotated[int, typer.Option(min=1, help="MiB that one request may have.")] = 2048,
) -> None:
    """Serve and train models for clients on other machines."""
    check_installed("serving")
    if find_spec("fastapi") is None:
        raise ConfigError(
            "the server needs packages that are not installed (fastapi)",
            fix="Run: pip install 'art-langgraph[train,server]'",
        )
    from art_core.server.app import ServerSettings
    from art_core.server.serve import serve

    settings = ServerSettings(
        path=path,
        base_models={name: name for name in base_model} if base_model else None,
        max_body=max_body * 2**20,
    )

    def ready(url: str) -> None:
        say(f"serving on {url}, in {path}")
        if api_key is None:
            say("no key is set: every user of this machine may use it")
        say(f'train with art.HttpBackend("{url}"); Ctrl-C ends it')

    serve(settings, host=host, port=port, api_key=api_key, hosts=allow_host or (), ready=ready)
