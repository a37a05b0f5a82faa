"""A model served by vLLM behind our endpoint: what benchmarks of serving run against.

In: a base model, or the shape of one whose weights are drawn at random under the base model's
tokenizer. Out: a registered model with its endpoint, its engine and its run; ended on leaving.
"""

from __future__ import annotations

import asyncio
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

import art_core as art
from art_core.config import VllmConfig
from art_core.engine.vllm import VllmEngine
from art_core.local.live_run import LiveRun
from art_core.local.served_base import ServedBase
from art_core.nn.base_model import resolve_base_model

NAME = "agent"
DEFAULT = "SmolLM2-135M-Instruct"
QWEN3_05B: dict[str, Any] = {
    "hidden_size": 1024,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "intermediate_size": 3072,
    "max_position_embeddings": 8192,
    "tie_word_embeddings": True,
}
"""Qwen3-0.6B, but for the vocabulary, which is the tokenizer's: 0.49B with SmolLM2's."""
ON_CPU = VllmConfig(
    extra_args=("--enforce-eager", "--max-num-seqs", "64"),
    environment=(("OMP_NUM_THREADS", "1"), ("VLLM_CPU_OMP_THREADS_BIND", "nobind")),
)


@dataclass(frozen=True)
class House:
    """A served model; the parts that benchmarks look into."""

    model: art.TrainableModel[Any]
    base: ServedBase
    engine: VllmEngine
    run: LiveRun

    @property
    def endpoint(self) -> str:
        """Ours; ends in "/v1"."""
        return self.base.base_url

    @property
    def direct(self) -> str:
        """vLLM's own; ends in "/v1"."""
        return self.engine.server.base_url + "/v1"


@contextmanager
def served(
    base_model: str = DEFAULT,
    *,
    random_weights: bool = False,
    rank: int = 16,
    context_length: int = 4096,
    vllm: VllmConfig | None = None,
) -> Iterator[House]:
    """Serve `base_model` with vLLM, with an adapter on it.

    Args:
        base_model: name or folder.
        random_weights: take its tokenizer alone, under random weights in the shape `QWEN3_05B`.
        vllm: None: its defaults, on a CPU `ON_CPU`.
    """
    config = vllm or (VllmConfig() if torch.cuda.is_available() else ON_CPU)
    with tempfile.TemporaryDirectory() as folder:
        path = resolve_base_model(base_model)
        if random_weights:
            path = _random_model(path, Path(folder) / "random")
        model: art.TrainableModel[Any] = art.TrainableModel(
            name=NAME,
            project="benchmark",
            base_model=str(path),
            base_path=folder,
            art_config=art.ModelConfig(
                lora=art.LoraSettings(rank=rank, alpha=2.0 * rank),
                engine=art.EngineConfig(
                    kind="vllm", vllm=config.model_copy(update={"context_length": context_length})
                ),
            ),
        )
        backend = art.LocalBackend(show_progress=False)
        try:
            asyncio.run(model.register(backend))
            [base], [run] = backend._bases.values(), backend._runs.values()
            assert isinstance(base.engine, VllmEngine)
            yield House(model, base, base.engine, run)
        finally:
            asyncio.run(backend.close())


def _random_model(tokenizer: Path, folder: Path) -> Path:
    """A Qwen3 model of random weights in bfloat16, under another model's tokenizer."""
    from transformers import AutoModelForCausalLM, AutoTokenizer, Qwen3Config

    words = AutoTokenizer.from_pretrained(tokenizer)
    config = Qwen3Config(
        **QWEN3_05B,
        vocab_size=len(words),
        eos_token_id=words.eos_token_id,
        bos_token_id=words.bos_token_id,
    )
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.save_pretrained(folder)
    words.save_pretrained(folder)
    for name in ("chat_template.jinja", "tokenizer.json", "tokenizer_config.json"):
        if (tokenizer / name).exists():
            shutil.copy(tokenizer / name, folder / name)
    return folder
