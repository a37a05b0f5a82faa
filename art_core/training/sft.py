"""Supervised training on one adapter: batches of written samples -> token mean -> AdamW.

In: the samples of each optimizer step. Out: the adapter changed in place, by the trainer that also
takes the policy's steps, so that one adapter and one optimizer go through both; or an exception and
the adapter as it was. The rows, the attention and the head are those of the policy's steps too.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence

import torch
from torch import Tensor

from art_core.batch.forest import Row, Sample, plant
from art_core.batch.supervised import shares
from art_core.config import TrainSFTConfig
from art_core.errors import ConfigError
from art_core.nn.lora import LoraModel
from art_core.training.logprobs import entry_logprobs
from art_core.training.trainer import OnProgress, Trainer


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
    begun = time.perf_counter()
    steps = list(zip(batches, _rates(config, len(batches)), strict=True))
    planned = [(_rows(batch, config), rate) for batch, rate in steps if batch]
    total = sum(len(row) for rows, _ in planned for row in rows)
    done = 0
    losses, norms = [], []
    with trainer.training() as model:
        for rows, rate in planned:
            loss = 0.0
            for row in rows:
                part = _loss(model, row)
                part.backward()
                loss += float(part.detach())
                done += len(row)
                if on_progress is not None:
                    on_progress(done, total)
            norms.append(trainer.descend(loss, config, rate))
            losses.append(loss)
    samples = [sample for batch in batches for sample in batch]
    weights = [_weight(batch) for batch in batches if batch]
    return {
        "loss": math.fsum(w * x for w, x in zip(weights, losses, strict=True)) / math.fsum(weights),
        "grad_norm": math.fsum(norms) / len(norms),
        "learning_rate": math.fsum(rate for _, rate in planned) / len(planned),
        "updates": len(planned),
        "tokens_trained": sum(len(s.sampled_ids) for s in samples),
        "tokens_computed": total,
        "tokens_naive": sum(len(s.prompt_ids) + len(s.sampled_ids) for s in samples),
        "train_seconds": time.perf_counter() - begun,
    }


def supervised_loss(
    model: LoraModel, name: str, samples: Sequence[Sample], config: TrainSFTConfig
) -> float:
    """Weighted mean loss of `samples` under the adapter `name`, in nats a token."""
    with model.training(name), torch.no_grad():
        return math.fsum(float(_loss(model, row)) for row in _rows(samples, config))


def _rows(batch: Sequence[Sample], config: TrainSFTConfig) -> list[Row]:
    longest = max(len(sample.path) for sample in batch)
    return plant(shares(batch), max(config.max_tokens_per_row, longest))


def _loss(model: LoraModel, row: Row) -> Tensor:
    """The row's part of the step's loss."""
    logprobs, _ = entry_logprobs(model, row)
    weight = torch.from_numpy(row.entries.weight).to(logprobs.device, logprobs.dtype)
    return -(weight * logprobs).sum()


def _weight(batch: Sequence[Sample]) -> float:
    return math.fsum(sample.weight * len(sample.sampled_ids) for sample in batch)


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
