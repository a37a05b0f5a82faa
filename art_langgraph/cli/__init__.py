"""The command `art-langgraph`: one file a group of commands, heavy parts imported inside them.

In: a command line. Out: an exit status: 0 done, 1 failed, 2 wrong usage, 130 interrupted. A fault
is one clear message on stderr; `--debug` adds the traceback.
"""

from __future__ import annotations

import sys
import traceback
from collections.abc import Sequence
from typing import Annotated

import typer

from art_core.errors import ARTError
from art_langgraph.cli.console import READER_LEFT, prepare_streams, silence_stdout
from art_langgraph.cli.doctor import run_doctor
from art_langgraph.cli.models import app as model_commands
from art_langgraph.cli.quickstart import run_quickstart
from art_langgraph.cli.rehearse import run_rehearse
from art_langgraph.cli.serve import run_serve
from art_langgraph.cli.setup import app as setup_commands
from art_langgraph.cli.sft import app as sft_commands
from art_langgraph.cli.times import run_times
from art_langgraph.visible import visible

FAILED, INTERRUPTED = 1, 130

app = typer.Typer(
    name="art-langgraph",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)
app.command("quickstart")(run_quickstart)
app.command("rehearse")(run_rehearse)
app.command("doctor")(run_doctor)
app.command("times")(run_times)
app.command("serve")(run_serve)
app.add_typer(model_commands, name="model")
app.add_typer(setup_commands, name="setup")
app.add_typer(sft_commands, name="sft")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command line; return its exit status.

    Args:
        arguments: None means those of the process.
    """
    prepare_streams()
    given = list(sys.argv[1:] if arguments is None else arguments)
    debug = "--debug" in given
    given = [argument for argument in given if argument != "--debug"]  # it may stand anywhere
    try:
        app(given, prog_name="art-langgraph")
    except SystemExit as leaving:
        return _status(leaving)
    except KeyboardInterrupt:
        return INTERRUPTED
    except ARTError as error:
        _complain(visible(str(error)), debug=debug)
    except Exception as error:  # noqa: BLE001 - the edge of the process
        _complain(f"{type(error).__name__}: {visible(str(error))}", debug=debug, bug=True)
    return FAILED


def _status(leaving: SystemExit) -> int:
    if isinstance(leaving.__context__, BrokenPipeError):
        silence_stdout()
        return READER_LEFT
    return leaving.code if isinstance(leaving.code, int) else int(leaving.code is not None)


def _complain(message: str, *, debug: bool, bug: bool = False) -> None:
    """Tell of a fault on stderr. Called while it is handled."""
    if sys.stderr is None:
        return
    if debug:
        traceback.print_exc()
    sys.stderr.write(f"art-langgraph: {message}\n")
    if bug and not debug:
        sys.stderr.write("This was not foreseen. Run it again with --debug to see where.\n")


def _show_version(wanted: bool) -> None:
    if wanted:
        from importlib.metadata import version

        typer.echo(f"art-langgraph {version('art-langgraph')}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool,
        typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version."),
    ] = False,
    debug: Annotated[
        bool, typer.Option("--debug", help="Show tracebacks; may stand anywhere.")
    ] = False,
) -> None:
    """Train small open models to do your LangGraph agent's job."""
