"""How many decoder layers may keep what they computed of a row; the others compute it again.

In: bytes, or a base model's settings. Out: a number of layers, or whether any may. It imports
nothing heavy, so that who plans a step and who computes it go by the same rules.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

KEPT_SHARE = 0.7
"""Of the memory that is free when a row begins: what layers may keep of it."""
_USABLE_SHARE = 0.9
"""What they may take with the inputs of those that forget, and one that computes again."""


def layers_that_keep(room: int, layer: int, inputs: int, layers: int) -> int:
    """The layers, of `layers`, that keep what they computed.

    Args:
        room: bytes that are free when the row begins.
        layer: bytes that a layer keeps of the row.
        inputs: bytes that one keeps which computes the rest again.
    """
    most = min(layers, int(KEPT_SHARE * room / max(layer, 1)))
    if most == layers or layer <= inputs:
        return most
    beside = layers * inputs + layer
    return max(0, min(most, int((_USABLE_SHARE * room - beside) / (layer - inputs))))


def drops_out(config: Mapping[str, Any]) -> bool:
    """Whether layers drop numbers at random while they are trained. Such layers keep all: they
    forget only where they believe to be trained, and would then drop out, too."""
    return any(
        "drop" in name and isinstance(value, int | float) and value > 0
        for name, value in config.items()
    )
