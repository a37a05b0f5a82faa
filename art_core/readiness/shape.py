"""The shape of a base model, from its config alone.

In: `config.json` as a mapping. Out: `Shape`: sizes of layers, heads and vocabulary, kinds of
layers, context, quantisation. Left out: how much memory that makes (sizes.py, memory.py), and how
the model computes (nn/sketch.py).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from art_core.errors import BaseModelError

_SLIDING, _FULL = "sliding_attention", "full_attention"
_BITS = {
    "awq": 4,
    "gptq": 4,
    "bitsandbytes": 4,
    "mxfp4": 4,
    "fp8": 8,
    "fbgemm_fp8": 8,
    "finegrained_fp8": 8,
    "modelopt": 4,
    "compressed-tensors": 8,
}
"""Bits a weight of a method that does not say."""


@dataclass(frozen=True)
class Quantisation:
    """How stored weights are made smaller."""

    method: str
    """As `quant_method` names it: "awq", "fp8", ..."""
    bits: int
    """A weight, about."""


@dataclass(frozen=True)
class Shape:
    """Sizes that memory depends on."""

    architecture: str
    model_type: str
    hidden: int
    layers: tuple[str, ...]
    """The kind of each layer: "full_attention", "sliding_attention", "linear_attention", ..."""
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    vocabulary: int
    context: int
    """Positions that the config promises."""
    window: int | None
    """Positions that a sliding layer looks back."""
    tied: bool
    """True if the output head is the embedding."""
    quantisation: Quantisation | None
    sees_images: bool
    """True if it has a vision part, which is not counted in any size here."""
    text: Mapping[str, Any]
    """The part of the config that describes the language model."""


def shape_of(config: Mapping[str, Any], whole: Mapping[str, Any] | None = None) -> Shape:
    """Read a config.

    Args:
        whole: the language model's part with the defaults of its kind, where that is known; some
            models leave out most of it.

    Raises:
        BaseModelError: it is not that of a decoder-only language model.
    """
    text: Mapping[str, Any] = {**(config.get("text_config") or config), **(whole or {})}
    hidden = _positive(text, "hidden_size", "n_embd", "d_model")
    layers = _positive(text, "num_hidden_layers", "n_layer", "n_layers")
    heads = _positive(text, "num_attention_heads", "n_head", "n_heads")
    window = text.get("sliding_window") if text.get("use_sliding_window", True) else None
    kinds = _kinds(text, layers, window)
    return Shape(
        architecture=str((config.get("architectures") or ["unknown"])[0]),
        model_type=str(config.get("model_type", "unknown")),
        hidden=hidden,
        layers=kinds,
        heads=heads,
        kv_heads=text.get("num_key_value_heads") or heads,
        head_dim=text.get("head_dim") or hidden // heads,
        intermediate=text.get("intermediate_size") or text.get("n_inner") or 4 * hidden,
        vocabulary=_positive(text, "vocab_size"),
        context=_positive(text, "max_position_embeddings", "n_positions", "max_seq_len"),
        window=window if _SLIDING in kinds else None,
        tied=bool(_tied(config, text)),
        quantisation=quantisation_of(config),
        sees_images="vision_config" in config,
        text=text,
    )


def quantisation_of(config: Mapping[str, Any]) -> Quantisation | None:
    """How the weights are quantised; None: they are not."""
    for where in (config, config.get("text_config") or {}):
        found = where.get("quantization_config") or where.get("compression_config")
        if isinstance(found, Mapping):
            method = str(found.get("quant_method", "unknown"))
            return Quantisation(method, _bits(method, found))
    mlx = config.get("quantization")
    if isinstance(mlx, Mapping):
        return Quantisation("mlx", int(mlx.get("bits", 4)))
    return None


def _kinds(text: Mapping[str, Any], layers: int, window: int | None) -> tuple[str, ...]:
    listed = text.get("layer_types")
    if isinstance(listed, list) and len(listed) == layers:
        return tuple(str(kind) for kind in listed)
    every = text.get("sliding_window_pattern") or text.get("_sliding_window_pattern")
    if window and every:
        return tuple(_FULL if (i + 1) % every == 0 else _SLIDING for i in range(layers))
    return (_SLIDING if window else _FULL,) * layers


def _tied(config: Mapping[str, Any], text: Mapping[str, Any]) -> bool:
    said = text.get("tie_word_embeddings", config.get("tie_word_embeddings"))
    # transformers ties where the config says nothing, but for those kinds whose class unties
    return text.get("model_type", "").startswith("gemma") if said is None else bool(said)


def _bits(method: str, found: Mapping[str, Any]) -> int:
    if method == "bitsandbytes":
        return 8 if found.get("load_in_8bit") else 4
    for key in ("bits", "w_bit", "num_bits"):
        if isinstance(found.get(key), int):
            return int(found[key])
    for group in (found.get("config_groups") or {}).values():
        bits = ((group or {}).get("weights") or {}).get("num_bits")
        if isinstance(bits, int):
            return bits
    return _BITS.get(method, 16)


def _positive(text: Mapping[str, Any], *names: str) -> int:
    for name in names:
        value = text.get(name)
        if isinstance(value, int) and value > 0:
            return value
    raise BaseModelError(
        f"config.json has no usable {names[0]!r}",
        got=text.get(names[0]),
        expected="the config of a decoder-only language model",
        fix="Choose a model that generates text.",
    )
