"""`train_sft_from_file`: passes over a file of conversations, resumable to the row.

In: a registered model and a file. Out: the model's next steps, a checkpoint after every few
optimizer steps with the place in the file inside it, and losses in the run folder. Killed at any
moment and started again, it goes on with the row that the newest checkpoint has not seen.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from art_core.backend import TrainResult
from art_core.bookmarks import Bookmark
from art_core.config import TrainSFTConfig
from art_core.errors import ConfigError, NoTrainableTokens
from art_core.given import no_dev_config
from art_core.model import TrainableModel
from art_core.progress import progress
from art_core.sft.file import ConversationFile, as_trajectory, check_numbers
from art_core.sft.place import Place, identity_of, place_of
from art_core.sft.plan import Plan, rows_in
from art_core.sft.schedule import Schedule, create_lr_schedule
from art_core.trajectories import Trajectory


@dataclass(frozen=True)
class SFTResult:
    """What passes over a file did."""

    step: int
    """The model's step afterwards."""
    finished: bool
    """All epochs are done, or it was stopped early; calling again does nothing."""
    updates: int
    """Optimizer steps since the first epoch began."""
    loss: float | None
    """Of the last step of this call; None if there was none."""
    eval_losses: list[float] = field(default_factory=list)
    """Of `eval_file`: before the first step, then after each."""
    best_step: int | None = None
    """The step with the lowest of them."""
    left_out: int = 0
    """Rows that were left out in this call: too long, refused by the chat template, or of steps
    that were not finite."""
    left_out_why: str | None = None
    """Of the first of them."""


async def train_sft_from_file(
    model: TrainableModel[Any],
    file_path: str | Path,
    epochs: int = 1,
    batch_size: int = 2,
    peak_lr: float = 2e-4,
    schedule_type: Schedule = "linear",
    warmup_ratio: float = 0.1,
    initial_step: int = 0,
    final_step: int | None = None,
    _config: Mapping[str, Any] | None = None,
    verbose: bool = False,
    shuffle_buffer_size: int = 10_000,
    *,
    seed: int = 42,
    steps_per_checkpoint: int = 10,
    name: str | None = None,
    config: TrainSFTConfig | None = None,
    eval_file: str | Path | None = None,
    patience: int | None = None,
    skip_refused: bool = False,
    drop_repeats: bool = False,
) -> SFTResult:
    """Train on every conversation of a file, `epochs` times, each time in another order.

    Args:
        model: registered.
        file_path: OpenAI's fine-tuning rows, ShareGPT's or LangChain's messages, one a line;
            checked whole before anything is trained.
        epochs: passes over the file.
        batch_size: rows an optimizer step; the last of an epoch may have fewer. It may change
            between two starts.
        peak_lr, schedule_type, warmup_ratio: of the whole run; see `create_lr_schedule`. The
            warm-up is this share of the optimizer steps.
        initial_step: optimizer steps that are left out at the beginning, of a run that is new.
        final_step: stop after this optimizer step, counted over all epochs; calling again with a
            later one goes on.
        _config: ART's; refused unless it is empty.
        verbose: show how far it is.
        shuffle_buffer_size, skip_refused: as in `iterate_file`.
        seed: of the orders.
        steps_per_checkpoint: optimizer steps between two checkpoints.
        name: of this run over the file, under which its place is kept; None means the file's name.
            Another name begins anew.
        config: for what is not said above; its learning rate and batch size are not used.
        eval_file: a file whose loss is logged as "val/sft_loss" before the first step and after
            each. Where it is another than before, its losses begin anew, and a run that was
            stopped early by the old one goes on.
        patience: stop when that loss was not lower than its lowest for so many steps.
        drop_repeats: leave out rows that say the same as an earlier one.

    Raises:
        DataFileError: a file can't be read, or has a bad row or none.
        ConfigError: a setting can't work or is in `_config`, or the file or the seed is another
            than the one that the model's checkpoint has a place in.
        NoTrainableTokens: no row of the file can be trained.
        As `TrainableModel.train_sft`.
    """
    no_dev_config(_config)
    check_numbers(
        epochs=epochs,
        batch_size=batch_size,
        shuffle_buffer_size=shuffle_buffer_size,
        steps_per_checkpoint=steps_per_checkpoint,
    )
    for what, value in (("initial_step", initial_step), ("final_step", final_step)):
        if value is not None and value < 0:
            raise ConfigError(what, got=value, expected="0 or more")
    if not 0 <= warmup_ratio <= 1:
        raise ConfigError("warmup_ratio", got=warmup_ratio, expected="a share, from 0 to 1")
    if patience is not None and (eval_file is None or patience < 1):
        raise ConfigError("patience", got=patience, expected="1 or more, with an eval_file")
    with ConversationFile(file_path, drop_repeats=drop_repeats) as file:
        file.require(skip_refused=skip_refused)
        order = partial(file.order, seed=seed, window=shuffle_buffer_size)
        plan = Plan(len(file), epochs, batch_size, order)
        run = _Run(
            model=model,
            file=file,
            plan=plan,
            name=name or Path(file_path).name,
            identity=identity_of(file, seed=seed, window=shuffle_buffer_size),
            rates=create_lr_schedule(
                plan.steps, peak_lr, schedule_type, int(warmup_ratio * plan.steps)
            ),
            config=config or TrainSFTConfig(),
            last=plan.steps if final_step is None else min(final_step, plan.steps),
            chunk=steps_per_checkpoint,
            held_out=None if eval_file is None else _held_out(eval_file, skip_refused),
            patience=patience,
        )
        return await run.go_on(await run.begin(initial_step), shown=verbose)


