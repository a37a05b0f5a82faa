"""The frozen weights of linear layers, as a product on a GPU wants them.

In: layers that read the same input: torch's own, or bitsandbytes' of 4 bits (NF4, QLoRA). Out: one
matrix for all of them. Dense weights are laid together once, in place. Weights of 4 bits stay as
they are and are made dense for as long as one product takes: at most one matrix at a time exists.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from art_core.nn.triton_here import has_triton


class Frozen(Protocol):
    """Weights below each other."""

    is_packed: bool
    """Making them dense takes memory, so nobody may hold on to what `dense` gave."""

    def dense(self, dtype: torch.dtype) -> Tensor:
        """[o, i], in the dtype of what it is multiplied with."""
        ...


@dataclass(frozen=True, eq=False)
class Dense:
    """Weights as they are."""

    weight: Tensor
    is_packed = False

    def dense(self, dtype: torch.dtype) -> Tensor:
        return self.weight


@dataclass(frozen=True, eq=False)
class Packed:
    """Weights of 4 bits, each with scales of its own."""

    layers: Sequence[Any]
    """bitsandbytes' `Linear4bit`."""
    is_packed = True

    def dense(self, dtype: torch.dtype) -> Tensor:
        first = self.layers[0]
        outputs = sum(layer.out_features for layer in self.layers)
        made = first.weight.quant_state.dtype  # what it was packed from
        found = torch.empty(outputs, first.in_features, dtype=made, device=first.weight.device)
        parts = found.split([layer.out_features for layer in self.layers])
        for layer, part in zip(self.layers, parts, strict=True):
            _unpack(layer.weight, part)
        return found.to(dtype)


def is_linear(layer: object) -> bool:
    """Whether it is a layer whose weight `frozen` can give."""
    return type(layer) is nn.Linear or is_four_bit(layer)


def is_four_bit(layer: object) -> bool:
    """Told without importing bitsandbytes, which may not be there."""
    kind = type(layer)
    return kind.__name__ == "Linear4bit" and kind.__module__.startswith("bitsandbytes.")


def frozen(layer: Any) -> Frozen:
    """The weight of one layer."""
    return Packed([layer]) if is_four_bit(layer) else Dense(layer.weight)


def laid_together(layers: Sequence[Any]) -> Frozen | None:
    """The weights of all, which keep working: dense ones become parts of the joined one, so no
    memory is lost. None where they are of two kinds."""
    if all(is_four_bit(layer) for layer in layers):
        return Packed(layers)
    if any(type(layer) is not nn.Linear for layer in layers):
        return None
    weight = torch.cat([layer.weight.detach() for layer in layers])
    parts = weight.split([layer.out_features for layer in layers])
    for layer, part in zip(layers, parts, strict=True):
        layer.weight.data = part
    return Dense(weight)


def _unpack(packed: Any, place: Tensor) -> None:
    """Write a weight of 4 bits out into `place` [o, i]."""
    state = packed.quant_state
    if place.device.type == "cuda" and has_triton():
        from art_core.nn import nf4_kernel

        if nf4_kernel.can_unpack(state):
            nf4_kernel.unpack(packed.data, state, place)
            return
    from bitsandbytes.functional import dequantize_4bit

    place.copy_(dequantize_4bit(packed.data, state))
