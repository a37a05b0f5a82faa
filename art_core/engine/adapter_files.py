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

from art_core.errors import CheckpointError
from art_core.nn.base_identity import BaseIdentity, check_base

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"

_HEADS = ("lm_head", "embed_tokens", "wte", "embed_out")
_LINEAR = ("q_proj.weight", "o_proj.weight", "down_proj.weight", "query_key_value.weight")
_PLAIN: dict[str, tuple[Any, ...]] = {
    "use_dora": (None, False),
    "lora_bias": (None, False),
    "bias": (None, "none"),
    "use_qalora": (None, False),
    "alora_invocation_tokens": (None, []),
    "layer_replication": (None, []),
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
        shapes = _shapes(folder / WEIGHTS)
    except (OSError, ValueError, LookupError, TypeError, MemoryError, OverflowError) as error:
        raise CheckpointError(
            f"adapter can't be read ({error})",
            got=str(folder),
            expected=f"{CONFIG} and {WEIGHTS}",
            fix="Choose another step.",
        ) from error
    return AdapterFiles(folder, config, shapes)


def weight_shapes(base: Path) -> dict[str, tuple[int, ...]]:
    """Shapes of the weights in a base model's folder, by name; none if they are quantised."""
    config = json.loads((base / "config.json").read_text("utf-8"))
    if "quantization_config" in config:
        return {}
    shapes: dict[str, tuple[int, ...]] = {}
    for path in sorted(base.glob("*.safetensors")):
        shapes |= _shapes(path)
    return shapes


def write_null_adapter(folder: Path, base: Mapping[str, tuple[int, ...]]) -> None:
    """Write an adapter into `folder` that changes nothing: rank 1 and all zero, on one layer.

    Args:
        base: shapes of the base model's weights.

    Raises:
        CheckpointError: no layer is known to take one.
    """
    layers = [name for name in base if name.endswith(_LINEAR)]
    if not layers:
        raise CheckpointError(
            "the base model has no layer that is known to take an adapter",
            got=sorted(base)[:3],
            expected=f"weights that end in one of {_LINEAR}",
            fix="Serve it with the embedded engine.",
        )
    layer, (wide, deep) = layers[0].removesuffix(".weight"), base[layers[0]]
    folder.mkdir(parents=True)
    config = {"peft_type": "LORA", "r": 1, "lora_alpha": 1, "bias": "none"}
    config["target_modules"] = [layer.rpartition(".")[2]]
    (folder / CONFIG).write_text(json.dumps(config), "utf-8")
    header, end = {}, 0
    for part, shape in (("A", (1, deep)), ("B", (wide, 1))):
        size = 4 * shape[0] * shape[1]
        header[f"base_model.model.{layer}.lora_{part}.weight"] = {
            "dtype": "F32",
            "shape": shape,
            "data_offsets": (end, end + size),
        }
        end += size
    text = json.dumps(header).encode()
    (folder / WEIGHTS).write_bytes(len(text).to_bytes(8, "little") + text + bytes(end))


def check_servable(
    adapter: AdapterFiles,
    *,
    max_rank: int,
    base: Mapping[str, tuple[int, ...]] | None = None,
    identity: BaseIdentity | None = None,
) -> None:
    """Whether vLLM serves the adapter as it was trained.

    Args:
        max_rank: what vLLM was started with.
        base: shapes of the base model's weights by name, to compare with; None: not compared.
        identity: which base model it is; None: not compared.

    Raises:
        CheckpointError: it would leave something out, or can't load it; or the adapter was trained
            on another base model.
    """
    if identity is not None:
        check_base(adapter.folder, adapter.base, identity)
    if adapter.rank > max_rank:
        raise CheckpointError(
            f"vLLM was started for adapters of a smaller rank than {adapter.folder} has",
            got=adapter.rank,
            expected=f"at most {max_rank}",
            fix="Set VllmConfig(max_rank=...) to the largest that is served, or register the model "
            "of the largest rank first.",
        )
    fault = _fault(adapter) or (_misfit(adapter, base) if base else None)
    if fault is not None:
        raise CheckpointError(
            f"vLLM can't serve adapter {adapter.folder} as it was trained: {fault}",
            fix="Train plain LoRA on linear layers, or serve it with the embedded engine.",
        )


def _shapes(path: Path) -> dict[str, tuple[int, ...]]:
    """Of the tensors in a safetensors file: eight bytes of length N, then N of JSON."""
    with path.open("rb") as file:
        header = json.loads(file.read(int.from_bytes(file.read(8), "little")))
    if not isinstance(header, dict):
        raise TypeError(f"{path.name} has no header")
    return {name: tuple(e["shape"]) for name, e in header.items() if name != "__metadata__"}


def _fault(adapter: AdapterFiles) -> str | None:
    config = adapter.config
    if saved := config.get("modules_to_save"):
        return f"it has whole layers in it, modules_to_save={saved!r}"
    names = [key for key in adapter.shapes if any(f".{head}." in f".{key}" for head in _HEADS)]
    if names:
        return f"it changes the embedding or the head ({names[0]})"
    for name, allowed in _PLAIN.items():
        if config.get(name) not in allowed:
            return f"{name}={config[name]!r}"
    return None


def _misfit(adapter: AdapterFiles, base: Mapping[str, tuple[int, ...]]) -> str | None:
    """The first tensor that is not of the base model's shape."""
    for key, shape in adapter.shapes.items():
        path, _, part = key.removeprefix("base_model.model.").partition(".lora_")
        weight = base.get(f"{path}.weight")
        if weight is None:  # files may name layers otherwise than the model in memory does
            continue
        mine, theirs = (shape[-1], weight[-1]) if part[0] == "A" else (shape[0], weight[0])
        if mine != theirs:
            return f"{key} is {list(shape)}, and {path}.weight {list(weight)}"
    return None
