"""How long a GRPO update on CPU takes for a group of agent rollouts, beside TRL's GRPOTrainer.

Both sides: the same rollouts (a shop's agent: a prompt in common, a tool call, its result, an
answer; only what was sampled counts), the same weights in float32, the same LoRA, the mean over
tokens of the clipped loss, the norm clipped at 1, AdamW. TRL repeats the prompt, pads, and takes a
few rollouts at once, so that they fit into memory (6 GB for 4); its gradient checkpointing is off,
which is faster. Ours holds everything from samples to figures. Gate: loss, logprobs and gradient
are those of each rollout computed alone by transformers and peft (the logprobs in double
precision), and TRL's loss and gradient norm are the same. Unit: seconds an update. Goals: four
times as fast, and 0.85 of the ratio of positions computed.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
import venv
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from art_core.batch.forest import plant
from art_core.batch.sample import Sample
from art_core.calls import Ids
from art_core.config import LoraSettings, TrainConfig
from art_core.engine.tokenizer import HFTokenizer
from art_core.nn.base_model import resolve_base_model
from art_core.nn.lora import LoraModel
from art_core.nn.memory import keep_freed_memory
from art_core.training.logprobs import entry_logprobs
from art_core.training.trainer import Trainer
from benchmarks.comparison import MIN_REPEATS, Comparison, at_least_five, compare_seconds, machine

MODEL = "HuggingFaceTB/SmolLM2-135M-Instruct"
ADAPTER = "live"
MEAN, WORST, COSINE = 1e-5, 2e-4, 0.99999
"""Nats between logprobs, and the cosine between gradients (BENCHMARKS.md, B2)."""
LOSS, NORM = 1e-5, 1e-4
"""Absolute and relative difference of losses and gradient norms."""
TIMES, SHARE = 4.0, 0.85
CONFIG = TrainConfig(
    learning_rate=1e-5, epsilon=0.2, epsilon_high=0.28, aggregation="token", max_tokens_per_row=4096
)
_HERE = Path(__file__).parent
_CACHE = _HERE.parent / ".cache"


@dataclass(frozen=True)
class Rollout:
    """A trajectory as one sequence."""

    prompt: Ids
    rest: Ids
    """All that follows the prompt, up to the last sampled id."""
    sampled: np.ndarray[Any, np.dtype[np.bool_]]
    """True where an id of `rest` was sampled."""
    advantage: float


def play(tokenizer: HFTokenizer, prompt: int, group: int, seed: int) -> list[Rollout]:
    """`group` rollouts on a prompt of `prompt` ids; what follows it is 40 to 90 ids long."""
    rng = np.random.default_rng(seed)
    told = "You answer customers of a shop. First call one tool, then say what it returned."
    example = "\n".join(
        f"Has A{n} been sent? order_status(order=A{n}). Order A{n} is delivered." for n in range(99)
    )
    question = "<|im_end|>\n<|im_start|>user\nWhere is my order A825?<|im_end|>\n"
    tail = tokenizer.encode(f"{question}<|im_start|>assistant\n")
    head = tokenizer.encode(f"<|im_start|>system\n{told}\n{example}")
    stem = [*head[: prompt - len(tail)], *tail]
    rewards = rng.permutation(np.linspace(0.0, 1.0, group))
    advantages = (rewards - rewards.mean()) / rewards.std()
    return [
        _rollout(tokenizer, stem, int(rng.integers(100, 999)), float(a))
        for a in advantages.tolist()
    ]


def _rollout(tokenizer: HFTokenizer, stem: list[int], number: int, advantage: float) -> Rollout:
    wordy = " I hope that this helps you." * (number % 4)
    parts = (
        (f'<tool_call>\n{{"name": "order_status", "arguments": {{"order": "A{number}"}}}}', True),
        ("\n</tool_call><|im_end|>", True),
        (f"\n<|im_start|>tool\nOrder A{number} is delayed.<|im_end|>\n", False),
        ("<|im_start|>assistant\n", False),
        (f"Order A{number} is delayed.{wordy}<|im_end|>", True),
    )
    pieces = [(tokenizer.encode(text), is_sampled) for text, is_sampled in parts]
    return Rollout(
        prompt=np.array(stem, np.int32),
        rest=np.array([i for ids, _ in pieces for i in ids], np.int32),
        sampled=np.concatenate([np.full(len(ids), flag) for ids, flag in pieces]),
        advantage=advantage,
    )


def samples(rollouts: Sequence[Rollout], old: Sequence[Tensor]) -> list[Sample]:
    """Each stretch that was sampled is a call. old: [len(rest)] logprobs of each rollout."""
    found: list[Sample] = []
    for index, (rollout, logprobs) in enumerate(zip(rollouts, old, strict=True)):
        edges = np.flatnonzero(np.diff(rollout.sampled.astype(int), prepend=0, append=0))
        for start, end in edges.reshape(-1, 2).tolist():
            found.append(
                Sample(
                    prompt_ids=np.concatenate([rollout.prompt, rollout.rest[:start]]),
                    sampled_ids=rollout.rest[start:end],
                    logprobs=logprobs[start:end].numpy(),
                    advantage=rollout.advantage,
                    weight=1.0,
                    temperature=1.0,
                    distorted=False,
                    call=len(found),
                    trajectory=index,
                )
            )
    return found


class Naive:
    """Each rollout alone, through transformers and peft, written by hand."""

    def __init__(self, base: Path, adapter: Path) -> None:
        from peft import PeftModel
        from transformers import AutoModelForCausalLM

        model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
        self._model: Any = PeftModel.from_pretrained(model, adapter, is_trainable=True).eval()

    def logprobs(self, rollout: Rollout) -> Tensor:
        """[len(rest)]."""
        ids = torch.from_numpy(np.concatenate([rollout.prompt, rollout.rest])).long()
        logits = self._model(input_ids=ids[None, :-1], use_cache=False).logits[0]
        rest = torch.from_numpy(rollout.rest).long()
        logprobs: Tensor = logits[len(rollout.prompt) - 1 :].log_softmax(-1)
        return logprobs.gather(1, rest[:, None])[:, 0]

    @torch.no_grad()
    def exact(self, rollouts: Sequence[Rollout]) -> list[Tensor]:
        """Logprobs in double precision: single alone is off by 1e-5."""
        self._model.double()
        found = [self.logprobs(rollout).float() for rollout in rollouts]
        self._model.float()
        return found

    def learn(
        self, rollouts: Sequence[Rollout], old: Sequence[Tensor]
    ) -> tuple[float, dict[str, Tensor]]:
        """Loss and gradients, by the names of an adapter's file."""
        count = sum(int(rollout.sampled.sum()) for rollout in rollouts)
        low, high = CONFIG.bounds
        total = 0.0
        for rollout, logprobs in zip(rollouts, old, strict=True):
            ratio = torch.exp(self.logprobs(rollout) - logprobs)
            clipped = ratio.clamp(1 - low, 1 + high)
            gain = torch.minimum(ratio * rollout.advantage, clipped * rollout.advantage)
            loss = -(gain * torch.from_numpy(rollout.sampled)).sum() / count
            loss.backward()
            total += float(loss.detach())
        named = ((n, p) for n, p in self._model.named_parameters() if p.grad is not None)
        return total, {name.replace(".default", ""): p.grad for name, p in named}


