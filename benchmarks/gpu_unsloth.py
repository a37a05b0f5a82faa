"""A GRPO update on one GPU against Unsloth's own model, side by side on the same tokens.

Both sides: the same random weights in the shape of a Qwen3 or Qwen2.5 model, bfloat16 or 4 bits
(NF4), the same adapter of rank 16 on all linear layers, the same samples and optimizer. Ours: rows
of trees. The peer: Unsloth in a process of its own (unsloth_peer.py), one sample a call, its fused
loss. By turns, so that a slow minute of the machine hits both.
Gate: the mean logprob of each sample agrees as bfloat16 can, and so does the gradient's direction.
Loads: those of gpu_update.py, and `plain`: one sequence of 16,384 tokens, all of them trained.
`--card N`: as if the GPU had N GiB; the rest is held while ours runs alone.
"""

from __future__ import annotations

import argparse
import fcntl
import json
import subprocess
import sys
import tempfile
import time
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import torch

from art_core.config import TrainConfig
from art_core.nn.lora import LoraModel
from benchmarks.comparison import MIN_REPEATS, Comparison, at_least_five, compare_seconds
from benchmarks.gpu_update import NAME, SHAPES, Ours, build, draw, peak, timed
from benchmarks.unsloth_peer import DONE

GOALS = {
    "plain": "ratio >= 1.2",
    "prefix": "ratio >= 0.85 of the token ratio",
    "short": "ratio >= 0.85 of the token ratio",
    "agent": "ratio >= 10 x one sample a call",
    "uneven": "ratio >= 10 x one sample a call",
}
_MEAN_NATS, _COSINE = 0.02, 0.99
GIB = 2**30


