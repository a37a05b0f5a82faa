"""Models of many kinds: rows of trees, or of single sequences, against each sequence alone."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch", reason="art-langgraph[train] is not installed")

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from art_core.batch.sample import Sample
from art_core.config import LoraSettings
from art_core.nn.lora import LoraModel
from art_core.training.logprobs import entry_logprobs
from art_core.training.rows import rows_for
from tests.core.families import ALONE, FAMILIES, VOCABULARY, make_model
from tests.core.samples import random_calls
from tests.core.tiny_policy import NAME, reference_logprobs, shake

EXACT = 1e-10
"""In float64 (DESIGN section 8)."""
_TARGETS = {
    "mamba": ("in_proj",),
    "mamba2": ("in_proj",),
    "bamba": ("in_proj", "q_proj", "down_proj"),
    "falcon-h1": ("q_proj", "down_proj"),
    "llama4": ("q_proj", "down_proj"),
}
"""Where peft refuses some linear layers."""


class AllFloat64(TorchFunctionMode):
    """Norms, rotary angles and softmaxes that would go through float32 whatever the model's dtype
    stay in float64, in our rows and in the reference alike."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        def exact(value: Any) -> Any:
            return torch.float64 if value is torch.float32 else value

        if func is Tensor.float:
            func = Tensor.double
        named = {key: exact(value) for key, value in (kwargs or {}).items()}
        return func(*(exact(value) for value in args), **named)


def policy(name: str) -> LoraModel:
    base = make_model(name)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # peft's, of experts and of GPT-2's Conv1D
        model = LoraModel(base, Path(name))
        targets = LoraSettings(rank=4, alpha=8.0, target_modules=_TARGETS.get(name, "all-linear"))
        model.create_adapter(NAME, targets, seed=0)
    shake(model, 0)
    return model


def gradients(loss: Tensor, parameters: Sequence[Tensor]) -> list[Tensor]:
    found: Any = torch.autograd.grad(loss, list(parameters), allow_unused=True)
    pairs = zip(parameters, found, strict=True)  # None for what the loss does not reach
    return [torch.zeros_like(p) if g is None else g for p, g in pairs]


def in_rows(
    model: LoraModel, samples: Sequence[Sample], parameters: Sequence[Tensor]
) -> tuple[dict[tuple[int, int], float], list[Tensor]]:
    """Logprob by call and place, and the gradient of their sum weighted by advantage."""
    found: dict[tuple[int, int], float] = {}
    loss = torch.zeros((), dtype=torch.float64)
    for row in rows_for(model, samples, 10_000):
        logprobs, entropies = entry_logprobs(model, row)
        entries = row.entries
        advantages = torch.from_numpy(entries.advantage)
        loss = loss + (advantages * (logprobs + 0.1 * entropies)).sum()
        places: dict[int, int] = {}
        for call, logprob in zip(entries.call.tolist(), logprobs.tolist(), strict=True):
            place = places[call] = places.get(call, -1) + 1
            found[call, place] = logprob
    return found, gradients(loss, parameters)


def one_by_one(
    model: Any, samples: Sequence[Sample], parameters: Sequence[Tensor]
) -> tuple[dict[tuple[int, int], float], list[Tensor]]:
    """The same by transformers' own forward pass of each call."""
    found: dict[tuple[int, int], float] = {}
    loss = torch.zeros((), dtype=torch.float64)
    for sample in samples:
        logprobs, entropies = reference_logprobs(model, sample)
        loss = loss + (sample.advantage * (logprobs + 0.1 * entropies)).sum()
        found.update({(sample.call, i): x for i, x in enumerate(logprobs.tolist())})
    return found, gradients(loss, parameters)


@pytest.mark.parametrize("name", FAMILIES)
def test_rows_equal_each_call_alone(name: str, caplog: pytest.LogCaptureFixture) -> None:
    """Logprobs, and gradients of every LoRA weight relative to the largest, to 1e-10."""
    caplog.set_level(logging.WARNING, "art_core")
    with AllFloat64():
        model = policy(name)
    told = [r.message for r in caplog.records if "computes every call by itself" in r.message]
    assert len(told) == (name in ALONE)
    assert model.shares_positions == (name not in ALONE)
    samples = random_calls(3, vocab=VOCABULARY, groups=1)
    with model.training(NAME) as parameters, AllFloat64():
        ours, our_gradients = in_rows(model, samples, parameters)
        causal = model._causal
        if model.shares_positions:
            causal.set_attn_implementation("sdpa" if causal._supports_sdpa else "eager")
        expected, expected_gradients = one_by_one(causal, samples, parameters)
    assert ours.keys() == expected.keys()
    assert max(abs(ours[key] - expected[key]) for key in expected) <= EXACT
    largest = max(float(g.abs().max()) for g in expected_gradients)
    assert largest > 1e-3
    for got, want in zip(our_gradients, expected_gradients, strict=True):
        assert float((got - want).abs().max()) <= EXACT * largest
