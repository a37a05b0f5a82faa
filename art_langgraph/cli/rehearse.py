"""`art-langgraph rehearse`: plays the user's graph before any training, and says what to mend.

In: where the graph is, perhaps scenarios and a reward. Out: a table of what was found; status 0 if
the agent can be trained, 1 if not. No GPU and no torch is needed; where torch is installed, a real
training step is tried too. Left out: the checks (art_langgraph/rehearsal), how they look
(rehearse_view.py).
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable, Coroutine, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ParamSpec, TypeAlias, TypeVar

import typer

from art_core.errors import ARTError, CaptureError, ConfigError
from art_langgraph.cli.library_noise import no_library_bars, no_library_warnings
from art_langgraph.cli.train_extra import check_installed, missing
from art_langgraph.visible import visible

if TYPE_CHECKING:
    from art_core.finding import Finding
    from art_langgraph.rehearsal.perform import Player
    from art_langgraph.rehearsal.played import Play, Rehearsal
    from art_langgraph.rehearsal.scenarios import Scenario
    from art_langgraph.rehearsal.stage import ScriptedStage

_P = ParamSpec("_P")
T = TypeVar("T")
_STOPPING = b"\nStopping. Ctrl-C again leaves at once.\n"
SECONDS, SECONDS_WITH_MODEL = 20.0, 180.0
"""What a rollout may take where nobody says so."""
TINY = "tiny"
"""`--model` of this name is a random model."""


def run_rehearse(
    source: Annotated[
        str,
        typer.Argument(help='"module:graph", "path.py:graph", or an id in your langgraph.json.'),
    ],
    scenarios: Annotated[
        Path | None,
        typer.Option(
            help="JSONL: a graph's input a line, or its input, config and context by name."
        ),
    ] = None,
    reward: Annotated[
        str | None,
        typer.Option(help='"module:function" of the trajectory, or of it and the scenario.'),
    ] = None,
    group: Annotated[int, typer.Option(min=1, help="Rollouts of each scenario.")] = 5,
    model: Annotated[
        str | None,
        typer.Option(help='Play with a real model: "owner/name", a folder, or "tiny" (random).'),
    ] = None,
    timeout: Annotated[
        float | None,
        typer.Option(min=0.1, help="Seconds a rollout may take; else 20, with --model 180."),
    ] = None,
    stock: Annotated[
        bool,
        typer.Option("--stock", help="Let stock OpenAI clients ask the scripted model too."),
    ] = False,
    train: Annotated[bool, typer.Option(help="Try a training step, if torch is installed.")] = True,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON document on stdout.")] = False,
) -> None:
    """Play your own agent with a scripted model: is everything in place to train it?

    Its tools run for real, with made-up arguments, and models that are no ChatArt are asked for
    real: give it what may be tried.
    """
    began = time.monotonic()
    limit = timeout or (SECONDS if model is None else SECONDS_WITH_MODEL)
    wish = _Wish(source, scenarios, reward, group, model, limit, stock=stock, train=train)
    try:
        with _users_output_on_stderr():
            rehearsal, findings = _rehearse(wish)
    except Exception as error:
        if as_json:
            typer.echo(json.dumps(_not_played(source, error), indent=2))
        raise
    status = _show(rehearsal, findings, time.monotonic() - began, as_json=as_json)
    if _is_hung(rehearsal):
        _leave(status)  # a node that hangs in a thread can't be stopped, and Python would wait
    raise typer.Exit(status)


def _not_played(source: str, error: Exception) -> dict[str, Any]:
    """The document where there was no rehearsal."""
    fix = error.fix if isinstance(error, ARTError) else ""
    told = {"type": type(error).__name__, "message": str(error), "fix": fix}
    return {"source": source, "status": "error", "error": told}


@dataclass(frozen=True)
class _Wish:
    """What the command line asks for."""

    source: str
    scenarios: Path | None
    reward: str | None
    group: int
    model: str | None
    timeout: float
    stock: bool
    train: bool


Outcome: TypeAlias = "tuple[Rehearsal, list[Finding]]"
Work: TypeAlias = "Callable[[Player], Coroutine[Any, Any, Outcome]]"
"""What is left to be done once somebody plays the policy."""


def _rehearse(wish: _Wish) -> Outcome:
    from art_langgraph.cli.interrupt import run
    from art_langgraph.rehearsal.scenarios import read_scenarios
    from art_langgraph.rehearsal.stage import ScriptedStage

    if wish.stock and wish.model is not None:
        raise ConfigError("--stock goes with the scripted model only", got=wish.model)
    scenarios = None if wish.scenarios is None else read_scenarios(wish.scenarios)
    if wish.model is not None:
        work = _prepared(wish, scenarios)
        return _guarded(run, _with_model(wish.model, work), _STOPPING)
    with ScriptedStage() as stage:
        if wish.stock:
            # LangChain reads the first; OpenAI's own client the second, where that is unset.
            addresses = dict.fromkeys(("OPENAI_API_BASE", "OPENAI_BASE_URL"), stage.base_url)
            os.environ |= addresses | {"OPENAI_API_KEY": "local"}
        work = _prepared(wish, scenarios)
        opening = stage.open if wish.stock else None
        return _guarded(run, _with_stage(stage, work, opening), _STOPPING)


def _prepared(wish: _Wish, scenarios: list[Scenario] | None) -> Work:
    """Import the user's code, and say what is to be done with it."""
    from art_langgraph.graph_names import named_graph
    from art_langgraph.rehearsal.checks import check
    from art_langgraph.rehearsal.perform import perform

    graph = _theirs(named_graph, wish.source)
    reward = None if wish.reward is None else _theirs(_function, wish.reward)

    async def play(player: Player) -> Outcome:
        with _bar(wish.group * len(scenarios or (None,))) as on_play:
            rehearsal = await perform(
                graph,
                player,
                scenarios,
                label=wish.source,
                group=wish.group,
                reward=reward,
                timeout=wish.timeout,
                on_play=on_play,
            )
        practice = await _practice(rehearsal, graph, wish)
        if _is_hung(rehearsal):  # let the loop close without waiting for its threads
            asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(1))
        return rehearsal, [*check(rehearsal), practice]

    return play


