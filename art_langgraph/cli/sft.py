"""`art-langgraph sft`: look at a file of conversations, and train on it.

In: a file of JSON lines. Out: what of it can be trained and what is refused, before any model is
loaded; or an adapter in a run folder. Status 1 if anything is refused. Started again, training goes
on with the next row.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from art_core.plural import plural
from art_langgraph.cli.console import draws_bars, say
from art_langgraph.visible import visible

if TYPE_CHECKING:
    import art_core as art

app = typer.Typer(
    no_args_is_help=True, rich_markup_mode=None, help="Supervised training from a file."
)
_File = Annotated[
    Path,
    typer.Argument(help="JSON lines: OpenAI's fine-tuning rows, ShareGPT's, or LangChain's."),
]


@app.command()
def validate(file: _File) -> None:
    """Say what of a file can be trained, and which lines are refused and why."""
    from art_core.sft.file import validate as look_at

    report = look_at(file)
    for line in str(report).splitlines():
        say(visible(line))
    if not report.is_clean:
        raise typer.Exit(1)


@app.command()
def train(
    file: _File,
    base_model: Annotated[str, typer.Option(help='"owner/name" on the hub, or a folder.')],
    name: Annotated[str, typer.Option(help="Of the model.")] = "sft-001",
    project: Annotated[str, typer.Option(help="Groups models.")] = "sft",
    path: Annotated[Path, typer.Option(help="Folder that runs are kept in.")] = Path(".art"),
    epochs: Annotated[int, typer.Option(min=1, help="Passes over the file.")] = 1,
    batch_size: Annotated[int, typer.Option(min=1, help="Rows an optimizer step.")] = 2,
    learning_rate: Annotated[float, typer.Option(help="Its peak.")] = 2e-4,
    max_length: Annotated[
        int | None,
        typer.Option(min=2, help="Longer rows are left out. Default: the model's limit."),
    ] = None,
    cut: Annotated[bool, typer.Option("--cut", help="Cut longer rows instead.")] = False,
    eval_file: Annotated[
        Path | None, typer.Option(help="Held-out conversations whose loss is told.")
    ] = None,
    patience: Annotated[
        int | None, typer.Option(min=1, help="Stop when that loss has not fallen so many times.")
    ] = None,
    skip_refused: Annotated[
        bool, typer.Option("--skip-refused", help="Leave out lines that can't be read.")
    ] = False,
) -> None:
    """Train an adapter on the answers in a file. Started again, it goes on with the next row.

    A loop goes on from it with a model of the same name, project, base model and path; the last
    line shows how that is written.
    """
    from art_langgraph.cli.train_extra import check_installed

    check_installed("training")
    _check_files(file, eval_file, skip_refused=skip_refused)
    import art_core as art
    from art_langgraph.cli.interrupt import run
    from art_langgraph.cli.library_noise import no_library_bars, no_library_warnings

    model = art.TrainableModel(
        name=name, project=project, base_model=base_model, base_path=str(path)
    )
    settings = art.TrainSFTConfig(max_length=max_length, too_long="cut" if cut else "drop")

    async def passes() -> art.SFTResult:
        async with art.LocalBackend(show_progress=False) as backend:
            await model.register(backend)
            return await art.train_sft_from_file(
                model,
                file,
                epochs=epochs,
                batch_size=batch_size,
                peak_lr=learning_rate,
                verbose=draws_bars(),
                config=settings,
                eval_file=eval_file,
                patience=patience,
                skip_refused=skip_refused,
            )

    no_library_bars()
    with no_library_warnings():
        _tell(run(passes()), model)


def _check_files(*files: Path | None, skip_refused: bool) -> None:
    """Refuse what can't be trained, before a base model is fetched for it.

    Raises:
        DataFileError: as `train_sft_from_file`.
    """
    from art_core.sft.file import ConversationFile

    for file in files:
        if file is not None:
            with ConversationFile(file) as rows:
                rows.require(skip_refused=skip_refused)


def _tell(result: art.SFTResult, model: art.TrainableModel[Any]) -> None:
    say(f"step {result.step} after {plural(result.updates, 'optimizer step')}")
    if result.loss is None and result.finished:
        say("nothing was left to do: every epoch is done, or it was stopped early")
    if result.loss is not None:
        say(f"loss {result.loss:.3f} nats a token in the last of them")
    if result.eval_losses:
        told = ", ".join(f"{loss:.3f}" for loss in result.eval_losses)
        say(f"held-out loss {told}; lowest at step {result.best_step}")
    if result.left_out:
        left_out = plural(result.left_out, "row")
        say(visible(f"{left_out} left out; the first: {result.left_out_why}"))
    folder = Path(model.base_path) / model.project / "models" / model.name
    say(("adapter  ", "dim"), visible(str(folder / "checkpoints" / f"{result.step:04d}")))
    say(("go on with  ", "dim"), visible(_as_written(model)))


def _as_written(model: art.TrainableModel[Any]) -> str:
    """The line that makes a loop go on from this very run."""
    names = ["name", "project", "base_model"]
    if model.base_path != type(model).model_fields["base_path"].default:
        names.append("base_path")
    return f"art.TrainableModel({', '.join(f'{n}={getattr(model, n)!r}' for n in names)})"