class Ours:
    """The trainer, from samples to figures."""

    def __init__(self, base: Path) -> None:
        self.model = LoraModel.load(base)
        self.model.create_adapter(ADAPTER, LoraSettings(rank=8), seed=0)
        generator = torch.Generator().manual_seed(0)
        for name, weight in self.model.adapter_weights(ADAPTER).items():
            if "lora_B" in name:  # zero in a fresh adapter, so that A would have no gradient
                weight.copy_(torch.randn(weight.shape, generator=generator) * 0.01)
        self._trainer = Trainer(self.model, ADAPTER, seed=0)

    def update(self, batch: Sequence[Sample]) -> dict[str, float]:
        """One optimizer step; its figures."""
        return self._trainer.step(batch, CONFIG)

    def learn(self, batch: Sequence[Sample]) -> tuple[dict[str, float], dict[str, Tensor]]:
        """As `update`, with the gradients as they were before the optimizer's step."""
        found: dict[str, Tensor] = {}

        def keep(name: str) -> Callable[[Tensor], None]:
            def hook(weight: Tensor) -> None:
                if weight.grad is not None:
                    found[name] = weight.grad.clone()

            return hook

        names = list(self.model.adapter_weights(ADAPTER))
        with self.model.training(ADAPTER) as weights:
            hooks = [
                weight.register_post_accumulate_grad_hook(keep(name))
                for name, weight in zip(names, weights, strict=True)
            ]
            figures = self.update(batch)
        for hook in hooks:
            hook.remove()
        return figures, found


