"""`art-langgraph quickstart`: a shop assistant learns its job before the user's eyes.

In: options. Out: a trained adapter in a run folder, figures on the screen, a report folder. Started
again, it goes on with the run; a finished one is shown again. Left out: the loop
(art_langgraph/quickstart/loop.py), and how things look (quickstart_view.py).
"""

from __future__ import annotations

import re
import tempfile
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from enum import StrEnum
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from art_core.config import environment
from art_core.errors import ConfigError
from art_langgraph.cli.console import draws_bars, say
from art_langgraph.cli.library_noise import no_library_bars, no_library_warnings
from art_langgraph.cli.train_extra import check_installed
from art_langgraph.visible import visible

if TYPE_CHECKING:
    import art_core as art
    from art_core.rundir import RunDir
    from art_langgraph.cli.quickstart_view import Narrator
    from art_langgraph.quickstart.journal import Journal
    from art_langgraph.quickstart.recipe import Recipe

PROJECT = "quickstart"
DEFAULT_MODEL = "SmolLM2-135M-Instruct"


class Graph(StrEnum):
    """How the agent is built."""

    AGENT = "agent"
    STATEGRAPH = "stategraph"


def run_quickstart(
    seed: Annotated[
        int, typer.Option(min=0, help="Makes the shop, its customers and the noise.")
    ] = 0,
    steps: Annotated[
        int | None, typer.Option(min=1, help="Train for this many steps at most.")
    ] = None,
    out: Annotated[Path, typer.Option(help="Folder of the report.")] = Path("quickstart-report"),
    path: Annotated[Path, typer.Option(help="Folder that runs are kept in.")] = Path(".art"),
    graph: Annotated[
        Graph, typer.Option(help="LangChain's create_agent, or the same as a StateGraph.")
    ] = Graph.AGENT,
    fresh: Annotated[
        bool, typer.Option("--fresh", help="Start a new run; the old one is kept.")
    ] = False,
    base_model: Annotated[
        str, typer.Option(help='"owner/name" on the hub, or a folder.')
    ] = DEFAULT_MODEL,
    quick: Annotated[
        bool, typer.Option("--quick", help="A minute that shows that it runs; it learns nothing.")
    ] = False,
) -> None:
    """Train a small model to be a shop assistant, and see it learn."""
    began = time.monotonic()
    from art_langgraph.cli.quickstart_view import Narrator, introduce, show_result
    from art_langgraph.quickstart.journal import Journal
    from art_langgraph.quickstart.recipe import Recipe
    from art_langgraph.quickstart.report import write_report

    recipe = Recipe(seed=seed, base_model=base_model, graph=graph.value)
    recipe = recipe.quick() if quick else recipe
    recipe = replace(recipe, max_steps=steps or recipe.max_steps)
    is_remote = environment().server_url is not None
    check_installed("training", "matplotlib")
    _check_folder(out)
    model, run = choose_run(recipe, path, quick=quick, fresh=fresh)
    journal = Journal(model, recipe)
    introduce(recipe, run, journal)
    if not journal.finished:
        with _going_on(run, recipe):
            began += 0.0 if is_remote else _fetch(base_model)
            _train(model, recipe, journal, Narrator(recipe, bars=draws_bars()), began)
    show_result(write_report(out, run, recipe, journal), run, out)


def _train(
    model: art.TrainableModel,
    recipe: Recipe,
    journal: Journal,
    narrator: Narrator,
    began: float,
) -> None:
    """Do what is missing of the run."""
    from art_langgraph import SamplingOverridden
    from art_langgraph.cli.interrupt import run
    from art_langgraph.quickstart.session import run_session

    async def session() -> None:
        async with _backend(narrator.bars) as backend:
            await run_session(model, backend, recipe, journal, narrator, began=began)

    with no_library_warnings():
        warnings.simplefilter("ignore", SamplingOverridden)  # it is meant so: see Desk.serve
        run(session())


def _backend(bars: bool) -> art.HttpBackend | art.LocalBackend:
    """The server that ART_SERVER_URL names, else this machine."""
    import art_core as art

    if (url := environment().server_url) is not None:
        return art.HttpBackend(url, show_progress=bars)
    return art.LocalBackend(show_progress=bars)


def choose_run(
    recipe: Recipe, path: Path, *, quick: bool, fresh: bool
) -> tuple[art.TrainableModel, RunDir]:
    """The model, under the name of the newest run of this kind, or of a fresh one."""
    import art_core as art
    from art_core.rundir import RunDir

    words = ["shop", f"seed{recipe.seed}"]
    if recipe.base_model != DEFAULT_MODEL:
        words.append(re.sub(r"[^A-Za-z0-9-]+", "-", Path(recipe.base_model).name)[:40].strip("-"))
    words += [recipe.graph] * (recipe.graph != Graph.AGENT) + ["quick"] * quick
    name = "-".join(filter(None, words))
    runs = (RunDir.at(path, PROJECT, f"{name}-{n}" if n > 1 else name) for n in count(1))
    run = next(runs)
    for later in runs:
        if not (later.path if not fresh else run.path).exists():
            break
        run = later
    model = art.TrainableModel(
        name=run.name,
        project=PROJECT,
        base_model=recipe.base_model,
        base_path=str(path),
        art_config=recipe.model_config(),
    )
    return model, run


def _fetch(base_model: str) -> float:
    """Have the base model on this machine; return the seconds that it took."""
    from art_core.nn.base_model import resolve_base_model

    began = time.monotonic()
    if not draws_bars():
        no_library_bars()
    resolve_base_model(base_model, progress=lambda line: say((visible(line), "dim")))
    no_library_bars()
    return time.monotonic() - began


def _check_folder(out: Path) -> None:
    """Fail now, not after the training, if the report can't be written."""
    try:
        out.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=out):
            pass
    except OSError as error:
        raise ConfigError(
            f"the report can't be written ({error.strerror or error})",
            got=str(out),
            expected="a folder that may be written",
            fix="Choose another one by --out.",
        ) from error


@contextmanager
def _going_on(run: RunDir, recipe: Recipe) -> Iterator[None]:
    """Say how to go on, where the work is interrupted."""
    from art_core import checkpoints

    try:
        yield
    except KeyboardInterrupt:
        steps = checkpoints.steps(run)
        learned = steps[-1] - recipe.warm_up_steps if steps else -1
        where = f"step {learned} is saved in {visible(str(run.path))}"
        say(f"\nInterrupted; {where if learned >= 0 else 'nothing is saved yet'}.")
        say("The same command goes on from there; with --fresh it starts anew.")
        raise typer.Exit(130) from None
