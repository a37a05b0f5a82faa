"""Supervised steps on the tiny model, against plain peft and AdamW as printed."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from art_core.batch.sample import Sample
from art_core.config import TrainConfig, TrainSFTConfig
from art_core.errors import ConfigError, TrainingError
from art_core.nn.lora import LoraModel
from art_core.training.sft import supervised_loss, train_supervised
from art_core.training.trainer import Trainer
from tests.core.samples import make_sample, policy_calls, random_calls
from tests.core.test_out_of_memory import Memory
from tests.core.test_trainer import hand_adamw, peft_twin, worst
from tests.core.tiny_policy import (
    NAME,
    reference_logprobs,
    reference_parameters,
    same_bits,
    tiny_policy,
    weights,
)

CONFIG = TrainSFTConfig(learning_rate=1e-3)


def answers(seed: int = 0) -> list[Sample]:
    """Written answers: no sampler's logprobs, weights of their own."""
    return [
        sample._replace(
            logprobs=np.full(len(sample.sampled_ids), np.nan, np.float32),
            temperature=1.0,
            distorted=False,
            weight=[0.5, 1.0, 2.0][i % 3],
        )
        for i, sample in enumerate(random_calls(seed, vocab=300, groups=2))
    ]


def reference(twin: Any, samples: list[Sample]) -> Tensor:
    """sum(weight * -logprob) / sum(weight) over tokens, one sequence at a time."""
    loss, whole = torch.zeros((), dtype=torch.float64), 0.0
    for sample in samples:
        loss = loss - sample.weight * reference_logprobs(twin, sample)[0].sum()
        whole += sample.weight * len(sample.sampled_ids)
    return loss / whole


def reference_gradients(
    model: LoraModel, base: Path, folder: Path, samples: list[Sample]
) -> tuple[dict[str, Tensor], dict[str, Tensor], float]:
    """(parameters, gradients, loss) in plain peft."""
    twin = peft_twin(model, base, folder)
    loss = reference(twin, samples)
    loss.backward()
    parameters = reference_parameters(twin)
    gradients = {key: p.grad for key, p in parameters.items() if p.grad is not None}
    return {key: p.detach() for key, p in parameters.items()}, gradients, float(loss.detach())


def test_a_step_computed_by_hand(tiny_llama: Path, tmp_path: Path) -> None:
    """Loss, clipped gradient and update equal plain peft's, to 1e-10 in float64."""
    config = CONFIG.model_copy(update={"max_grad_norm": 0.05, "weight_decay": 0.1})
    model, samples = tiny_policy(tiny_llama), answers()
    start, gradients, loss = reference_gradients(model, tiny_llama, tmp_path, samples)
    figures = train_supervised(Trainer(model, NAME, seed=0), [samples], config)
    like = TrainConfig(learning_rate=1e-3, max_grad_norm=0.05, weight_decay=0.1)
    assert worst(weights(model), hand_adamw(start, [gradients], like)) <= 1e-10
    assert figures["loss"] == pytest.approx(loss, rel=1e-10)
    norm = math.sqrt(sum(float((g * g).sum()) for g in gradients.values()))
    assert figures["grad_norm"] == pytest.approx(norm, rel=1e-9)
    assert figures["tokens_trained"] == sum(len(s.sampled_ids) for s in samples)
    assert figures["tokens_computed"] < figures["tokens_naive"]


@pytest.mark.parametrize("max_tokens_per_row", [16, 24, 10_000])
def test_how_rows_are_cut_is_no_matter(tiny_llama: Path, max_tokens_per_row: int) -> None:
    """Case 088: the same loss and weights, whatever is computed together."""
    trained = []
    for size in (10_000, max_tokens_per_row):
        model = tiny_policy(tiny_llama)
        config = CONFIG.model_copy(update={"max_tokens_per_row": size})
        figures = train_supervised(Trainer(model, NAME, seed=0), [answers()], config)
        trained.append((figures["loss"], weights(model)))
    assert trained[1][0] == pytest.approx(trained[0][0], abs=1e-12)
    assert worst(trained[1][1], trained[0][1]) <= 1e-10


def test_an_answer_longer_than_a_row_is_computed_in_a_row_of_its_own(tiny_llama: Path) -> None:
    long = make_sample([1] * 30, [2] * 20)
    config = CONFIG.model_copy(update={"max_tokens_per_row": 16})
    figures = train_supervised(
        Trainer(tiny_policy(tiny_llama), NAME, seed=0), [[long, make_sample([3], [4])]], config
    )
    assert figures["tokens_computed"] == 49 + 1


