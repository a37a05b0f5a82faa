"""An adapter whose layers have ranks or scales of their own, written with one scale for all.

In: a folder in peft's format with `rank_pattern` or `alpha_pattern`. Out: a folder with the same
function in which each layer's scale is part of its B, so that a server need not know of patterns:
vLLM 0.25.1 scales every layer by lora_alpha / r. Numpy alone; the rest of the weights is copied.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from art_core.errors import CheckpointError

_PATTERNS = ("rank_pattern", "alpha_pattern")


def has_patterns(config: Mapping[str, Any]) -> bool:
    """True if its layers may differ in rank or scale."""
    return any(config.get(name) for name in _PATTERNS)


def fold(config: Mapping[str, Any], weights: bytes) -> tuple[dict[str, Any], bytes]:
    """(settings, weights file) of the same adapter without patterns, scaled by 1.

    Args:
        config: `adapter_config.json`.
        weights: the safetensors file.

    Raises:
        CheckpointError: its weights are neither of 16 nor of 32 bits.
    """
    size = 8 + int.from_bytes(weights[:8], "little")
    header = json.loads(weights[8:size])
    data = bytearray(weights[size:])
    ranks = {
        name.removesuffix("lora_A.weight"): int(entry["shape"][0])
        for name, entry in header.items()
        if name.endswith(".lora_A.weight")
    }
    for layer, rank in ranks.items():
        entry = header[layer + "lora_B.weight"]
        start, end = entry["data_offsets"]
        scale = _alpha(config, layer) / (rank**0.5 if config.get("use_rslora") else rank)
        data[start:end] = _scaled(bytes(data[start:end]), entry["dtype"], scale)
    largest = max(ranks.values(), default=int(config["r"]))
    settings = {**config, "r": largest, "lora_alpha": largest, "use_rslora": False}
    return {**settings, **{name: {} for name in _PATTERNS}}, weights[:size] + bytes(data)


def fold_into(source: tuple[Path, Path], target: tuple[Path, Path]) -> None:
    """As `fold`, from files to files; each pair is (settings, weights)."""
    config = json.loads(source[0].read_text("utf-8"))
    settings, weights = fold(config, source[1].read_bytes())
    target[0].write_text(json.dumps(settings), "utf-8")
    target[1].write_bytes(weights)


def _alpha(config: Mapping[str, Any], layer: str) -> float:
    """Of a layer, by the first pattern that its name ends with, as peft looks."""
    name = layer.removeprefix("base_model.model.").removesuffix(".")
    for pattern, alpha in (config.get("alpha_pattern") or {}).items():
        if re.match(rf"(.*\.)?({pattern})$", name):
            return float(alpha)
    return float(config["lora_alpha"])


def _scaled(data: bytes, dtype: str, scale: float) -> bytes:
    """Numbers in safetensors' `dtype`, times `scale`, rounded to it."""
    if dtype == "BF16":
        wide = (np.frombuffer(data, "<u2").astype(np.uint32) << 16).view(np.float32)
        bits = (wide * np.float32(scale)).astype(np.float32).view(np.uint32)
        even = (bits >> np.uint32(16)) & np.uint32(1)
        rounded = (bits + np.uint32(0x7FFF) + even) >> np.uint32(16)
        return rounded.astype("<u2").tobytes()
    kind = {"F32": "<f4", "F16": "<f2"}.get(dtype)
    if kind is None:
        raise CheckpointError(
            "an adapter's weights can't be scaled",
            got=dtype,
            expected="F32, BF16 or F16",
            fix="Save it in one of these.",
        )
    values = np.frombuffer(data, kind).astype(np.float32) * np.float32(scale)
    return values.astype(kind).tobytes()
