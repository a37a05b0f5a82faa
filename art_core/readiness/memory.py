"""How much memory a base model needs: to be served, and to be trained at a length.

In: shape and sizes, how long calls are, how many at once, the adapter's rank. Out: `Need`s, each a
sum of named parts. Estimates: weights, adapters, keys and values are counted; what a step takes is
in step_memory.py; what programs take for themselves is a constant.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from art_core.nn.copying import KINDS, LIMIT_BYTES
from art_core.nn.keeping import drops_out
from art_core.readiness.shape import Shape
from art_core.readiness.sizes import Sizes
from art_core.readiness.step_memory import BRAIN, SINGLE, Step, StepMemory, step_memory, widest

GIB = 2**30

Way = Literal["serve", "serve 4-bit", "train", "train 4-bit", "embedded"]

_NF4 = 4.127 / 8
"""Bytes of a weight in 4 bits with its scales, which are quantised too (Dettmers et al. 2023,
arXiv:2305.14314, section 3)."""
_SERVER = 2 * GIB
"""Of vLLM: CUDA's context, graphs, workspaces."""
_TRAINER = 1 * GIB
_CPU_PROCESS = GIB // 2
_PREFILL = 8192
"""Positions that vLLM computes at once (its `max_num_batched_tokens`)."""
_SLOTS = 2
"""Adapters in vLLM at once: the step that answers, and the next one."""


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
    found.append(_training("train", shape, sizes, load))
    found.append(_training("train 4-bit", shape, sizes, load))
    found.append(_embedded(shape, sizes, load))
    return found


def kv_bytes(shape: Shape, *, number: int = BRAIN) -> int:
    """Bytes of keys and values a position, in layers that keep all positions or a window."""
    attending = sum(kind != "linear_attention" for kind in shape.layers)
    return 2 * attending * shape.kv_heads * shape.head_dim * number


def weight_bytes(shape: Shape, sizes: Sizes) -> int:
    """Bytes of the weights as they are stored, 16 bits a number where nothing else is said."""
    if shape.quantisation is None:
        return _weights(sizes, BRAIN)
    small = sizes.matrices * shape.quantisation.bits // 8
    return small + (sizes.total - sizes.matrices) * BRAIN


def _weights(sizes: Sizes, number: int) -> int:
    return sizes.total * number


def _small_weights(sizes: Sizes) -> int:
    """In 4 bits, but for experts, which bitsandbytes leaves as they are, embedding and head."""
    small = sizes.matrices - sizes.experts
    return int(small * _NF4) + (sizes.total - small) * BRAIN


def _serving(way: Way, shape: Shape, sizes: Sizes, load: Load) -> Need:
    weights = weight_bytes(shape, sizes)
    if way == "serve 4-bit":
        weights = sizes.matrices * 9 // 16 + (sizes.total - sizes.matrices) * BRAIN
    working = _PREFILL * BRAIN * (4 * shape.hidden + 2 * widest(shape))
    parts = {
        "weights": weights,
        "adapters": _SLOTS * sizes.adapter_per_rank * max(load.rank, 8) * BRAIN,
        "keys and values": load.calls * _kept(shape, load.length, BRAIN),
        "vLLM itself": _SERVER + working,
    }
    return Need(way, parts, least=sum(parts.values()) - (load.calls - 1) * _one_call(shape, load))


def _one_call(shape: Shape, load: Load) -> int:
    return _kept(shape, load.length, BRAIN)


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
    return int(count * state * SINGLE)


def training_step(way: Way, shape: Shape, sizes: Sizes, load: Load) -> StepMemory:
    """What a step on a GPU takes, in 16 or in 4 bits."""
    small = way == "train 4-bit"
    return step_memory(
        shape,
        Step(
            row=load.length,
            weights=_small_weights(sizes) if small else _weights(sizes, BRAIN),
            adapter=sizes.adapter_per_rank * load.rank,
            four_bit=small,
            held={"the program": _TRAINER},
        ),
    )


def _training(way: Way, shape: Shape, sizes: Sizes, load: Load) -> Need:
    step = training_step(way, shape, sizes, load)
    least = step.total if drops_out(shape.text) else step.least
    return Need(way, step.parts, least=least)


def _embedded(shape: Shape, sizes: Sizes, load: Load) -> Need:
    step = step_memory(
        shape,
        Step(
            row=load.length,
            weights=_weights(sizes, SINGLE),
            adapter=sizes.adapter_per_rank * load.rank,
            number=SINGLE,
            copied=_copied(shape, sizes),
            held=embedded_engine(shape, load.cached),
        ),
    )
    return Need("embedded", step.parts, least=step.total)  # a processor computes nothing twice


def _copied(shape: Shape, sizes: Sizes) -> int:
    """Bytes of the copy of the weights that a processor computes with; 0: there is none."""
    copy = sizes.matrices * SINGLE
    head = shape.vocabulary * shape.hidden * SINGLE
    known = shape.architecture in [f"{kind}ForCausalLM" for kind in KINDS]
    plain = set(shape.layers) == {"full_attention"}
    return copy if known and plain and copy + head <= LIMIT_BYTES else 0


def embedded_engine(shape: Shape, cached: int) -> dict[str, int]:
    """What the embedded engine holds on a processor beside the weights, and its process.

    Args:
        cached: positions of keys and values that it may keep.
    """
    return {
        "keys and values": cached * kv_bytes(shape, number=SINGLE),
        "the program": _CPU_PROCESS,
    }