def test_a_batch_without_samples_is_passed_over_with_its_rate(tiny_llama: Path) -> None:
    samples = answers()
    trained = []
    for batches, rates in (
        ([samples[:4], [], samples[4:]], (1e-3, 5e-1, 2e-3)),
        ([samples[:4], samples[4:]], (1e-3, 2e-3)),
    ):
        model = tiny_policy(tiny_llama)
        config = TrainSFTConfig(learning_rate=rates)
        figures = train_supervised(Trainer(model, NAME, seed=0), batches, config)
        assert figures["updates"] == 2
        assert figures["learning_rate"] == pytest.approx(1.5e-3)
        trained.append(weights(model))
    assert same_bits(*trained)


def test_the_loss_over_several_steps_is_the_mean_over_their_weight(
    tiny_llama: Path, tmp_path: Path
) -> None:
    """At a rate that changes nothing, all batches together: 2.6 rather than 2.0, case 088."""
    model, samples = tiny_policy(tiny_llama), answers()
    _, _, loss = reference_gradients(model, tiny_llama, tmp_path, samples)
    config = CONFIG.model_copy(update={"learning_rate": 1e-18})
    trainer = Trainer(model, NAME, seed=0)
    figures = train_supervised(trainer, [samples[:3], samples[3:]], config)
    assert figures["loss"] == pytest.approx(loss, rel=1e-10)
    assert supervised_loss(model, NAME, samples, CONFIG) == pytest.approx(loss, rel=1e-10)


def test_looking_at_a_loss_changes_nothing(tiny_llama: Path) -> None:
    model = tiny_policy(tiny_llama)
    before = weights(model)
    first = supervised_loss(model, NAME, answers(), CONFIG)
    assert supervised_loss(model, NAME, answers(), CONFIG) == first
    assert same_bits(weights(model), before)


def test_warm_up_and_policy_steps_share_the_optimizer(tiny_llama: Path, tmp_path: Path) -> None:
    """Supervised, then a policy step: the same bits with and without a restart in between."""
    straight, restarted = tiny_policy(tiny_llama), tiny_policy(tiny_llama, seed=1)
    trainer = Trainer(straight, NAME, seed=0)
    train_supervised(trainer, [answers()], CONFIG)
    tmp_path.joinpath("after").mkdir()
    trainer.save(tmp_path / "after")
    trainer.step(policy_calls(), TrainConfig(learning_rate=1e-3))
    again = Trainer(restarted, NAME, seed=0)
    again.load(tmp_path / "after")
    again.step(policy_calls(), TrainConfig(learning_rate=1e-3))
    assert same_bits(weights(straight), weights(restarted))


def test_an_error_undoes_all_steps_of_the_call(tiny_llama: Path) -> None:
    model = tiny_policy(tiny_llama)
    before = weights(model)
    bad = answers()[0]._replace(weight=float("nan"))
    trainer = Trainer(model, NAME, seed=0)
    with pytest.raises(TrainingError, match="not finite"):
        train_supervised(trainer, [answers(), [bad]], CONFIG)
    assert same_bits(weights(model), before)


def test_memory_that_runs_out_once_is_no_matter(tiny_llama: Path) -> None:
    """In the third row: both steps are made again in smaller rows, nothing twice."""
    config = CONFIG.model_copy(update={"max_tokens_per_row": 40})
    batches = [answers(0), answers(1)]
    calm, short = tiny_policy(tiny_llama), tiny_policy(tiny_llama)
    expected = train_supervised(Trainer(calm, NAME, seed=0), batches, config)
    memory = Memory(short, at=3)
    figures = train_supervised(Trainer(short, NAME, seed=0), batches, config)
    assert max(memory.rows[3:]) < max(memory.rows[:3])
    assert figures["loss"] == pytest.approx(expected["loss"], rel=1e-12)
    assert figures["updates"] == 2
    assert worst(weights(short), weights(calm)) <= 1e-10


def test_as_many_rates_as_steps(tiny_llama: Path) -> None:
    trainer = Trainer(tiny_policy(tiny_llama), NAME, seed=0)
    with pytest.raises(ConfigError, match="one for each of 1 optimizer steps"):
        train_supervised(trainer, [answers()], TrainSFTConfig(learning_rate=(1e-3, 1e-3)))


@pytest.mark.parametrize(
    "settings", [{"learning_rate": 0}, {"learning_rate": []}, {"batch_size": 0}]
)
def test_settings_that_can_not_work(settings: dict[str, Any]) -> None:
    with pytest.raises((ConfigError, ValueError)):
        TrainSFTConfig(**settings)
