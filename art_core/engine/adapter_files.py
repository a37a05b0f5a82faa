"""What a server must know of an adapter before it loads it, read from its files.

In: a folder in peft's format. Out: its settings, its shapes, and what speaks against serving it. Of
the weights only the header is read; no torch. Why so strict: a server that leaves out what it can't
carry answers fluently and wrongly.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from art_core.engine.vllm_settings import RANKS
from art_core.errors import CheckpointError

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"

_HEADS = ("lm_head", "embed_tokens", "wte", "embed_out")
_PLAIN: dict[str, tuple[Any, ...]] = {
    "use_dora": (None, False),
    "lora_bias": (None, False),
    "bias": (None, "none"),
    "use_qalora": (None, False),
    "alora_invocation_tokens": (None, []),
    "layer_replication": (None, []),
    "alpha_pattern": (None, {}),
    "trainable_token_indices": (None, [], {}),
    "target_parameters": (None, []),
}
"""Settings with which an adapter is a plain low-rank product in linear layers; with any other value
vLLM would leave something out, or scale it otherwise."""


@dataclass(frozen=True)
class AdapterFiles:
    """An adapter on disk."""

    folder: Path
    config: dict[str, Any]
    shapes: dict[str, tuple[int, ...]]
    """Of its tensors, by name."""

    @property
    def rank(self) -> int:
        """The largest that a layer has."""
        patterns: dict[str, int] = self.config.get("rank_pattern") or {}
        return max([int(self.config["r"]), *patterns.values()])

    @property
    def base(self) -> str | None:
        """The base model it says it was trained on: a name, or a folder of some machine."""
        return self.config.get("base_model_name_or_path")


def read_adapter(folder: Path) -> AdapterFiles:
    """Settings and shapes of the adapter in `folder`.

    Raises:
        CheckpointError: the folder is no adapter in peft's format.
    """
    try:
        config = json.loads((folder / CONFIG).read_text("utf-8"))
        int(config["r"])
        with (folder / WEIGHTS).open("rb") as file:
            header = json.loads(file.read(int.from_bytes(file.read(8), "little")))
        shapes = {n: tuple(e["shape"]) for n, e in header.items() if n != "__metadata__"}
    except (OSError, ValueError, LookupError, TypeError, MemoryError, OverflowError) as error:
        raise CheckpointError(
            f"adapter can't be read ({error})",
            got=str(folder),
            expected=f"{CONFIG} and {WEIGHTS}",
            fix="Choose another step.",
        ) from error
    return AdapterFiles(folder, config, shapes)


def allowed_rank(rank: int) -> int:
    """The least `--max-lora-rank` that carries `rank`.

    Raises:
        CheckpointError: vLLM knows none.
    """
    fits = [allowed for allowed in RANKS if allowed >= rank]
    if not fits:
        raise CheckpointError(
            "vLLM can't serve an adapter of this rank",
            got=rank,
            expected=f"at most {RANKS[-1]}",
            fix="Set LoraSettings(rank=...) lower.",
        )
    return fits[0]


def check_servable(
    adapter: AdapterFiles, *, max_rank: int, base: Mapping[str, tuple[int, ...]] | None = None
) -> None:
    """Whether vLLM serves the adapter as it was trained.

    Args:
        max_rank: what vLLM was started with.
        base: shapes of the base model's weights by name, to compare with; None: not compared.

    Raises:
        CheckpointError: it would leave something out, or can't load it.
    """
    fault = _fault(adapter, max_rank) or (_misfit(adapter, base) if base else None)
    if fault is not None:
        raise CheckpointError(
            f"vLLM can't serve adapter {adapter.folder} as it was trained: {fault}",
            fix="Train plain LoRA on linear layers, or serve it with the embedded engine.",
        )


def _fault(adapter: AdapterFiles, max_rank: int) -> str | None:
    config = adapter.config
    if saved := config.get("modules_to_save"):
        return f"it has whole layers in it, modules_to_save={saved!r}"
    names = [key for key in adapter.shapes if any(f".{head}." in f".{key}" for head in _HEADS)]
    if names:
        return f"it changes the embedding or the head ({names[0]})"
    for name, allowed in _PLAIN.items():
        if config.get(name) not in allowed:
            return f"{name}={config[name]!r}"
    if config.get("rank_pattern") and not config.get("use_rslora") and adapter.rank != config["r"]:
        # 0.25.1 scales every layer by lora_alpha / r
        return f"its layers have ranks of their own, rank_pattern={config['rank_pattern']!r}"
    if adapter.rank > max_rank:
        return f"its rank is {adapter.rank}, and vLLM was started for at most {max_rank}"
    return None


def _misfit(adapter: AdapterFiles, base: Mapping[str, tuple[int, ...]]) -> str | None:
    """The first tensor that is not of the base model's shape."""
    for key, shape in adapter.shapes.items():
        path, _, part = key.removeprefix("base_model.model.").partition(".lora_")
        weight = base.get(f"{path}.weight")
        if weight is None:
            return f"{path} is no layer of the base model"
        mine, theirs = (shape[-1], weight[-1]) if part[0] == "A" else (shape[0], weight[0])
        if mine != theirs:
            return f"{key} is {list(shape)}, and {path}.weight {list(weight)}"
    return None
