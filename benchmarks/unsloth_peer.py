"""Unsloth's own model, driven line by line: the other side of gpu_unsloth.py, in its own process.

In: a model's folder with an adapter in it, and a request a line on standard input. Out: an answer a
line, JSON. It is a process of its own because importing Unsloth changes transformers for all that
runs beside it. A sample a call: that many tokens forward and backward through Unsloth's loss, which
is scaled by the sample's advantage; then the gradients are clipped, and AdamW makes a step.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

MODULES = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
DONE = "done"
"""A file beside the adapter once it is whole."""
CHECKPOINTING: dict[str, Any] = {"none": False, "torch": True, "unsloth": "unsloth"}


class Peer:
    """The model with the adapter of the other side."""

    def __init__(self, folder: Path, length: int, *, four_bit: bool, checkpointing: str) -> None:
        import torch
        from peft import set_peft_model_state_dict
        from safetensors.torch import load_file
        from unsloth import FastLanguageModel

        base, _ = FastLanguageModel.from_pretrained(
            model_name=str(folder),
            max_seq_length=length,
            dtype=torch.bfloat16,
            load_in_4bit=four_bit,
            device_map={"": 0},
        )
        self.model: Any = FastLanguageModel.get_peft_model(
            base,
            r=16,
            lora_alpha=16,
            lora_dropout=0.0,
            target_modules=list(MODULES),
            use_gradient_checkpointing=CHECKPOINTING[checkpointing],
        )
        while not (folder / "adapter" / DONE).exists():
            time.sleep(0.1)
        weights = load_file(folder / "adapter" / "adapter_model.safetensors")
        set_peft_model_state_dict(self.model, weights)
        self.model.train()
        named = {
            name.replace(".default", ""): parameter
            for name, parameter in self.model.named_parameters()
            if parameter.requires_grad
        }
        self.named = dict(sorted(named.items()))
        self.optimizer = torch.optim.AdamW(list(self.named.values()), lr=1e-5, fused=True)

    def loss(self, sample: Any) -> Any:
        """Mean negative logprob of the sampled ids, over the positions that ours has too."""
        import torch

        path = torch.from_numpy(sample.path.astype("int64"))[None].to("cuda")
        targets = torch.full_like(path, -100)
        sampled = torch.from_numpy(sample.sampled_ids.astype("int64"))
        targets[0, -len(sampled) :] = sampled.to("cuda")
        return self.model(input_ids=path, labels=targets, shift_labels=targets).loss

    def backward(self, samples: Sequence[Any]) -> list[float]:
        """Gradients of the advantage-weighted logprobs' sum; the mean logprob of each sample."""
        found = []
        for sample in samples:
            loss = self.loss(sample)
            (-loss * len(sample.sampled_ids) * sample.advantage).backward()
            found.append(-loss.detach())
        return [float(value) for value in found]

    def update(self, samples: Sequence[Any]) -> None:
        """A step of the optimizer."""
        import torch

        self.backward(samples)
        torch.nn.utils.clip_grad_norm_(list(self.named.values()), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)


def answer(peer: Peer, request: dict[str, Any]) -> dict[str, Any]:
    """What one request asks for."""
    import torch
    from safetensors.torch import save_file

    from benchmarks.gpu_update import draw

    samples = draw(request["load"], request["scale"], request["vocab"], request["seed"])
    if request["do"] == "gradient":
        logprobs = peer.backward(samples)
        grads = {name: p.grad.float().contiguous() for name, p in peer.named.items()}
        save_file(grads, request["to"])
        peer.optimizer.zero_grad(set_to_none=True)
        del grads
        torch.cuda.empty_cache()
        return {"logprobs": logprobs}
    torch.cuda.reset_peak_memory_stats()
    peer.update(samples)
    torch.cuda.synchronize()
    began = time.perf_counter()
    peer.update(samples)
    torch.cuda.synchronize()
    seconds = time.perf_counter() - began
    torch.cuda.empty_cache()
    return {"seconds": seconds, "peak_gb": torch.cuda.max_memory_allocated() / 1e9}


def main() -> None:
    """Answer until there is no more to read."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--length", type=int, default=16_384)
    parser.add_argument("--four-bit", action="store_true")
    parser.add_argument("--checkpointing", choices=sorted(CHECKPOINTING), default="none")
    args = parser.parse_args()
    out, sys.stdout = sys.stdout, sys.stderr  # Unsloth greets
    import unsloth  # noqa: F401 - before everything that it changes

    peer = Peer(args.folder, args.length, four_bit=args.four_bit, checkpointing=args.checkpointing)
    for line in sys.stdin:
        print(json.dumps(answer(peer, json.loads(line))), file=out, flush=True)


if __name__ == "__main__":
    main()