async def _with_stage(
    stage: ScriptedStage, work: Work, opening: Callable[[str], None] | None
) -> Outcome:
    from art_langgraph.rehearsal.perform import Player

    await stage.prepare()
    return await work(Player("scripted", stage.target(), stage.records, opening))


async def _with_model(name: str, work: Work) -> Outcome:
    """Play with a real model behind a `LocalBackend`, in a run folder that is thrown away."""
    check_installed(f"--model {name}")
    no_library_bars()
    import art_core as art
    from art_core.nn.base_model import resolve_base_model
    from art_core.nn.tiny_model import write_tiny_model
    from art_langgraph.rehearsal.perform import Player

    with tempfile.TemporaryDirectory() as folder, no_library_warnings():
        runs, tiny = Path(folder, "runs"), Path(folder, "tiny")
        base = write_tiny_model(tiny, [__doc__ or ""]) if name == TINY else resolve_base_model(name)
        policy: art.TrainableModel[None] = art.TrainableModel(
            name="rehearsal",
            project="rehearsal",
            base_model=str(base),
            base_path=str(runs),
            art_config=art.ModelConfig(sampling=art.SamplingConfig(max_tokens=256)),
        )
        async with art.LocalBackend(show_progress=False) as backend:
            await policy.register(backend)
            return await work(Player(name, policy.target()))


async def _practice(rehearsal: Rehearsal, graph: Any, wish: _Wish) -> Finding:
    """A training step, where it can be tried."""
    from art_core.finding import Finding

    absent = missing()
    why, fix = "", ""
    if not wish.train:
        why = "--no-train"
    elif not any(play.policy_calls for play in rehearsal.plays):
        why = "the policy was asked nothing"
    elif _is_hung(rehearsal):
        why = "a rollout hangs"
    elif wish.stock and not any(asked.ours for play in rehearsal.plays for asked in play.asked):
        why = "the stock clients go on asking the scripted model, which can't be trained"
    elif absent:
        why = f"it needs packages that are not installed ({', '.join(absent)})"
        fix = "pip install 'art-langgraph[train]', here or where you will train."
    if why:
        return Finding("checkpoint", "skipped", f"no training step was tried: {why}", fix)
    no_library_bars()
    from art_core.nn.tiny_model import write_tiny_model
    from art_langgraph.rehearsal.practice import practise

    texts = [json.dumps(call.messages) for play in rehearsal.plays for call in play.policy_calls]
    with tempfile.TemporaryDirectory() as folder, no_library_warnings():
        base = write_tiny_model(Path(folder, "tiny"), texts)
        return await practise(
            graph, rehearsal.scenarios[0], base, Path(folder, "runs"), timeout=wish.timeout
        )