@dataclass(frozen=True)
class _HeldOut:
    """What is looked at and never trained."""

    rows: list[Trajectory]
    fingerprint: str


@dataclass(frozen=True)
class _Run:
    model: TrainableModel[Any]
    file: ConversationFile
    plan: Plan
    name: str
    identity: dict[str, Any]
    rates: list[float]
    config: TrainSFTConfig
    last: int
    chunk: int
    held_out: _HeldOut | None
    patience: int | None

    async def begin(self, initial_step: int) -> Place:
        """Where the model's checkpoint has left the file off, or else before `initial_step`.

        Raises:
            ConfigError: it is in another file or order, or there is no such initial step.
        """
        kept = (await self.model.bookmarks()).get(self.name)
        if kept is not None:
            return place_of(kept, self.identity).seen_with(
                None if self.held_out is None else self.held_out.fingerprint
            )
        if initial_step > self.plan.steps:
            raise ConfigError(
                "initial_step", got=initial_step, expected=f"one of the run's {self.plan.steps}"
            )
        return Place(self.plan.rows_at(initial_step))

    async def go_on(self, place: Place, *, shown: bool) -> SFTResult:
        """Train from `place` to the end.

        Raises:
            NoTrainableTokens: no row of the file could be trained.
        """
        plan, begun = self.plan, place
        results: list[TrainResult] = []
        left_out, why = 0, None
        refused: NoTrainableTokens | None = None
        end = plan.rows_at(self.last)
        with progress("sft", shown=shown) as display:
            while place.rows < end and not place.stopped:
                place = await self._look(place)
                if place.stopped:
                    break
                batches = plan.chunk(place.rows, end, self.chunk)
                place, first = self._after(place, batches), plan.step_at(place.rows)
                try:
                    result = await self._train(batches, first, place)
                    if result.trained:
                        results.append(result)
                    left_out += len(result.skipped) if result.trained else rows_in(batches)
                    why = why or next(iter(result.reasons), None)
                except NoTrainableTokens as error:  # of these few; others may be well
                    refused = error
                    left_out += rows_in(batches)
                    why = why or str(error)
                told = f"loss {results[-1].metrics['loss']:.3f}" if results else ""
                display.show(plan.step_at(place.rows), plan.steps, told)
        if refused is not None and not results and begun.rows == 0:
            raise refused
        if place is not begun and not place.stopped:
            place = await self._look(place)
        await self.model.backend().set_bookmark(self.model, self._bookmark(place))
        best = min(place.losses, key=lambda pair: pair[1], default=None)
        return SFTResult(
            step=await self.model.get_step(),
            finished=place.stopped or place.rows >= plan.rows,
            updates=plan.step_at(place.rows),
            loss=results[-1].metrics["loss"] if results else None,
            eval_losses=[loss for _, loss in place.losses],
            best_step=best and best[0],
            left_out=left_out,
            left_out_why=why,
        )

    def _after(self, place: Place, batches: list[list[int]]) -> Place:
        return replace(place, rows=place.rows + rows_in(batches))

    def _bookmark(self, place: Place) -> Bookmark:
        return Bookmark(self.name, place.kept(self.identity))

    async def _train(self, batches: list[list[int]], first: int, after: Place) -> TrainResult:
        """Optimizer steps from `first` on, one a batch; `after` is kept with what they learned."""
        rates = tuple(self.rates[first : first + len(batches)])
        config = self.config.model_copy(
            update={"learning_rate": rates, "batch_size": self.plan.batch}
        )
        rows = [as_trajectory(self.file[row]) for batch in batches for row in batch]
        return await self.model.train_sft(rows, config, bookmark=self._bookmark(after))

    async def _look(self, place: Place) -> Place:
        """The held-out loss of the step as it is now, and whether it is time to stop.

        Done before each chunk, so that a run which was killed after a chunk was saved looks again.
        """
        step = await self.model.get_step()
        if self.held_out is None or (place.losses and place.losses[-1][0] == step):
            return place
        loss = await self.model.sft_loss(self.held_out.rows, self.config)
        await self.model.log(split="val", metrics={"sft_loss": loss}, step=step)
        losses = (*place.losses, (step, loss))
        lowest = min(range(len(losses)), key=lambda i: losses[i][1])
        since = len(losses) - 1 - lowest
        return replace(
            place,
            losses=losses,
            stopped=self.patience is not None and since >= self.patience,
            eval_fingerprint=self.held_out.fingerprint,
        )


def _held_out(path: str | Path, skip_refused: bool) -> _HeldOut:
    with ConversationFile(path) as file:
        file.require(skip_refused=skip_refused)
        rows = [as_trajectory(file[row]) for row in range(len(file))]
        return _HeldOut(rows, file.fingerprint)
