"""How much memory a base model needs: to be served, and to be trained at a length.

In: shape and sizes, how long calls are, how many at once, the adapter's rank. Out: `Need`s, each a
sum of named parts. Estimates: weights, adapters, keys and values are counted; what a layer keeps
for the backward pass is a formula that meets what was measured: on an H200 (Qwen3-0.6B, a row of
16,368 positions) 22.4 GB kept, 22.5 by the formula; on a processor (SmolLM2-135M, a row of about
3,900) 5.2 GiB in all, 5.4 by the formula. What programs take for themselves is a constant.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from art_core.readiness.shape import Shape
from art_core.readiness.sizes import Sizes

GIB = 2**30

Way = Literal["serve", "serve 4-bit", "train", "train 4-bit", "embedded"]

_BRAIN, _SINGLE = 2, 4
"""Bytes of a number in bfloat16, in float32."""
_NF4 = 4.127 / 8
"""Bytes of a weight in 4 bits with its scales, which are quantised too (Dettmers et al. 2023,
arXiv:2305.14314, section 3)."""
_LEARNED = 16
"""Bytes of a trained number: itself, its gradient, two moments, in float32."""
_SERVER = 2 * GIB
"""Of vLLM: CUDA's context, graphs, workspaces."""
_TRAINER = 1 * GIB
_CPU_PROCESS = GIB // 2
_PREFILL = 8192
"""Positions that vLLM computes at once (its `max_num_batched_tokens`)."""
_SLOTS = 2
"""Adapters in vLLM at once: the step that answers, and the next one."""
_LOGITS = 0.02
"""Of one full tensor of logits: what the loss needs beyond (benchmarks/RESULTS.md: 0.017)."""


@dataclass(frozen=True)
class Load:
    """What is asked of the model."""

    length: int = 4096
    """Tokens of a call, prompt and answer; also positions of a row in training."""
    calls: int = 16
    """Calls of that length answered at once."""
    rank: int = 8
    """Of the adapter."""
    cached: int = 40_000
    """Positions that the embedded engine keeps (`EngineConfig.cache_tokens`)."""


@dataclass(frozen=True)
class Need:
    """Memory for one way of using a model."""

    way: Way
    parts: Mapping[str, int]
    """Bytes by what they are for."""
    least: int
    """Bytes, where layers compute again instead of keeping; else as `total`."""

    @property
    def total(self) -> int:
        """Bytes, with nothing computed twice."""
        return sum(self.parts.values())


def needs(shape: Shape, sizes: Sizes, load: Load) -> list[Need]:
    """Of every way."""
    found = [_serving("serve", shape, sizes, load)]
    if shape.quantisation is None:
        found.append(_serving("serve 4-bit", shape, sizes, load))
    found.append(_training("train", _weights(sizes, _BRAIN), shape, sizes, load))
    found.append(_training("train 4-bit", _small_weights(sizes), shape, sizes, load))
    found.append(_embedded(shape, sizes, load))
    return found


def kv_bytes(shape: Shape, *, number: int = _BRAIN) -> int:
    """Bytes of keys and values a position, in layers that keep all positions or a window."""
    attending = sum(kind != "linear_attention" for kind in shape.layers)
    return 2 * attending * shape.kv_heads * shape.head_dim * number


def weight_bytes(shape: Shape, sizes: Sizes) -> int:
    """Bytes of the weights as they are stored, 16 bits a number where nothing else is said."""
    if shape.quantisation is None:
        return _weights(sizes, _BRAIN)
    small = sizes.matrices * shape.quantisation.bits // 8
    return small + (sizes.total - sizes.matrices) * _BRAIN


def _weights(sizes: Sizes, number: int) -> int:
    return sizes.total * number


def _small_weights(sizes: Sizes) -> int:
    """In 4 bits, but for experts, which bitsandbytes leaves as they are, embedding and head."""
    small = sizes.matrices - sizes.experts
    return int(small * _NF4) + (sizes.total - small) * _BRAIN


def _serving(way: Way, shape: Shape, sizes: Sizes, load: Load) -> Need:
    weights = weight_bytes(shape, sizes)
    if way == "serve 4-bit":
        weights = sizes.matrices * 9 // 16 + (sizes.total - sizes.matrices) * _BRAIN
    working = _PREFILL * _BRAIN * (4 * shape.hidden + 2 * _widest(shape))
    parts = {
        "weights": weights,
        "adapters": _SLOTS * sizes.adapter_per_rank * max(load.rank, 8) * _BRAIN,
        "keys and values": load.calls * _kept(shape, load.length, _BRAIN),
        "vLLM itself": _SERVER + working,
    }
    return Need(way, parts, least=sum(parts.values()) - (load.calls - 1) * _one_call(shape, load))


def _one_call(shape: Shape, load: Load) -> int:
    return _kept(shape, load.length, _BRAIN)


def _kept(shape: Shape, length: int, number: int) -> int:
    """Bytes that a call's past takes: all of it, a window of it, or a state."""
    pair = 2 * shape.kv_heads * shape.head_dim * number
    seen = {"sliding_attention": min(length, shape.window or length), "linear_attention": 0}
    return sum(pair * seen.get(kind, length) for kind in shape.layers) + _state(shape)


def _state(shape: Shape) -> int:
    """Bytes of the states of linear layers, in float32, whatever the length."""
    count = shape.layers.count("linear_attention")
    if not count:
        return 0
    text = shape.text
    state = text["linear_num_value_heads"] * (
        text["linear_key_head_dim"] * text["linear_value_head_dim"]
    )
    return int(count * state * _SINGLE)


def _training(way: Way, weights: int, shape: Shape, sizes: Sizes, load: Load) -> Need:
    layer = _activations(shape) * load.length * _BRAIN
    parts = {
        "weights": weights,
        "adapter and optimizer": sizes.adapter_per_rank * load.rank * _LEARNED,
        "kept for the backward pass": layer * len(shape.layers),
        "loss": int(_LOGITS * load.length * shape.vocabulary * _SINGLE),
        "the program": _TRAINER,
    }
    inputs = shape.hidden * load.length * _BRAIN * len(shape.layers)
    again = parts["kept for the backward pass"] - (inputs + layer)
    return Need(way, parts, least=sum(parts.values()) - max(0, again))


def _embedded(shape: Shape, sizes: Sizes, load: Load) -> Need:
    parts = {
        "weights": _weights(sizes, _SINGLE),
        "adapter and optimizer": sizes.adapter_per_rank * load.rank * _LEARNED,
        "keys and values": load.cached * kv_bytes(shape, number=_SINGLE),
        "kept for the backward pass": _activations(shape)
        * load.length
        * _SINGLE
        * len(shape.layers),
        "loss": int(_LOGITS * load.length * shape.vocabulary * _SINGLE),
        "the program": _CPU_PROCESS,
    }
    return Need("embedded", parts, least=sum(parts.values()))


def _activations(shape: Shape) -> int:
    """Numbers that a layer keeps for a position: its two norms and their results, queries and keys
    before and after their rotation, values, what attention gives, and the gated part three times.
    """
    queries, keys = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    return 5 * shape.hidden + 3 * queries + 4 * keys + 3 * _widest(shape)


def _widest(shape: Shape) -> int:
    """The width of the gated part that a token goes through."""
    text = shape.text
    chosen = text.get("num_experts_per_tok") or text.get("experts_per_token")
    if chosen:
        each = text.get("moe_intermediate_size") or shape.intermediate
        return int(chosen * each + (text.get("shared_expert_intermediate_size") or 0))
    return shape.intermediate