class Unsloth:
    """The peer's process; it loads while we do, and waits for the adapter."""

    def __init__(self, folder: Path, args: argparse.Namespace) -> None:
        command = [sys.executable, "-m", "benchmarks.unsloth_peer", str(folder)]
        command += ["--length", str(args.row), "--checkpointing", args.checkpointing]
        command += ["--four-bit"] if args.four_bit else []
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def ask(self, **request: Any) -> dict[str, Any]:
        """One answer."""
        assert self._process.stdin is not None
        print(json.dumps(request), file=self._process.stdin, flush=True)
        return self._read()

    def close(self) -> None:
        """End it."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(timeout=60)

    def _read(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"Unsloth's process ended with {self._process.wait()}")
        found: dict[str, Any] = json.loads(line)
        return found


def write_model(shape: str, folder: Path) -> None:
    """Random weights and a tokenizer, which Unsloth wants to see, in Hugging Face format."""
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    device = "cuda" if torch.cuda.is_available() else "cpu"
    build(shape, device, torch.bfloat16).save_pretrained(folder)
    backend = Tokenizer(models.BPE({"a": 0, "b": 1, "<|end|>": 2}, []))
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, eos_token="<|end|>", pad_token="<|end|>"
    )
    tokenizer.save_pretrained(folder)
    if device == "cuda":
        torch.cuda.empty_cache()


def gate(ours: Ours, peer: Unsloth, load: str, scale: int, work: Path) -> dict[str, float]:
    """Check that both compute the same.

    Raises:
        RuntimeError: they do not.
    """
    from safetensors.torch import load_file

    vocab = ours.model.vocab_size
    samples = draw(load, scale, vocab, seed=0)
    mine, gradient = ours.logprobs(samples)
    to = work / "gradient.safetensors"
    theirs = peer.ask(do="gradient", load=load, scale=scale, vocab=vocab, seed=0, to=str(to))
    means = [float(mine[sample.call].mean()) for sample in samples]
    nats = np.abs(np.array(theirs["logprobs"]) - np.array(means))
    found = load_file(to)
    names = list(ours.model.adapter_weights(NAME))
    other = torch.cat([found[name].flatten() for name in names]).to(gradient)
    seen = {
        "mean_nats": float(nats.mean()),
        "max_nats": float(nats.max()),
        "cosine": float(torch.cosine_similarity(gradient, other, dim=0)),
        "norm_ratio": float(other.norm() / gradient.norm()),
    }
    if seen["mean_nats"] > _MEAN_NATS or seen["cosine"] < _COSINE:
        raise RuntimeError(f"the two sides differ: {seen}")
    return seen


def profiled(ours: Ours, load: str, scale: int) -> None:
    """Print where the time of an update goes, kernel by kernel."""
    from torch.profiler import ProfilerActivity, profile

    samples = draw(load, scale, ours.model.vocab_size, seed=7)
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as seen:
        ours.update(samples)
        torch.cuda.synchronize()
    rows = [e for e in seen.key_averages() if e.device_type.name == "CUDA"]
    rows.sort(key=lambda e: -e.self_device_time_total)
    total = sum(e.self_device_time_total for e in rows)
    print(json.dumps({"gpu_ms": round(total / 1e3, 1)}))
    for e in rows[:28]:
        print(f"{e.self_device_time_total / 1e3:9.2f} ms {e.count:6d} x  {e.key[:110]}")


def alone(ours: Ours, load: str, args: argparse.Namespace, held: int) -> None:
    """Measure ours with nobody beside it, and print the line.

    held: bytes of the GPU that it may not have.
    """
    seconds = timed(ours.update, "cuda", load, args.scale, ours.model.vocab_size)
    seconds()
    memory = peak(seconds, "cuda") - held / 1e9
    samples = draw(load, args.scale, ours.model.vocab_size, seed=1)
    tokens = sum(len(sample.path) for sample in samples)
    each = [seconds() for _ in range(args.repeats)]
    found = {
        "name": f"gpu_unsloth {args.shape} {load} alone",
        "four_bit": args.four_bit,
        "layers": args.layers,
        "optimizer": args.optimizer,
        "card_gib": args.card,
        "seconds": round(float(np.median(each)), 4),
        "logical_tok_s": round(tokens / float(np.median(each))),
        "peak_gb": round(memory, 2),
        "spread": [round(min(each), 4), round(max(each), 4)],
        "machine": torch.cuda.get_device_name(),
    }
    print(json.dumps(found), flush=True)


def beside(ours: Ours, peer: Unsloth, load: str, args: argparse.Namespace, work: Path) -> None:
    """Check, measure by turns, and print the line."""
    vocab = ours.model.vocab_size
    seen = gate(ours, peer, load, args.scale, work)
    torch.cuda.empty_cache()
    seeds, peaks = count(1), [0.0]

    def theirs() -> float:
        told = peer.ask(do="update", load=load, scale=args.scale, vocab=vocab, seed=next(seeds))
        peaks.append(told["peak_gb"])
        return float(told["seconds"])

    updates = timed(ours.update, "cuda", load, args.scale, vocab)

    def mine() -> float:
        updates()
        seconds = updates()
        torch.cuda.empty_cache()
        return seconds

    memory = peak(mine, "cuda")
    a, b, ratio, spread = compare_seconds(mine, theirs, repeats=args.repeats)
    samples = draw(load, args.scale, vocab, seed=0)
    tokens = sum(len(sample.path) for sample in samples)
    details = {
        "four_bit": args.four_bit,
        "layers": args.layers,
        "checkpointing": args.checkpointing,
        "our_tok_s": round(tokens / a),
        "peer_tok_s": round(tokens / b),
        "our_peak_gb": round(memory, 2),
        "peer_peak_gb": round(max(peaks), 2),
        **{key: round(value, 6) for key, value in seen.items()},
    }
    print(json.dumps(details))
    found = Comparison(
        name=f"gpu_unsloth {args.shape} {load}",
        ours=round(a, 4),
        peer=round(b, 4),
        peer_name=f"Unsloth, one sample a call, checkpointing {args.checkpointing}",
        ratio=round(ratio, 3),
        goal=GOALS[load],
        spread=(round(spread[0], 3), round(spread[1], 3)),
        machine=torch.cuda.get_device_name(),
    )
    print(found.line(), flush=True)


def main() -> None:
    """Check, measure and print the lines."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shape", default="0.6b", choices=sorted(SHAPES))
    parser.add_argument("--load", nargs="+", default=["plain"], choices=sorted(GOALS))
    parser.add_argument("--scale", type=int, default=1, help="what lengths are divided by")
    parser.add_argument("--row", type=int, default=16_384, help="positions of a row at most")
    parser.add_argument("--four-bit", action="store_true")
    parser.add_argument("--layers", choices=("own", "unsloth"), default="own")
    parser.add_argument("--optimizer", choices=("adamw", "adamw_8bit"), default="adamw")
    parser.add_argument("--checkpointing", choices=("none", "torch", "unsloth"), default="none")
    parser.add_argument("--alone", action="store_true", help="without Unsloth's model")
    parser.add_argument("--card", type=float, help="GiB that the GPU is taken to have")
    parser.add_argument("--profile", action="store_true")
    parser.add_argument("--turn", type=Path, help="a file; who measures holds its lock")
    parser.add_argument("--repeats", type=at_least_five, default=MIN_REPEATS)
    parser.add_argument("--folder", type=Path, help="where the model is kept; made if missing")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        work = args.folder or Path(temporary) / "model"
        if not (work / "config.json").exists():
            write_model(args.shape, work)
        held = hold(args.card)
        (work / "adapter" / DONE).unlink(missing_ok=True)
        peer = None if args.alone or args.profile else Unsloth(work, args)
        began = time.perf_counter()
        model = LoraModel.load(
            work,
            dtype=torch.bfloat16,
            device="cuda",
            four_bit=args.four_bit,
            layers=args.layers,
        )
        loaded = torch.cuda.memory_allocated() - held.numel()
        print(
            json.dumps(
                {"load_s": round(time.perf_counter() - began, 1), "weights_gb": loaded / 1e9}
            )
        )
        config = TrainConfig(learning_rate=1e-5, max_tokens_per_row=args.row)
        ours = Ours(model, config, optimizer=args.optimizer)
        ours.model.save_adapter(NAME, work / "adapter")
        (work / "adapter" / DONE).touch()
        if args.turn is not None:
            turn = args.turn.open("w")  # held to the end of the process
            fcntl.flock(turn, fcntl.LOCK_EX)
        if args.profile:
            ours.update(draw(args.load[0], args.scale, model.vocab_size, seed=1))
            profiled(ours, args.load[0], args.scale)
        elif peer is None:
            for load in args.load:
                alone(ours, load, args, held.numel())
        else:
            for load in args.load:
                beside(ours, peer, load, args, work)
            peer.close()


def hold(card: float | None) -> torch.Tensor:
    """Memory that nobody may have, so that the GPU seems to be one of `card` GiB."""
    if card is None:
        return torch.empty(0, dtype=torch.uint8, device="cuda")
    free, _ = torch.cuda.mem_get_info()
    return torch.empty(max(0, int(free - card * GIB)), dtype=torch.uint8, device="cuda")


if __name__ == "__main__":
    main()