def _show(rehearsal: Rehearsal, findings: list[Finding], seconds: float, *, as_json: bool) -> int:
    from art_core.finding import failed
    from art_langgraph.cli.rehearse_view import show_rehearsal
    from art_langgraph.rehearsal.report import document

    if as_json:
        typer.echo(json.dumps(document(rehearsal, findings), indent=2))
    else:
        show_rehearsal(rehearsal, findings, seconds)
    return int(failed(findings))


@contextmanager
def _bar(total: int) -> Iterator[Callable[[Play], None]]:
    from art_core.progress import progress

    done = 0
    with progress("rehearse") as bar:

        def on_play(play: Play) -> None:
            nonlocal done
            done += 1
            bar.show(done, total, "rollouts")

        yield on_play


# --- the user's code


def _theirs(find: Callable[[str], T], name: str) -> T:
    """What `find` gives; a fault of the user's module is shown as Python shows it."""
    from art_langgraph.rehearsal.blame import is_theirs

    try:
        return find(name)
    except SystemExit as error:
        raise ConfigError(
            "the module ends the program when it is imported",
            got=name,
            expected="a module that can be imported",
            fix='Put what it does into `if __name__ == "__main__":`.',
        ) from error
    except ConfigError as error:
        cause = error.__cause__
        if cause is None or not is_theirs(cause):  # such as a module that is not there
            raise
        _show_traceback(cause)
        raise ConfigError(error.what, fix=_import_fix(cause)) from cause


def _import_fix(cause: BaseException) -> str:
    """What to do where a module can't be imported."""
    if isinstance(cause, CaptureError):
        return (
            "The module runs its agent when it is imported; put that into "
            '`if __name__ == "__main__":`.'
        )
    if type(cause).__module__.partition(".")[0] == "openai":
        return (
            "A stock client wants a key. Put ChatArt() in its place (in create_agent: in the place "
            'of the "provider:model" string), or let it ask the scripted model too: --stock.'
        )
    if "attempted relative import" in str(cause):
        return 'Name it as a module, from the folder above its package: "package.module:graph".'
    return "It is your module's own code that raised it."


def _guarded(work: Callable[_P, T], *args: _P.args, **kwargs: _P.kwargs) -> T:
    """What `work` gives; an exception out of the user's factory is shown as Python shows it."""
    from art_langgraph.rehearsal.blame import is_theirs, named

    try:
        return work(*args, **kwargs)
    except Exception as error:
        if not is_theirs(error):
            raise
        _show_traceback(error)
        raise ConfigError(f"the graph could not be made ({named(error)})") from error


def _show_traceback(error: BaseException) -> None:
    from art_langgraph.rehearsal.blame import is_theirs, their_traceback

    if is_theirs(error) and sys.stderr is not None:
        sys.stderr.write(visible(their_traceback(error)) + "\n")


def _function(name: str) -> Callable[..., Any]:
    """The reward function of that name."""
    from art_langgraph.graph_names import named_graph

    found = named_graph(name, "function")
    if not callable(found):
        raise ConfigError(
            "the reward is no function", got=found, expected="a function of the trajectory"
        )
    function: Callable[..., Any] = found
    return function


@contextmanager
def _users_output_on_stderr() -> Iterator[None]:
    """Keep stdout for the report: what the user's code and its children print goes to stderr."""
    kept = os.dup(1)
    os.dup2(2, 1)
    try:
        with redirect_stdout(sys.stderr):
            yield
    finally:
        os.dup2(kept, 1)
        os.close(kept)


def _is_hung(rehearsal: Rehearsal) -> bool:
    return any(play.trajectory.ended == "timeout" for play in rehearsal.plays)


def _leave(status: int) -> None:
    for stream in (sys.stdout, sys.stderr):
        if stream is not None:
            stream.flush()
    os._exit(status)
