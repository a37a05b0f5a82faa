"""How many weights a base model has, from its shape.

In: `Shape`. Out: `Sizes`: all weights, those of matrices that can be kept in 4 bits, and what an
adapter adds a rank. Left out: kinds with layers of forms not known here (latent attention, state
spaces): for those nothing is said rather than something wrong.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from art_core.readiness.shape import Shape

_UNKNOWN = ("kv_lora_rank", "state_size", "ssm_state_size", "mamba_d_state", "conv_L_cache")
"""Settings of layers whose forms are not known here."""
_UNGATED = {"phi", "gpt_neox", "gpt2", "starcoder2", "opt", "bloom", "falcon", "gptj", "nemotron"}
"""Kinds whose feed-forward part has two matrices, not three."""
_BIASED = {"qwen2", "qwen2_moe", "phi", "starcoder2", "gpt_neox"}
"""Kinds whose queries, keys and values have a bias that no setting names."""
_NORMED_HEADS = ("qwen3", "gemma3", "olmo2", "olmo3")


@dataclass(frozen=True)
class Sizes:
    """Numbers of weights."""

    total: int
    matrices: int
    """Of linear layers, without embedding and head: what 4-bit loading makes smaller."""
    experts: int
    """Of `matrices`: those of experts, which take no adapter."""
    adapter_per_rank: int
    """Weights of an adapter of rank 1 on every linear layer."""


@dataclass(frozen=True)
class _Layer:
    matrices: int
    experts: int
    rank: int
    """Inputs and outputs of the linear layers that take an adapter."""
    rest: int
    """Norms, biases, convolutions."""


def sizes_of(shape: Shape) -> Sizes | None:
    """Count; None if the shape has layers that are not known here."""
    if any(shape.text.get(name) for name in _UNKNOWN):
        return None
    if not set(shape.layers) <= {"full_attention", "sliding_attention", "linear_attention"}:
        return None
    layers = [_layer(shape, kind, i) for i, kind in enumerate(shape.layers)]
    embedding = shape.vocabulary * shape.hidden * (1 if shape.tied else 2)
    matrices = sum(layer.matrices for layer in layers)
    return Sizes(
        total=embedding + matrices + sum(layer.rest for layer in layers) + shape.hidden,
        matrices=matrices,
        experts=sum(layer.experts for layer in layers),
        adapter_per_rank=sum(layer.rank for layer in layers),
    )


def _layer(shape: Shape, kind: str, index: int) -> _Layer:
    mixing, small = _linear(shape) if kind == "linear_attention" else _attention(shape)
    dense, experts, more = _feed_forward(shape, index)
    linears = [*mixing, *dense]
    norms = 4 if shape.model_type.startswith(("gemma2", "gemma3")) else 2
    return _Layer(
        matrices=sum(i * o for i, o in linears) + experts,
        experts=experts,
        rank=sum(i + o for i, o in linears),
        rest=small + more + norms * shape.hidden,
    )


def _attention(shape: Shape) -> tuple[list[tuple[int, int]], int]:
    """([(inputs, outputs)], weights that are no matrix)."""
    hidden, text = shape.hidden, shape.text
    queries, keys = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    asked = queries * (2 if text.get("attn_output_gate") else 1)
    biased = text.get("attention_bias") or shape.model_type in _BIASED
    small = asked + 2 * keys if biased else 0
    if text.get("attention_bias"):
        small += hidden
    if shape.model_type.startswith(_NORMED_HEADS):
        small += 2 * shape.head_dim
    if shape.model_type == "gpt_oss":
        small += shape.heads  # sinks
    return [(hidden, asked), (hidden, keys), (hidden, keys), (queries, hidden)], small


def _linear(shape: Shape) -> tuple[list[tuple[int, int]], int]:
    """A gated delta layer (Yang et al. 2024, arXiv:2412.06464), as in Qwen3-Next and Qwen3.5."""
    text, hidden = shape.text, shape.hidden
    heads = text["linear_num_value_heads"]
    keys = text["linear_num_key_heads"] * text["linear_key_head_dim"]
    values = heads * text["linear_value_head_dim"]
    mixed = 2 * keys + values
    linears = [
        (hidden, mixed),
        (hidden, values),
        (hidden, heads),
        (hidden, heads),
        (values, hidden),
    ]
    small = mixed * text["linear_conv_kernel_dim"] + 2 * heads + text["linear_value_head_dim"]
    return linears, small


def _feed_forward(shape: Shape, index: int) -> tuple[list[tuple[int, int]], int, int]:
    """([(inputs, outputs)], weights of experts, weights that are no matrix)."""
    text, hidden = shape.text, shape.hidden
    count = _first(text, "num_local_experts", "num_experts", "n_routed_experts")
    if not count or index in (text.get("mlp_only_layers") or ()):
        return _gated(shape, shape.intermediate), 0, 0
    width = text.get("moe_intermediate_size") or shape.intermediate
    experts = count * 3 * hidden * width
    shared = text.get("shared_expert_intermediate_size") or 0
    dense = _gated(shape, shared) if shared else []
    more = count * hidden + (hidden if shared else 0)  # the router, the gate of the shared one
    if shape.model_type == "gpt_oss":
        more += count * (2 * width + hidden) + count  # biases of experts and router
    return dense, experts, more


def _gated(shape: Shape, width: int) -> list[tuple[int, int]]:
    up = [(shape.hidden, width)] * (1 if shape.model_type in _UNGATED else 2)
    return [*up, (width, shape.hidden)]


def _first(text: Mapping[str, Any], *names: str) -> int:
    return next((int(text[name]) for name in names if text.get(name)), 0)
