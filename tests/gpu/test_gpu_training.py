"""A training step on a GPU in bfloat16 against the same step in float64 on the CPU."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("torch", reason="art-langgraph[train] is not installed")

import torch

from art_core.batch.forest import plant
from art_core.config import LoraSettings, TrainConfig
from art_core.nn.lora import LoraModel
from art_core.nn.recompute import Recompute
from art_core.training.logprobs import entry_logprobs
from art_core.training.trainer import Trainer
from tests.core.samples import policy_calls, random_calls
from tests.core.tiny_policy import NAME, shake, tiny_policy

pytestmark = pytest.mark.gpu


def on_gpu(folder: Path, dtype: torch.dtype) -> LoraModel:
    model = LoraModel.load(folder, dtype=dtype, device="cuda")
    model.create_adapter(NAME, LoraSettings(rank=4, alpha=8.0), seed=0)
    shake(model, 0)
    return model


def step(model: LoraModel) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Logprobs of a tree's entries, and the gradient of their weighted sum."""
    (row,) = plant(random_calls(1, vocab=300), 10_000)
    with model.training(NAME) as parameters:
        logprobs, entropies = entry_logprobs(model, row)
        weights = torch.from_numpy(row.entries.advantage).to(logprobs)
        gradients = torch.autograd.grad((weights * (logprobs + 0.1 * entropies)).sum(), parameters)
    return logprobs.detach().double().cpu(), [g.double().cpu() for g in gradients]


def flat(gradients: list[torch.Tensor]) -> torch.Tensor:
    return torch.cat([g.flatten() for g in gradients])


@pytest.mark.parametrize(
    ("dtype", "nats", "angle"),
    [(torch.float32, 2e-4, 1e-5), (torch.bfloat16, 0.2, 5e-2)],
    ids=["float32", "bfloat16"],
)
def test_a_tree_on_the_gpu(tiny_llama: Path, dtype: torch.dtype, nats: float, angle: float) -> None:
    """DESIGN section 8 in float32; bfloat16 is noise of 2^-8 of logits that reach 10."""
    expected, expected_gradients = step(tiny_policy(tiny_llama))
    model = on_gpu(tiny_llama, dtype)
    assert all(p.dtype == torch.float32 for p in model.adapter_weights(NAME).values())
    for _ in range(2):  # the first row measures what layers keep
        logprobs, gradients = step(model)
        assert (logprobs - expected).abs().max() < nats
        got, want = flat(gradients), flat(expected_gradients)
        assert 1 - float(torch.cosine_similarity(got, want, dim=0)) < angle


def test_layers_that_forget_change_nothing(
    tiny_llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = on_gpu(tiny_llama, torch.bfloat16)
    step(model)
    kept = step(model)
    monkeypatch.setattr(Recompute, "_keeping", lambda self, positions: 0)
    forgotten = step(model)
    assert torch.equal(kept[0], forgotten[0])
    assert torch.allclose(flat(kept[1]), flat(forgotten[1]), rtol=1e-2, atol=1e-3)


def test_a_step_on_the_gpu_tells_its_memory_and_its_times(tiny_llama: Path) -> None:
    """The peak is that of torch's tensors; phases are the GPU's own time, within the step's."""
    model = on_gpu(tiny_llama, torch.bfloat16)
    trainer = Trainer(model, NAME, seed=0)
    config = TrainConfig(max_tokens_per_row=64, kl_penalty_coef=0.1)
    figures = [trainer.step(policy_calls(seed), config) for seed in range(2)][1]
    assert 0 < figures["memory/peak_gib"] < figures["memory/available_gib"]
    phases = ("pack", "known logprobs", "forward", "backward", "optimizer")
    seconds = [figures[f"seconds/{name}"] for name in phases]
    assert min(seconds) > 0
    assert sum(seconds) <= figures["train_seconds"]
