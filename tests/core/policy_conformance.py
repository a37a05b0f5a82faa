"""What every policy that a trainer can learn on must do, held against transformers and peft.

A test module derives from `PolicyConformance` and gives the fixture `policy`. The truth is computed
in a wider dtype from the very weights that the policy has: rounded, or in 4 bits, as they are.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from art_core.batch.forest import plant
from art_core.batch.sample import Sample
from art_core.config import LoraSettings, TrainConfig
from art_core.errors import CheckpointError
from art_core.nn.frozen import is_four_bit
from art_core.nn.lora import WEIGHTS, LoraModel
from art_core.training.logprobs import entry_logprobs
from art_core.training.trainer import Trainer
from tests.core.samples import random_calls
from tests.core.tiny_policy import NAME, same_bits, shake, weights

CONFIG = TrainConfig(learning_rate=1e-2, max_grad_norm=100.0)
VOCABULARY = 300
KINDS = ("Llama", "Qwen2", "Qwen3")
"""Of the models: the second has biases, the third norms in its heads and a tied output matrix."""


@dataclass(frozen=True)
class Policy:
    """A way to compute."""

    load: Callable[[Path], LoraModel]
    exact: torch.dtype
    """Of the truth."""
    nats: float
    """By how much a logprob may be off, if peft in the same dtype is not off by half as much."""
    gradient: float
    """The same of ||mine - truth|| / ||truth||."""
    optimizer: Any = "adamw"
    resumes_exactly: bool = True


def write_model(kind: str, folder: Path) -> Path:
    """A random model of two layers; heads of 64, which the kernels for GPUs are made for."""
    import transformers

    config = getattr(transformers, f"{kind}Config")(
        vocab_size=VOCABULARY,
        hidden_size=128,
        intermediate_size=192,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=64,
        max_position_embeddings=512,
        initializer_range=0.1,
        tie_word_embeddings=kind == "Qwen3",
        bos_token_id=None,
        eos_token_id=1,
        pad_token_id=0,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = getattr(transformers, f"{kind}ForCausalLM")(config)
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):  # zero in a fresh model
                torch.nn.init.normal_(parameter, std=0.1)
        model.save_pretrained(folder)
    return folder


def truth(model: LoraModel, base: Path, adapter: Path, dtype: torch.dtype) -> Any:
    """`base` with the frozen weights of `model` and the saved adapter, in plain peft."""
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    twin: Any = AutoModelForCausalLM.from_pretrained(
        base, dtype=model.dtype, attn_implementation="sdpa"
    )
    twin = twin.to(dtype=dtype, device=model.device)
    modules = dict(twin.named_modules())
    for name, layer in model._causal.named_modules():
        if is_four_bit(layer):
            modules[name.replace(".base_layer", "")].weight.data = unpacked(layer).to(dtype)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # PeftModel asks transformers for what is deprecated
        return PeftModel.from_pretrained(twin, adapter, is_trainable=True).eval()


def unpacked(layer: Any) -> Tensor:
    from bitsandbytes.functional import dequantize_4bit

    found: Tensor = dequantize_4bit(layer.weight.data, layer.weight.quant_state)
    return found


def outcome(
    logprobs: Callable[[Sample], Tensor], samples: list[Sample], parameters: list[Tensor]
) -> tuple[Tensor, Tensor]:
    """Logprobs of all samples, and the gradient of their sum weighted by advantage."""
    found = [logprobs(sample) for sample in samples]
    total = sum((s.advantage * part.double().sum() for s, part in zip(samples, found, strict=True)))
    gradients = torch.autograd.grad(total, parameters)  # type: ignore[arg-type]  # no sample: 0
    return (
        torch.cat(found).detach().double().cpu(),
        torch.cat([g.flatten().double().cpu() for g in gradients]),
    )


def in_truth(twin: Any, samples: list[Sample]) -> tuple[Tensor, Tensor]:
    def logprobs(sample: Sample) -> Tensor:
        ids = torch.from_numpy(sample.path.astype("int64"))[None].to(twin.device)
        logits = twin(input_ids=ids).logits[0, len(sample.prompt_ids) - 1 :]
        target = torch.from_numpy(sample.sampled_ids.astype("int64")).to(twin.device)
        scaled = logits / (sample.temperature or 1.0)
        return torch.log_softmax(scaled, dim=-1).gather(1, target[:, None])[:, 0]

    parameters = [p for name, p in sorted(twin.named_parameters()) if "lora_" in name]
    return outcome(logprobs, samples, parameters)


def in_rows(model: LoraModel, samples: list[Sample], *, together: bool) -> tuple[Tensor, Tensor]:
    """As one tree, or each sample in a plain row of its own."""
    parts = [samples] if together else [[sample] for sample in samples]
    values: dict[int, Tensor] = {}
    with model.training(NAME) as parameters:
        for part in parts:
            (row,) = plant(part, 10_000)
            logprobs, _ = entry_logprobs(model, row, entropy_gradient=False)
            for sample in part:
                values[sample.call] = logprobs[torch.from_numpy(row.entries.call == sample.call)]
        return outcome(lambda sample: values[sample.call], samples, parameters)


def off(got: Tensor, want: Tensor) -> float:
    return float((got - want).norm() / want.norm())


@dataclass(frozen=True)
class Truth:
    """What should come out, and how far from it one may be."""

    logprobs: Tensor
    gradient: Tensor
    nats: float
    distance: float

    @classmethod
    def of(
        cls, policy: Policy, model: LoraModel, base: Path, adapter: Path, samples: list[Sample]
    ) -> Truth:
        want = in_truth(truth(model, base, adapter, policy.exact), samples)
        noisy = in_truth(truth(model, base, adapter, model.dtype), samples)
        nats = max(policy.nats, 2 * float((noisy[0] - want[0]).abs().max()))
        return cls(*want, nats, max(policy.gradient, 2 * off(noisy[1], want[1])))

    def check(self, got: tuple[Tensor, Tensor]) -> None:
        assert float((got[0] - self.logprobs).abs().max()) <= self.nats
        assert off(got[1], self.gradient) <= self.distance


class PolicyConformance:
    """Derive, and give the fixture `policy`."""

    @pytest.fixture(params=KINDS)
    def base(self, request: pytest.FixtureRequest, tmp_path: Path) -> Path:
        return write_model(request.param, tmp_path / request.param)

    @pytest.fixture
    def model(self, policy: Policy, base: Path) -> LoraModel:
        model = policy.load(base)
        model.create_adapter(NAME, LoraSettings(rank=4, alpha=8.0), seed=0)
        shake(model, 0)
        return model

    @pytest.fixture
    def samples(self) -> list[Sample]:
        return random_calls(1, vocab=VOCABULARY)

    @pytest.mark.parametrize("together", [True, False], ids=["tree", "plain rows"])
    def test_logprobs_and_gradients_are_those_of_plain_peft(
        self,
        policy: Policy,
        model: LoraModel,
        base: Path,
        samples: list[Sample],
        tmp_path: Path,
        together: bool,
    ) -> None:
        model.save_adapter(NAME, tmp_path / "saved")
        expected = Truth.of(policy, model, base, tmp_path / "saved", samples)
        for _ in range(2):  # the first row on a GPU measures what layers keep
            expected.check(in_rows(model, samples, together=together))

    def test_layers_that_forget_change_nothing(
        self,
        policy: Policy,
        model: LoraModel,
        samples: list[Sample],
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        in_rows(model, samples, together=True)
        kept = in_rows(model, samples, together=True)
        monkeypatch.setattr(type(model._recompute), "_keeping", lambda self, positions: 0)
        forgotten = in_rows(model, samples, together=True)
        assert torch.equal(kept[0], forgotten[0])
        assert off(forgotten[1], kept[1]) <= policy.gradient

    def test_the_base_model_answers_where_no_adapter_is_active(
        self, policy: Policy, model: LoraModel, samples: list[Sample]
    ) -> None:
        (row,) = plant(samples, 10_000)
        model.create_adapter("fresh", LoraSettings(rank=2), seed=1)  # B is zero: it changes nothing
        found = []
        with torch.no_grad():
            for name in (None, "fresh", NAME):
                model.activate(name)
                found.append(entry_logprobs(model, row)[0].double().cpu())
        assert float((found[0] - found[1]).abs().max()) <= policy.nats
        assert float((found[0] - found[2]).abs().max()) > 3 * policy.nats

    def test_a_step_goes_down_the_gradient_and_can_be_repeated(
        self, policy: Policy, model: LoraModel, base: Path, samples: list[Sample], tmp_path: Path
    ) -> None:
        """Save, step twice; load what was saved into another policy, and step twice there."""
        trainer = Trainer(model, NAME, seed=0, optimizer=policy.optimizer)
        trainer.step(samples, CONFIG)
        (tmp_path / "1").mkdir()
        trainer.save(tmp_path / "1")
        before = weights(model)
        figures = trainer.step(samples, CONFIG)
        assert figures["grad_norm"] > 0
        assert not same_bits(weights(model), before)
        again = policy.load(base)
        again.create_adapter(NAME, LoraSettings(rank=4, alpha=8.0), seed=5)
        other = Trainer(again, NAME, seed=9, optimizer=policy.optimizer)
        other.load(tmp_path / "1")
        assert same_bits(weights(again), before)
        other.step(samples, CONFIG)
        if policy.resumes_exactly:
            assert same_bits(weights(again), weights(model))
            return
        moved = {key: value - before[key] for key, value in weights(model).items()}
        for key, value in weights(again).items():
            # Gradients near zero may turn round in AdamW's first steps, which only see signs.
            assert off(value - before[key], moved[key]) <= 0.1

    def test_a_step_that_fails_is_undone(
        self, policy: Policy, model: LoraModel, samples: list[Sample]
    ) -> None:
        trainer = Trainer(model, NAME, seed=0, optimizer=policy.optimizer)
        trainer.step(samples, CONFIG)
        before = weights(model)

        def stopped() -> None:
            with trainer.undone_on_error():
                trainer.step(samples, CONFIG)
                raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            stopped()
        assert same_bits(weights(model), before)
        trainer.step(samples, CONFIG)
        assert not same_bits(weights(model), before)

    def test_what_is_saved_reads_the_same_everywhere(
        self, policy: Policy, model: LoraModel, base: Path, samples: list[Sample], tmp_path: Path
    ) -> None:
        """In peft, and merged into the weights; float32, under peft's keys, nothing of the base."""
        from safetensors.torch import load_file

        model.save_adapter(NAME, tmp_path)
        saved = load_file(tmp_path / WEIGHTS)
        assert len(saved) == 2 * 2 * 7  # A and B of seven matrices in two layers
        assert all(key.startswith("base_model.model.model.layers.") for key in saved)
        assert all(value.dtype in (torch.float32, torch.float64) for value in saved.values())
        settings = json.loads((tmp_path / "adapter_config.json").read_text())
        assert (settings["r"], settings["lora_alpha"], settings["use_rslora"]) == (4, 8.0, False)
        expected = Truth.of(policy, model, base, tmp_path, samples)
        got, _ = in_rows(model, samples, together=True)
        assert float((got - expected.logprobs).abs().max()) <= expected.nats
        merged = truth(model, base, tmp_path, policy.exact).merge_and_unload()
        with torch.no_grad():
            ids = torch.from_numpy(samples[0].path.astype("int64"))[None].to(model.device)
            logits = merged(input_ids=ids).logits[0, len(samples[0].prompt_ids) - 1 :]
        logits = logits / (samples[0].temperature or 1.0)
        target = torch.from_numpy(samples[0].sampled_ids.astype("int64")).to(model.device)
        want = torch.log_softmax(logits, -1).gather(1, target[:, None])[:, 0].double().cpu()
        assert float((got[: len(want)] - want).abs().max()) <= expected.nats

    def test_adapters_of_another_scale_are_read_as_they_are_meant(
        self, policy: Policy, base: Path, samples: list[Sample], tmp_path: Path
    ) -> None:
        """rsLoRA: alpha / sqrt(r) (arXiv:2312.03732), so 16 / 2 here, not 16 / 4."""
        from peft import LoraConfig, get_peft_model
        from transformers import AutoModelForCausalLM

        settings = LoraConfig(
            r=4, lora_alpha=16, use_rslora=True, target_modules="all-linear", task_type="CAUSAL_LM"
        )
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            other = get_peft_model(AutoModelForCausalLM.from_pretrained(base), settings)
            generator = torch.Generator().manual_seed(3)
            for name, parameter in sorted(other.named_parameters()):
                if "lora_B" in name:
                    parameter.data = 0.1 * torch.randn(parameter.shape, generator=generator)
            other.save_pretrained(str(tmp_path))
        model = policy.load(base)
        model.load_adapter(NAME, tmp_path)
        expected = Truth.of(policy, model, base, tmp_path, samples)
        expected.check(in_rows(model, samples, together=True))

    def test_a_checkpoint_of_another_optimizer_is_refused(
        self, policy: Policy, model: LoraModel, samples: list[Sample], tmp_path: Path
    ) -> None:
        trainer = Trainer(model, NAME, seed=0, optimizer=policy.optimizer)
        trainer.step(samples, CONFIG)
        trainer.save(tmp_path)
        from safetensors.torch import load_file, save_file

        from art_core.training.moments import OPTIMIZER

        kept = load_file(tmp_path / OPTIMIZER)
        save_file({f"0.strange_{i}": v for i, v in enumerate(kept.values())}, tmp_path / OPTIMIZER)
        with pytest.raises(CheckpointError, match="optimizer"):
            trainer.load(tmp_path)
