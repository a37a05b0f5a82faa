"""Supervised training on one adapter: batches of written samples -> token mean -> AdamW.

In: the samples of each optimizer step. Out: the adapter changed in place, by the trainer that also
takes the policy's steps, so that one adapter and one optimizer go through both; or an exception and
the adapter as it was. The rows, the attention and the head are those of the policy's steps too.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from art_core.batch.forest import Row
from art_core.batch.sample import Sample
from art_core.batch.supervised import shares
from art_core.config import TrainSFTConfig
from art_core.errors import ConfigError
from art_core.nn.lora import LoraModel
from art_core.training.logprobs import entry_logprobs
from art_core.training.rows import rows_for
from art_core.training.trainer import Trainer
from art_core.training.watch import OnProgress, Watch


def train_supervised(
    trainer: Trainer,
    batches: Sequence[Sequence[Sample]],
    config: TrainSFTConfig,
    *,
    on_progress: OnProgress | None = None,
) -> dict[str, float]:
    """One optimizer step a batch; a batch without samples is passed over, with its learning rate.

    Args:
        batches: samples with the weight of one token each.

    Returns:
        "loss": nats a token, the weighted mean over all batches, each before its own update;
        "grad_norm" and "learning_rate": means over the updates; and counts.

    Raises:
        ConfigError: there are fewer learning rates than batches.
        TrainingError: a step failed, or something was not finite. The adapter is unchanged.
    """
    rates = _rates(config, len(batches))
    steps = [(batch, rate) for batch, rate in zip(batches, rates, strict=True) if batch]
    samples = [sample for batch in batches for sample in batch]

    def work(watch: Watch, row_size: int) -> dict[str, float]:
        with trainer.training() as model:
            # Planted twice, since the rows of all steps at once would need too much memory.
            with watch.phases.of("pack"):
                watch.plan(_rows(model, batch, row_size) for batch, _ in steps)
            updates = [
                _update(trainer, model, batch, config, rate, row_size, watch)
                for batch, rate in steps
            ]
        losses, norms = zip(*updates, strict=True)
        return {
            "loss": _mean(losses, [_weight(batch) for batch, _ in steps]),
            "grad_norm": _mean(norms),
            "learning_rate": _mean([rate for _, rate in steps]),
            "updates": len(steps),
            "tokens_computed": watch.total,
        }

    return trainer.attempt(work, samples, config, on_progress)


def _update(
    trainer: Trainer,
    model: LoraModel,
    batch: Sequence[Sample],
    config: TrainSFTConfig,
    rate: float,
    row_size: int,
    watch: Watch,
) -> tuple[float, float]:
    """(loss, norm of the gradient) of one optimizer step."""
    with watch.phases.of("pack"):
        rows = _rows(model, batch, row_size)
    loss = 0.0
    for row in rows:
        watch.begin(row)
        with watch.phases.of("forward"):
            part = _loss(model, row)
        with watch.phases.of("backward"):
            part.backward()
        loss += float(part.detach())
        watch.end(row)
    with watch.phases.of("optimizer"):
        return loss, trainer.descend(loss, config, rate)


def supervised_loss(
    model: LoraModel, name: str, samples: Sequence[Sample], config: TrainSFTConfig
) -> float:
    """Weighted mean loss of `samples` under the adapter `name`, in nats a token."""
    with model.training(name), torch.no_grad():
        rows = _rows(model, samples, config.max_tokens_per_row)
        return math.fsum(float(_loss(model, row)) for row in rows)


def _rows(model: LoraModel, batch: Sequence[Sample], size: int) -> list[Row]:
    """Rows of at most `size` positions, unless one answer alone needs more."""
    return rows_for(model, shares(batch), max(size, *(sample.positions for sample in batch)))


def _loss(model: LoraModel, row: Row) -> Tensor:
    """The row's part of the step's loss."""
    logprobs, _ = entry_logprobs(model, row, entropy_gradient=False)
    weight = torch.from_numpy(row.entries.weight).to(logprobs.device, logprobs.dtype)
    return -(weight * logprobs).sum()


def _weight(batch: Sequence[Sample]) -> float:
    return math.fsum(sample.weight * len(sample.sampled_ids) for sample in batch)


def _mean(values: Sequence[float], weights: Sequence[float] | None = None) -> float:
    weights = [1.0] * len(values) if weights is None else weights
    whole = math.fsum(w * x for w, x in zip(weights, values, strict=True))
    return whole / math.fsum(weights)


def _rates(config: TrainSFTConfig, steps: int) -> list[float]:
    rates = config.learning_rate
    if not isinstance(rates, tuple):
        return [rates] * steps
    if len(rates) != steps:
        raise ConfigError(
            "learning_rate",
            got=f"{len(rates)} of them",
            expected=f"one for each of {steps} optimizer steps, or a single one",
            fix="Make them with create_lr_schedule(total_steps=...), or change batch_size.",
        )
    return list(rates)