class Peer:
    """TRL in a process and an environment of its own; it waits while ours runs."""

    def __init__(self, folder: Path, base: Path, rows: int) -> None:
        script = [_HERE / "grpo_update_trl.py", folder, base, torch.get_num_threads(), rows]
        self._process = subprocess.Popen(
            [str(_environment()), *map(str, script)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self._line()  # "ready"

    def update(self) -> dict[str, float]:
        """One update: seconds, loss, grad_norm."""
        assert self._process.stdin is not None
        print(file=self._process.stdin, flush=True)
        found: dict[str, float] = json.loads(self._line())
        return found

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()

    def _line(self) -> str:
        assert self._process.stdout is not None
        line = self._process.stdout.readline().strip()
        if not line:
            raise RuntimeError("TRL's process ended; fewer --rows take less memory")
        return line


def _environment() -> Path:
    """Python of TRL's environment, which is made if its requirements are new."""
    requirements = _HERE / "grpo_update_trl.txt"
    folder = _CACHE / "grpo_update_trl"
    python, stamp = folder / "bin" / "python", folder / "requirements.txt"
    if not stamp.exists() or stamp.read_text("utf-8") != requirements.read_text("utf-8"):
        venv.create(folder, with_pip=True)
        pip = [str(python), "-m", "pip", "install", "--quiet", "--requirement", str(requirements)]
        subprocess.run(pip, check=True)
        stamp.write_text(requirements.read_text("utf-8"), "utf-8")
    return python


def padded(rollouts: Sequence[Rollout], old: Sequence[Tensor]) -> dict[str, Any]:
    """The batch as GRPOTrainer takes it: a row a rollout, padded behind."""
    width = max(len(rollout.rest) for rollout in rollouts)

    def rows(parts: Sequence[Any], dtype: Any) -> Any:
        return np.stack([np.pad(np.asarray(p, dtype), (0, width - len(p))) for p in parts])

    prompts = np.stack([rollout.prompt for rollout in rollouts]).astype(np.int64)
    return {
        "prompt_ids": prompts,
        "prompt_mask": np.ones_like(prompts),
        "completion_ids": rows([r.rest for r in rollouts], np.int64),
        "completion_mask": rows([np.ones(len(r.rest)) for r in rollouts], np.int64),
        "tool_mask": rows([r.sampled for r in rollouts], np.int64),
        "old_per_token_logps": rows([o.numpy() for o in old], np.float32),
        "advantages": np.array([r.advantage for r in rollouts], np.float32),
    }


def hand_over(folder: Path, ours: Ours, batch: dict[str, Any]) -> None:
    """Write what TRL's side reads."""
    ours.model.save_adapter(ADAPTER, folder)
    np.savez(folder / "batch.npz", **batch)
    settings = {
        "epsilon": CONFIG.epsilon,
        "epsilon_high": CONFIG.epsilon_high,
        "learning_rate": CONFIG.learning_rate,
        "beta1": CONFIG.adam_betas[0],
        "beta2": CONFIG.adam_betas[1],
    }
    (folder / "settings.json").write_text(json.dumps(settings), "utf-8")


def gate(
    ours: Ours,
    naive: Naive,
    peer: Peer,
    rollouts: Sequence[Rollout],
    old: Sequence[Tensor],
    exact: Sequence[Tensor],
) -> None:
    """Check the first update of all three; the adapters are the same before it.

    exact: [len(rest)] logprobs of each rollout computed alone in double precision.

    Raises:
        RuntimeError: they differ by more than float noise.
    """
    batch = samples(rollouts, old)
    (row,) = plant(batch, CONFIG.max_tokens_per_row)
    ours.model.activate(ADAPTER)
    with torch.no_grad():
        logprobs = entry_logprobs(ours.model, row)[0]
    wanted = {s.call: torch.from_numpy(s.logprobs) for s in samples(rollouts, exact)}
    calls = torch.from_numpy(row.entries.call)
    off = torch.cat([(logprobs[calls == call] - w).abs() for call, w in wanted.items()])
    figures, gradients = ours.learn(batch)
    loss, expected = naive.learn(rollouts, old)
    a, b = (torch.cat([g[n].flatten().double() for n in expected]) for g in (gradients, expected))
    cosine = float(a @ b / (a.norm() * b.norm()))
    theirs = peer.update()
    found = {
        "mean": float(off.mean()) <= MEAN,
        "worst": float(off.max()) <= WORST,
        "cosine": cosine >= COSINE,
        "loss": abs(figures["loss"] - loss) <= LOSS,
        "norm": abs(float(a.norm() / b.norm()) - 1) <= NORM,
        "TRL's loss": abs(theirs["loss"] - loss) <= LOSS,
        "TRL's norm": abs(theirs["grad_norm"] / float(b.norm()) - 1) <= NORM,
    }
    seen = f"logprobs off by {off.mean():.1e}, at most {off.max():.1e}; cosine {cosine:.8f}; "
    seen += f"loss {figures['loss']:.7f}, naive {loss:.7f}, TRL {theirs['loss']:.7f}; gradient "
    seen += f"norm {a.norm():.6f}, naive {b.norm():.6f}, TRL {theirs['grad_norm']:.6f}"
    print(seen, file=sys.stderr)
    if wrong := [name for name, is_right in found.items() if not is_right]:
        raise RuntimeError(f"updates differ in {', '.join(wrong)}: {seen}")


def main() -> None:
    """Check, measure and print the line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="a group of 4 on a prompt of 128")
    parser.add_argument("--model", default=MODEL, help="name or folder of the base model")
    parser.add_argument("--prompt", type=int, default=512, help="ids that the group has in common")
    parser.add_argument("--group", type=int, default=8)
    parser.add_argument("--rows", type=int, default=4, help="rollouts that TRL takes at once")
    parser.add_argument("--repeats", type=at_least_five, default=7)
    args = parser.parse_args()
    if args.quick:
        args.prompt, args.group, args.repeats = 128, 4, MIN_REPEATS

    keep_freed_memory()
    torch.set_flush_denormal(True)
    base = resolve_base_model(args.model)
    ours, rollouts = Ours(base), play(HFTokenizer(base), args.prompt, args.group, seed=0)
    with tempfile.TemporaryDirectory() as work:
        ours.model.save_adapter(ADAPTER, Path(work))
        naive = Naive(base, Path(work))
        exact = naive.exact(rollouts)
        noise = np.random.default_rng(1)
        old = [x + torch.from_numpy(noise.normal(0, 0.1, len(x))).float() for x in exact]
        batch = padded(rollouts, old)
        hand_over(Path(work), ours, batch)
        peer = Peer(Path(work), base, args.rows)
        gate(ours, naive, peer, rollouts, old, exact)
        del naive

        mine = samples(rollouts, old)

        def run() -> float:
            began = time.perf_counter()
            ours.update(mine)
            return time.perf_counter() - began

        found = compare_seconds(run, lambda: peer.update()["seconds"], repeats=args.repeats)
        peer.close()
    _tell(found, positions(batch) / sum(map(len, plant(mine, CONFIG.max_tokens_per_row))))


def positions(batch: dict[str, Any]) -> int:
    """That TRL computes: padding counts, for it is computed too."""
    return int(batch["prompt_ids"].size + batch["completion_ids"].size)


def _tell(found: tuple[float, float, float, tuple[float, float]], tokens: float) -> None:
    mine, theirs, ratio, spread = found
    goal = f"ratio >= {TIMES} and >= {SHARE * tokens:.2f}, {SHARE} of the ratio of positions"
    line = Comparison(
        name="grpo_update",
        ours=round(mine, 3),
        peer=round(theirs, 3),
        peer_name="TRL 1.16 GRPOTrainer",
        ratio=round(ratio, 3),
        goal=f"{goal} {tokens:.2f}",
        spread=(round(spread[0], 3), round(spread[1], 3)),
        machine=machine(),
    )
    print(line.line())


if __name__ == "__main__":
    main()
