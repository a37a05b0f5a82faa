"""`create_sft_dataset_iterator`: conversations in memory as chunks, each for one `train_sft`.

In: trajectories and a schedule over all passes. Out: `SFTChunk`s under ART's name, each with its
trajectories and the settings that belong to them. Files go through `train_sft_from_file`, which
keeps its place by itself.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from art_core.config import TrainSFTConfig
from art_core.errors import ConfigError
from art_core.given import conversations
from art_core.progress import progress
from art_core.sft.file import check_numbers
from art_core.sft.plan import Plan
from art_core.sft.schedule import Schedule, create_lr_schedule
from art_core.trajectories import Trajectory


class SFTChunk(NamedTuple):
    """What one call of `train_sft` learns."""

    trajectories: list[Trajectory]
    config: TrainSFTConfig
    """The learning rate of each of its optimizer steps, and their batch size."""
    step: int
    """Optimizer steps before it, over all epochs."""
    epoch: int
    """From 0."""
    epoch_step: int
    """Optimizer steps before it in its epoch."""


def create_sft_dataset_iterator(
    trajectories: Iterable[Trajectory],
    chunk_size: int = 10,
    epochs: int = 1,
    batch_size: int = 2,
    peak_lr: float = 2e-4,
    schedule_type: Schedule = "linear",
    warmup_ratio: float = 0.1,
    shuffle: bool = True,
    seed: int = 42,
    initial_step: int = 0,
    show_progress: bool = True,
) -> Iterator[SFTChunk]:
    """Every trajectory once an epoch, in chunks that `model.train_sft` takes: trajectories, config.

    Args:
        chunk_size: optimizer steps of a chunk, and so between two checkpoints; the last chunk of an
            epoch may have fewer.
        epochs: passes, each in another order.
        batch_size: trajectories an optimizer step.
        peak_lr, schedule_type, warmup_ratio: of all epochs; see `create_lr_schedule`.
        shuffle: False keeps the order in which they are given.
        seed: of the orders.
        initial_step: optimizer steps that are left out at the beginning: to go on, the `step` of
            the first chunk that was not trained.
        show_progress: show how far it is.

    Raises:
        ConfigError: a number is out of range.
        GroupError: something is no trajectory.
    """
    rows = conversations(trajectories)
    check_numbers(chunk_size=chunk_size, epochs=epochs, batch_size=batch_size)
    if not 0 <= warmup_ratio <= 1:
        raise ConfigError("warmup_ratio", got=warmup_ratio, expected="a share, from 0 to 1")

    def order(epoch: int) -> list[int]:
        numbers = list(range(len(rows)))
        if shuffle:
            random.Random(f"{seed}/{epoch}").shuffle(numbers)
        return numbers

    plan = Plan(len(rows), epochs, batch_size, order)
    if type(initial_step) is not int or not 0 <= initial_step <= plan.steps:
        raise ConfigError(
            "initial_step", got=initial_step, expected=f"one of the {plan.steps} optimizer steps"
        )
    warmup = int(warmup_ratio * plan.steps)
    rates = create_lr_schedule(plan.steps, peak_lr, schedule_type, warmup)
    return _chunks(rows, plan, rates, chunk_size, initial_step, show_progress)


def _chunks(
    rows: list[Trajectory],
    plan: Plan,
    rates: list[float],
    size: int,
    step: int,
    shown: bool,
) -> Iterator[SFTChunk]:
    with progress("sft", shown=shown) as display:
        while step < plan.steps:
            epoch, epoch_step = divmod(step, plan.steps_per_epoch)
            batches = plan.chunk(plan.rows_at(step), plan.rows, size)
            config = TrainSFTConfig(
                learning_rate=tuple(rates[step : step + len(batches)]), batch_size=plan.batch
            )
            chosen = [rows[row] for batch in batches for row in batch]
            yield SFTChunk(chosen, config, step, epoch, epoch_step)
            step += len(batches)
            display.show(step, plan.steps, f"epoch {epoch + 1} of {plan.epochs}")
