"""TRL's side of benchmarks/grpo_update.py; runs in an environment without our packages.

In: a folder with batch.npz and an adapter, and the base model's folder. Out: for each line that it
reads, one update by GRPOTrainer's own loss, and a line of JSON that says how long it took.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch


def build(base: Path, adapter: Path, settings: dict[str, float]) -> tuple[Any, Any]:
    """GRPOTrainer around the adapter, and AdamW as ours."""
    from datasets import Dataset
    from peft import PeftModel
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from trl import GRPOConfig, GRPOTrainer

    plain: Any = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    model = PeftModel.from_pretrained(plain, adapter, is_trainable=True)
    config = GRPOConfig(
        output_dir=tempfile.mkdtemp(),
        per_device_train_batch_size=8,
        num_generations=8,
        beta=0.0,
        loss_type="bnpo",  # the mean over the batch's tokens
        epsilon=settings["epsilon"],
        epsilon_high=settings["epsilon_high"],
        gradient_checkpointing=False,  # the default, True, would make it a third slower
        bf16=False,
        use_cpu=True,
        report_to=[],
    )
    trainer = GRPOTrainer(
        model=model,
        reward_funcs=[lambda completions, **_: [0.0] * len(completions)],
        args=config,
        train_dataset=Dataset.from_list([{"prompt": "none"}] * 8),
        processing_class=AutoTokenizer.from_pretrained(base),
    )
    trainer.current_gradient_accumulation_steps = 1
    parameters = [p for p in trainer.model.parameters() if p.requires_grad]
    betas = (settings["beta1"], settings["beta2"])
    optimizer = torch.optim.AdamW(
        parameters, lr=settings["learning_rate"], betas=betas, weight_decay=0.0
    )
    return trainer, optimizer


def update(
    trainer: Any, optimizer: Any, batch: dict[str, torch.Tensor], rows: int
) -> dict[str, float]:
    """One optimizer step, timed; `rows` at once, each pass with its share of the tokens."""
    began = time.perf_counter()
    model = trainer.model.train()
    tokens = int(batch["tool_mask"].sum())
    total = 0.0
    for start in range(0, len(batch["tool_mask"]), rows):
        part = {name: values[start : start + rows] for name, values in batch.items()}
        loss = trainer.compute_loss(model, part) * (int(part["tool_mask"].sum()) / tokens)
        trainer.accelerator.backward(loss)
        total += float(loss.detach())
    parameters = optimizer.param_groups[0]["params"]
    norm = torch.nn.utils.clip_grad_norm_(parameters, 1.0)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return {
        "seconds": time.perf_counter() - began,
        "loss": total,
        "grad_norm": float(norm),
    }


def main() -> None:
    """Say that it is ready, then one update for each line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("base", type=Path)
    parser.add_argument("threads", type=int)
    parser.add_argument("rows", type=int)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    torch.set_flush_denormal(True)
    answers, sys.stdout = sys.stdout, sys.stderr  # libraries print, too
    settings = json.loads((args.folder / "settings.json").read_text("utf-8"))
    trainer, optimizer = build(args.base, args.folder, settings)
    with np.load(args.folder / "batch.npz") as arrays:
        batch = {name: torch.from_numpy(array) for name, array in arrays.items()}
    print("ready", file=answers, flush=True)
    for _ in sys.stdin:
        print(json.dumps(update(trainer, optimizer, batch, args.rows)), file=answers, flush=True)


if __name__ == "__main__":
    main()
