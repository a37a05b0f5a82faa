"""A GRPO update on one GPU: rows of trees against one sample a call with transformers and peft.

Both sides: the same random weights in bfloat16 in the shape of a Qwen3 model, LoRA of rank 16 on
all linear layers, the same samples, loss and optimizer. The peer computes each sample by itself,
with its head on sampled positions only and nothing recomputed, which is the best that it can do.
Gate: both sides' logprobs agree as bfloat16 can, and so does the gradient's direction.
Unit: seconds an update. "Logical" tokens are those of the samples, each counted whole.
Loads: `prefix` and `short` are a stem of 8192 with 16 answers of 512 or 64; `agent` is a group of 8
rollouts of 6 turns over a stem of 1024, each turn 64 tokens sampled and 448 read; `uneven` is like
it, but no two turns, stems or updates are of one length; `plain` is one sequence of 16,384.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from art_core.batch.sample import Sample
from art_core.config import LoraSettings, TrainConfig
from art_core.nn.lora import LoraModel
from art_core.training.logprobs import entry_logprobs
from art_core.training.rows import rows_for
from art_core.training.trainer import Trainer
from benchmarks.comparison import MIN_REPEATS, Comparison, at_least_five, compare_seconds, machine

NAME = "live"
EPSILON, EPSILON_HIGH = 0.2, 0.28
SHAPES: dict[str, dict[str, Any]] = {
    "tiny": {
        "hidden_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "intermediate_size": 128,
        "vocab_size": 1000,
    },
    "0.6b": {
        "hidden_size": 1024,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "intermediate_size": 3072,
        "vocab_size": 151936,
    },
    "4b": {
        "hidden_size": 2560,
        "num_hidden_layers": 36,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "intermediate_size": 9728,
        "vocab_size": 151936,
    },
    "7b": {
        "hidden_size": 3584,
        "num_hidden_layers": 28,
        "num_attention_heads": 28,
        "num_key_value_heads": 4,
        "intermediate_size": 18944,
        "vocab_size": 152064,
        "kind": "Qwen2",
    },
    "14b": {
        "hidden_size": 5120,
        "num_hidden_layers": 48,
        "num_attention_heads": 40,
        "num_key_value_heads": 8,
        "intermediate_size": 13824,
        "vocab_size": 152064,
        "kind": "Qwen2",
    },
}
GOALS = {
    "prefix": "logical tok/s >= 370k on an H200, 0.85 of the token ratio at Unsloth's rate",
    "short": "logical tok/s >= 10 x TRL (token bound 14.3)",
    "agent": "ratio >= 10 x one sample a call",
    "uneven": "ratio >= 10 x one sample a call",
    "plain": "tok/s >= 1.2 x Unsloth (gpu_unsloth.py)",
}


def build(shape: str, device: str, dtype: torch.dtype) -> Any:
    """A Qwen3 or Qwen2.5 model of random weights; the bigger ones of the latter are not tied."""
    import transformers

    sizes = dict(SHAPES[shape])
    kind = sizes.pop("kind", "Qwen3")
    config = getattr(transformers, f"{kind}Config")(
        **sizes, max_position_embeddings=40_960, tie_word_embeddings=kind == "Qwen3"
    )
    torch.manual_seed(0)
    with torch.device(device):
        return transformers.AutoModelForCausalLM.from_config(config, dtype=dtype)


def draw(load: str, scale: int, vocab: int, seed: int) -> list[Sample]:
    """The samples of an update; lengths are divided by `scale`."""
    rng = np.random.default_rng(seed)

    def ids(n: int) -> list[int]:
        return [int(i) for i in rng.integers(1, vocab, max(1, n // scale))]

    found: list[Sample] = []

    def add(prompt: list[int], sampled: list[int], trajectory: int) -> None:
        found.append(
            Sample(
                prompt_ids=np.array(prompt, np.int32),
                sampled_ids=np.array(sampled, np.int32),
                logprobs=np.full(len(sampled), -np.log(vocab), np.float32),
                advantage=float(rng.normal()),
                weight=0.0,
                temperature=1.0,
                distorted=False,
                call=len(found),
                trajectory=trajectory,
            )
        )

    def length(n: int) -> int:
        return n if load == "agent" else int(rng.integers(n // 2, n + n // 2))

    if load in ("agent", "uneven"):
        stem = ids(length(1024))
        for trajectory in range(8):
            history = list(stem)
            for _ in range(6):
                answer = ids(length(64))
                add(history, answer, trajectory)
                history = history + answer + ids(length(448))
    elif load == "plain":
        add(ids(scale), ids(16_384), 0)
    else:
        stem = ids(8192)
        for trajectory in range(16):
            add(stem, ids(512 if load == "prefix" else 64), trajectory)
    return found


@dataclass
class Ours:
    """The trainer, on rows of trees."""

    model: LoraModel
    config: TrainConfig
    optimizer: Literal["adamw", "adamw_8bit"] = "adamw"

    def __post_init__(self) -> None:
        self.model.create_adapter(NAME, LoraSettings(rank=16, alpha=16.0), seed=0)
        for key, weight in self.model.adapter_weights(NAME).items():
            if "lora_B" in key:  # else half of the gradient would be zero
                torch.nn.init.normal_(weight, std=0.01)
        self.trainer = Trainer(self.model, NAME, seed=0, optimizer=self.optimizer)

    def update(self, samples: Sequence[Sample]) -> dict[str, float]:
        return self.trainer.step(samples, self.config)

    def logprobs(self, samples: Sequence[Sample]) -> tuple[dict[int, Tensor], Tensor]:
        """Logprobs by call, and the gradient of their sum weighted by advantage."""
        found: dict[int, Tensor] = {}
        with self.model.training(NAME) as parameters:
            gradient = torch.zeros(sum(p.numel() for p in parameters), device=self.model.device)
            for row in rows_for(self.model, samples, self.config.max_tokens_per_row):
                values, _ = entry_logprobs(self.model, row, entropy_gradient=False)
                weights = torch.from_numpy(row.entries.advantage).to(values)
                parts = torch.autograd.grad((weights * values).sum(), parameters)
                gradient += torch.cat([part.flatten() for part in parts])
                for call in np.unique(row.entries.call):
                    found[int(call)] = values[torch.from_numpy(row.entries.call == call)].detach()
        return found, gradient


class OneByOne:
    """transformers and peft, a sample a call."""

    def __init__(self, base: Any, adapter: dict[str, Tensor], lr: float) -> None:
        from peft import LoraConfig, get_peft_model, set_peft_model_state_dict

        settings = LoraConfig(
            r=16, lora_alpha=16, target_modules="all-linear", task_type="CAUSAL_LM"
        )
        self.model: Any = get_peft_model(base, settings)
        set_peft_model_state_dict(self.model, adapter)
        self.model.eval()
        self.parameters = [p for n, p in sorted(self.model.named_parameters()) if p.requires_grad]
        self.optimizer = torch.optim.AdamW(self.parameters, lr=lr)

    def logprobs(self, sample: Sample) -> Tensor:
        ids = torch.from_numpy(sample.path.astype(np.int64))[None].to(self.model.device)
        logits = self.model(
            input_ids=ids, use_cache=False, logits_to_keep=len(sample.sampled_ids)
        ).logits[0]
        target = torch.from_numpy(sample.sampled_ids.astype(np.int64)).to(logits.device)
        return torch.log_softmax(logits.float(), -1).gather(1, target[:, None])[:, 0]

    def update(self, samples: Sequence[Sample], config: TrainConfig) -> None:
        total = sum(len(sample.sampled_ids) for sample in samples)
        for sample in samples:
            new = self.logprobs(sample)
            ratio = torch.exp(new - torch.from_numpy(sample.logprobs).to(new))
            clipped = ratio.clamp(1 - EPSILON, 1 + EPSILON_HIGH)
            gain = torch.minimum(ratio * sample.advantage, clipped * sample.advantage)
            (-gain.sum() / total).backward()
        torch.nn.utils.clip_grad_norm_(self.parameters, config.max_grad_norm)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)


def gate(ours: Ours, peer: OneByOne, samples: Sequence[Sample]) -> dict[str, float]:
    """Check that both compute the same.

    Raises:
        RuntimeError: they do not.
    """
    mine, gradient = ours.logprobs(samples)
    differences = []
    gradients = torch.zeros_like(gradient)
    for sample in samples:
        values = peer.logprobs(sample)
        differences.append((values.detach() - mine[sample.call]).abs())
        parts = torch.autograd.grad(sample.advantage * values.sum(), peer.parameters)
        gradients += torch.cat([part.flatten().float() for part in parts])
    found = torch.cat(differences)
    seen = {
        "mean_nats": float(found.mean()),
        "max_nats": float(found.max()),
        "cosine": float(torch.cosine_similarity(gradient, gradients, dim=0)),
    }
    half = ours.model.dtype != torch.float32
    if seen["mean_nats"] > (0.02 if half else 1e-5) or seen["cosine"] < (0.99 if half else 0.99999):
        raise RuntimeError(f"the two sides differ: {seen}")
    return seen


def timed(
    run: Callable[[Sequence[Sample]], object], device: str, load: str, scale: int, vocab: int
) -> Callable[[], float]:
    """Seconds of a run, of an update that was not seen before."""
    seeds = count(1)

    def seconds() -> float:
        samples = draw(load, scale, vocab, next(seeds))
        _wait(device)
        began = time.perf_counter()
        run(samples)
        _wait(device)
        return time.perf_counter() - began

    return seconds


def _wait(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def peak(run: Callable[[], object], device: str) -> float:
    """GB at the worst moment of a run, weights included."""
    if device != "cuda":
        run()
        return float("nan")
    torch.cuda.reset_peak_memory_stats()
    run()
    return torch.cuda.max_memory_allocated() / 1e9


def main() -> None:
    """Check, measure and print the line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="a tiny model and lengths / 64, CPU")
    parser.add_argument("--shape", default="0.6b", choices=sorted(SHAPES))
    parser.add_argument("--load", default="prefix", choices=sorted(GOALS))
    parser.add_argument("--row", type=int, default=32_768, help="positions of a row at most")
    parser.add_argument("--repeats", type=at_least_five, default=MIN_REPEATS)
    args = parser.parse_args()
    quick = args.quick
    shape, device = ("tiny", "cpu") if quick else (args.shape, "cuda")
    dtype = torch.float32 if quick else torch.bfloat16
    scale = 64 if quick else 1
    config = TrainConfig(
        learning_rate=1e-5,
        epsilon=EPSILON,
        epsilon_high=EPSILON_HIGH,
        max_tokens_per_row=args.row,
    )

    ours = Ours(LoraModel(build(shape, device, dtype), Path(shape)), config)
    adapter = {key: value.clone() for key, value in ours.model.adapter_weights(NAME).items()}
    peer = OneByOne(build(shape, device, dtype), adapter, config.learning_rate)
    samples = draw(args.load, scale, ours.model.vocab_size, seed=0)
    seen = gate(ours, peer, samples)
    print(json.dumps({"gate": seen}), flush=True)  # the peer may take a minute from here
    began = time.perf_counter()
    figures = ours.update(samples)
    first = time.perf_counter() - began
    logical, packed = figures["tokens_naive"], figures["tokens_computed"]
    memory = [peak(lambda: ours.update(samples), device)]
    memory.append(peak(lambda: peer.update(samples, config), device))
    drawn = (device, args.load, scale, ours.model.vocab_size)
    mine, theirs, ratio, spread = compare_seconds(
        timed(ours.update, *drawn),
        timed(lambda samples: peer.update(samples, config), *drawn),
        repeats=args.repeats,
    )
    found = Comparison(
        name=f"gpu_update {shape} {args.load}",
        ours=round(mine, 4),
        peer=round(theirs, 4),
        peer_name="transformers + peft, one sample a call",
        ratio=round(ratio, 2),
        goal=GOALS[args.load],
        spread=(round(spread[0], 2), round(spread[1], 2)),
        machine=torch.cuda.get_device_name() if device == "cuda" else machine(),
    )
    details = {
        "packed_tok_s": round(packed / mine),
        "logical_tok_s": round(logical / mine),
        "peer_tok_s": round(logical / theirs),
        "token_ratio": round(logical / packed, 2),
        "first_seconds": round(first, 2),
        "peak_gb": [round(gb, 1) for gb in memory],
        **{key: round(value, 6) for key, value in seen.items()},
    }
    print(json.dumps(details))
    print(found.line())


if __name__ == "__main__":
    main()
