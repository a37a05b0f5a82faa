"""Refuse a base model at once that would fail after minutes of loading.

In: its folder. Out: nothing, or the typed error. Only what is certain is refused here: weights that
the trainer can't learn on, and weights that alone are bigger than the machine. The doctor says the
rest (art-langgraph doctor).
"""

from __future__ import annotations

from pathlib import Path

from art_core.errors import NotEnoughMemory
from art_core.readiness.limits import check_trainable
from art_core.readiness.machine import look_around
from art_core.readiness.memory import GIB, weight_bytes
from art_core.readiness.model_files import read_model
from art_core.readiness.shape import Shape, shape_of
from art_core.readiness.sizes import sizes_of


def check_before_loading(folder: Path) -> None:
    """See that the base model in `folder` can be loaded to be trained on this machine.

    Raises:
        BaseModelError: its weights are quantised, or it is no language model.
        NotEnoughMemory: its weights are bigger than any memory here.
    """
    shape = shape_of(read_model(folder).config)
    check_trainable(shape)
    machine = look_around()
    biggest = max((machine.memory, *(gpu.total for gpu in machine.gpus)))
    if biggest:
        check_weights(shape, biggest)


def check_weights(shape: Shape, available: int) -> None:
    """See that the weights alone fit.

    Args:
        available: bytes.

    Raises:
        NotEnoughMemory: they don't.
    """
    sizes = sizes_of(shape)
    if sizes is None or (weights := weight_bytes(shape, sizes)) <= available:
        return
    raise NotEnoughMemory(
        "this machine has too little memory for the base model",
        got=f"{available / GIB:.1f} GiB",
        expected=f"more than {weights / GIB:.1f} GiB, which its weights alone take in 16 bits",
        fix="Take a smaller model; `art-langgraph doctor --base-model NAME` says what fits.",
    )
