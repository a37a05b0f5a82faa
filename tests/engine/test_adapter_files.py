"""Adapters that vLLM can't carry are refused before they are loaded (case 084 and its kin)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from art_core.engine.adapter_files import (
    CONFIG,
    WEIGHTS,
    AdapterFiles,
    check_servable,
    read_adapter,
    weight_shapes,
    write_null_adapter,
)
from art_core.errors import CheckpointError
from art_core.nn.base_identity import BaseIdentity

Q = "model.layers.0.self_attn.q_proj"
BASE: dict[str, tuple[int, ...]] = {f"{Q}.weight": (8, 8), "model.embed_tokens.weight": (100, 8)}
LORA: dict[str, tuple[int, ...]] = {
    f"base_model.model.{Q}.lora_A.weight": (8, 8),
    f"base_model.model.{Q}.lora_B.weight": (8, 8),
}


def adapter(shapes: dict[str, tuple[int, ...]] = LORA, **config: Any) -> AdapterFiles:
    return AdapterFiles(Path("step"), {"r": 8, "lora_alpha": 16, **config}, shapes)


def check(found: AdapterFiles, max_rank: int = 64) -> None:
    check_servable(found, max_rank=max_rank, base=BASE)


@pytest.mark.parametrize(
    "config",
    [
        {},
        {"bias": "none", "use_dora": False, "rank_pattern": {}, "modules_to_save": None},
        {"base_model_name_or_path": "/another/machine/models/base"},
        {"use_rslora": True},
        {"r": 64},
    ],
    ids=["plain", "as peft writes it", "moved base", "rank-stabilised", "rank 64"],
)
def test_plain_lora_is_served(config: dict[str, Any]) -> None:
    check(adapter(**config))


@pytest.mark.parametrize(
    ("config", "why"),
    [
        ({"modules_to_save": ["lm_head"]}, r"whole layers in it, modules_to_save=\['lm_head'\]"),
        ({"use_dora": True}, "use_dora=True"),
        ({"bias": "all"}, "bias='all'"),
        ({"lora_bias": True}, "lora_bias=True"),
        ({"layer_replication": [[0, 2]]}, "layer_replication="),
        ({"trainable_token_indices": [5]}, "trainable_token_indices="),
        ({"r": 65}, "smaller rank.*got 65, expected at most 64. Set VllmConfig"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_what_vllm_would_leave_out_is_refused(config: dict[str, Any], why: str) -> None:
    with pytest.raises(CheckpointError, match=why):
        check(adapter(**config))


@pytest.mark.parametrize("layer", ["lm_head", "model.embed_tokens"])
def test_a_changed_head_or_embedding_is_refused(layer: str) -> None:
    shapes = {**LORA, f"base_model.model.{layer}.lora_A.weight": (8, 8)}
    with pytest.raises(CheckpointError, match=f"the embedding or the head .*{layer}"):
        check(adapter(shapes))


def test_another_shape_is_refused_with_both() -> None:
    wide: dict[str, tuple[int, ...]] = {
        name: (8, 16) if "lora_A" in name else (16, 8) for name in LORA
    }
    with pytest.raises(CheckpointError, match=rf"lora_A.weight is \[8, 16\], and {Q}.*\[8, 8\]"):
        check(adapter(wide))


def test_an_adapter_of_another_base_of_the_same_shape_is_refused() -> None:
    own = adapter(base_model_name_or_path="Org/One")
    for name in ("Org/One", "Mirror/One"):
        check_servable(own, max_rank=64, base=BASE, identity=BaseIdentity(name, None))
    with pytest.raises(CheckpointError, match="another base model: got 'Org/One', expected Org/Tw"):
        check_servable(own, max_rank=64, base=BASE, identity=BaseIdentity("Org/Two", None))


def test_the_rank_is_the_largest_of_any_layer() -> None:
    assert adapter(rank_pattern={"layers.0": 64}).rank == 64


def test_an_adapter_of_zeros_reads_back_and_is_served(tmp_path: Path) -> None:
    """safetensors reads it too: two tensors of rank 1, all zero."""
    numpy = pytest.importorskip("safetensors.numpy", reason="safetensors is not installed")
    write_null_adapter(tmp_path / "null", BASE)
    found = read_adapter(tmp_path / "null")
    assert found.rank == 1
    check(found)
    tensors = numpy.load_file(tmp_path / "null" / WEIGHTS)
    assert {name: tensor.shape for name, tensor in tensors.items()} == found.shapes
    assert all(not tensor.any() for tensor in tensors.values())


def test_shapes_of_a_base_model_are_read_unless_it_is_quantised(tmp_path: Path) -> None:
    write_null_adapter(tmp_path / "base", BASE)
    (tmp_path / "base" / "config.json").write_text("{}")
    assert set(weight_shapes(tmp_path / "base").values()) == {(1, 8), (8, 1)}
    (tmp_path / "base" / "config.json").write_text('{"quantization_config": {}}')
    assert weight_shapes(tmp_path / "base") == {}


@pytest.mark.parametrize(
    ("config", "weights"),
    [
        (None, b""),
        ("{", b""),
        ("[]", b""),
        ('{"r": "many"}', b""),
        (json.dumps({"r": 8}), None),
        (json.dumps({"r": 8}), b""),
        (json.dumps({"r": 8}), b"\xff" * 30),
        (json.dumps({"r": 8}), b"\x04\0\0\0\0\0\0\0null"),
    ],
)
def test_a_folder_that_is_no_adapter_is_an_error(
    tmp_path: Path, config: str | None, weights: bytes | None
) -> None:
    if config is not None:
        (tmp_path / CONFIG).write_text(config)
    if weights is not None:
        (tmp_path / WEIGHTS).write_bytes(weights)
    with pytest.raises(CheckpointError, match="adapter can't be read"):
        read_adapter(tmp_path)
