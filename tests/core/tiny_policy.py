"""The tiny model with an adapter that does something, and the same policy in plain peft.

The reference shares no code with ours: torch's own attention, peft's own loader, one sequence at a
time, loss and update as written in the papers. transformers' RMSNorm goes through float32 whatever
the model's dtype, so float64 models get one that does not, both ours and the reference's.
"""

from __future__ import annotations

import gc
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from art_core.batch.sample import Sample
from art_core.config import LoraSettings
from art_core.nn.lora import LoraModel

NAME = "live"


def tiny_policy(
    folder: Path, *, dtype: torch.dtype = torch.float64, seed: int = 0, name: str = NAME
) -> LoraModel:
    """The model in `folder` with a LoRA of rank 4 whose B is not zero."""
    model = LoraModel(_base(folder, dtype), folder)
    model.create_adapter(name, LoraSettings(rank=4, alpha=8.0), seed=seed)
    shake(model, seed, name)
    return model


def shake(model: LoraModel, seed: int, name: str = NAME) -> None:
    """Give the adapter random weights, the same in every dtype up to rounding."""
    generator = torch.Generator().manual_seed(seed)
    for weight in model.adapter_weights(name).values():
        weight.copy_(torch.randn(weight.shape, generator=generator, dtype=torch.float64) * 0.2)


def weights(model: LoraModel, name: str = NAME) -> dict[str, Tensor]:
    """A copy of the adapter's weights."""
    return {key: value.clone() for key, value in model.adapter_weights(name).items()}


def same_bits(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    """True if both hold the same tensors, bit for bit."""
    return a.keys() == b.keys() and all(torch.equal(a[key], b[key]) for key in a)


def tensors_alive() -> int:
    """How many tensors there are in the process."""
    gc.collect()
    return sum(issubclass(type(thing), Tensor) for thing in gc.get_objects())


def in_peft(base: Path, adapter: Path, dtype: torch.dtype) -> Any:
    """The saved adapter as peft and transformers load it, with gradients."""
    from peft import PeftModel

    model = _base(base, dtype)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # PeftModel asks transformers for what is deprecated
        return PeftModel.from_pretrained(model, adapter, is_trainable=True).eval()


def _base(folder: Path, dtype: torch.dtype) -> Any:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, attn_implementation="sdpa")
    if dtype == torch.float64:
        for parent in list(model.modules()):
            for name, child in list(parent.named_children()):
                if type(child).__name__ == "LlamaRMSNorm":
                    setattr(parent, name, _Norm(child))
    return model


class _Norm(nn.Module):
    """x / sqrt(mean(x^2) + eps) * weight, in x's own dtype (arXiv:1910.07467, eq. 4)."""

    def __init__(self, like: Any) -> None:
        super().__init__()
        self.weight, self.eps = like.weight, like.variance_epsilon

    def forward(self, x: Tensor) -> Tensor:
        scaled = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps)
        out: Tensor = scaled * self.weight
        return out


def reference_logprobs(model: Any, sample: Sample) -> tuple[Tensor, Tensor]:
    """(logprob, entropy) [S] of one call computed alone, at its temperature."""
    ids = torch.from_numpy(sample.path.astype("int64")).unsqueeze(0)
    logits = model(input_ids=ids).logits[0, len(sample.prompt_ids) - 1 :]
    logprobs = torch.log_softmax(logits / (sample.temperature or 1.0), dim=-1)
    target = torch.from_numpy(sample.sampled_ids.astype("int64")).unsqueeze(1)
    return logprobs.gather(1, target).squeeze(1), -(logprobs.exp() * logprobs).sum(-1)


def reference_loss(
    model: Any,
    samples: Sequence[Sample],
    *,
    epsilon: float = 0.2,
    epsilon_high: float = 0.28,
    entropy_coef: float = 0.0,
) -> Tensor:
    """Token-mean of -min(rho A, clip(rho) A) - entropy_coef H; a distorted call has rho = 1."""
    total = sum(len(sample.sampled_ids) for sample in samples)
    loss = torch.zeros((), dtype=torch.float64)
    for sample in samples:
        new, entropy = reference_logprobs(model, sample)
        old = new.detach() if sample.distorted else torch.from_numpy(sample.logprobs).to(new.dtype)
        ratio = torch.exp(new - old)
        clipped = ratio.clamp(1 - epsilon, 1 + epsilon_high)
        gain = torch.minimum(ratio * sample.advantage, clipped * sample.advantage)
        loss = loss - (gain + entropy_coef * entropy).sum() / total
    return loss


def reference_parameters(model: Any) -> dict[str, Tensor]:
    """LoRA parameters under the names they have in an adapter file."""
    return {
        name.replace(".default", ""): parameter
        for name, parameter in sorted(model.named_parameters())
        if "lora_" in name
    }
