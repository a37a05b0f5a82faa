"""The merged decoder against the model's own modules: values, gradients, and who stands merged."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from art_core.batch.forest import plant
from art_core.config import LoraSettings
from art_core.nn import blocks, merging
from art_core.nn.blocks import is_block_model
from art_core.nn.lora import LoraModel
from art_core.training.logprobs import entry_logprobs
from tests.core.samples import make_sample
from tests.core.tiny_policy import NAME, shake

SAMPLES = [make_sample([1, 2, 3], [4, 5]), make_sample([1, 2, 3], [6]), make_sample([1, 7], [8, 9])]


def tiny(kind: str, **more: Any) -> LoraModel:
    """A random model of two layers in float32, of that class, with an adapter."""
    import transformers

    config = getattr(transformers, f"{kind}Config")(
        vocab_size=32,
        hidden_size=24,
        intermediate_size=40,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=6,
        **more,
    )
    torch.manual_seed(0)
    model = LoraModel(getattr(transformers, f"{kind}ForCausalLM")(config), Path(kind))
    for name, parameter in model._causal.named_parameters():
        if "norm" in name or "bias" in name:  # else ones and zeros, which any mistake leaves alone
            parameter.copy_(1.0 + 0.3 * torch.randn(parameter.shape))
    model.create_adapter(NAME, LoraSettings(rank=3, alpha=5.0), seed=0)
    shake(model, 1)
    return model


def learned(model: LoraModel) -> tuple[Tensor, list[Tensor]]:
    """Logprobs of the samples and gradients of their sum."""
    (row,) = plant(SAMPLES, 100)
    with model.training(NAME) as parameters:
        logprobs, entropies = entry_logprobs(model, row)
        (logprobs.sum() + 0.3 * entropies.sum()).backward()
    gradients = [p.grad.clone() for p in parameters if p.grad is not None]
    for parameter in parameters:
        parameter.grad = None
    assert len(gradients) == len(parameters)
    return logprobs.detach(), gradients


def answered(model: LoraModel, name: str | None) -> Tensor:
    model.activate(name)
    (row,) = plant(SAMPLES, 100)
    with torch.inference_mode():
        return entry_logprobs(model, row)[0]


def without_merging(model: LoraModel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model._merging, "_is_possible", False)


@pytest.mark.parametrize(
    ("kind", "more"),
    [
        ("Llama", {}),
        ("Llama", {"attention_bias": True}),
        ("Mistral", {"sliding_window": None}),
        ("Qwen2", {}),
        ("Qwen3", {}),
    ],
)
def test_values_and_gradients_are_the_modules(
    kind: str, more: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """To float noise: 1e-5 at values of order 1."""
    model = tiny(kind, **more)
    assert is_block_model(model._causal)
    logprobs, gradients = learned(model)
    answer = answered(model, NAME)
    without_merging(model, monkeypatch)
    expected, wanted = learned(model)
    assert (logprobs - expected).abs().max() <= 1e-5
    assert (answer - expected).abs().max() <= 1e-5
    for ours, theirs in zip(gradients, wanted, strict=True):
        assert theirs.abs().max() > 0
        assert (ours - theirs).abs().max() <= 1e-5 * max(1.0, float(theirs.abs().max()))


@pytest.mark.parametrize(
    ("kind", "more"),
    [("Gemma", {}), ("Mistral", {"sliding_window": 8}), ("Llama", {"hidden_act": "gelu"})],
)
def test_other_models_go_through_their_modules(kind: str, more: dict[str, Any]) -> None:
    model = tiny(kind, **more)
    assert not is_block_model(model._causal)


def test_an_adapter_that_is_not_a_product_goes_through_the_modules() -> None:
    """DoRA divides by a norm of the merged weight."""
    from peft import LoraConfig

    model = tiny("Llama")
    model._add("dora", LoraConfig(r=2, target_modules=["q_proj"], use_dora=True), seed=0)
    assert model._merging.weights("dora", learns=False) is None
    assert model._merging.weights(NAME, learns=False) is not None


def test_a_change_in_place_is_seen() -> None:
    model = tiny("Llama")
    before = answered(model, NAME)
    shake(model, 2)
    after = answered(model, NAME)
    assert (after - before).abs().max() > 1e-3
    shake(model, 1)
    assert torch.equal(answered(model, NAME), before)


def test_adapters_asked_by_turns_are_not_merged_by_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny("Llama")
    merged: list[str | None] = []

    def merge(causal: Any, name: str | None, *, learns: bool) -> Any:
        merged.append(name)
        return blocks.merge(causal, name, learns=learns)

    monkeypatch.setattr("art_core.nn.merging.merge", merge)
    first, base = answered(model, NAME), answered(model, None)
    for _ in range(2 * merging.PATIENCE):
        assert torch.equal(answered(model, NAME), first)
        assert torch.equal(answered(model, None), base)
    assert merged == [NAME]
    for _ in range(merging.PATIENCE):
        assert (answered(model, None) - base).abs().max() <= 1e-5
    assert merged == [NAME, None]


def test_some_modules_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """An adapter on two of the seven layers of a block."""
    model = tiny("Llama")
    model.drop_adapter(NAME)
    model.create_adapter(NAME, LoraSettings(target_modules=("k_proj", "down_proj")), seed=0)
    shake(model, 1)
    logprobs, gradients = learned(model)
    without_merging(model, monkeypatch)
    expected, wanted = learned(model)
    assert (logprobs - expected).abs().max() <= 1e-5
    for ours, theirs in zip(gradients, wanted, strict=True):
        assert (ours - theirs).abs().max() <= 1e-5
