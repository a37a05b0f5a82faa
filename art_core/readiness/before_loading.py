"""Refuse a base model at once that would fail after minutes of loading.

In: its folder. Out: nothing, or the typed error. Only what is certain is refused here: weights that
the trainer can't learn on, a model that can't chat, and weights that alone are bigger than the
machine. The doctor says the rest (art-langgraph doctor).
"""

from __future__ import annotations

from pathlib import Path

from art_core.errors import NotEnoughMemory
from art_core.readiness.chat import check_template
from art_core.readiness.limits import check_trainable
from art_core.readiness.machine import look_around
from art_core.readiness.memory import GIB
from art_core.readiness.model_files import read_model
from art_core.readiness.shape import quantisation_of


def check_before_loading(folder: Path) -> None:
    """See that the base model in `folder` can be loaded to be trained on this machine.

    Raises:
        BaseModelError: its weights are quantised, or it has no chat template.
        NotEnoughMemory: its weights are bigger than any memory here.
    """
    files = read_model(folder)
    check_trainable(quantisation_of(files.config))
    machine = look_around()
    biggest = max((machine.memory, *(gpu.total for gpu in machine.gpus)))
    if biggest and files.weight_bytes:
        check_weights(files.weight_bytes, biggest)
    check_template(files, stand_in="")  # which one stands in does not matter here


def check_weights(weights: int, available: int) -> None:
    """See that the weights alone fit; both in bytes.

    Raises:
        NotEnoughMemory: they don't.
    """
    if weights > available:
        raise NotEnoughMemory(
            "this machine has too little memory for the base model",
            got=f"{available / GIB:.1f} GiB",
            expected=f"more than the {weights / GIB:.1f} GiB that its weights alone take",
            fix="Take a smaller model; `art-langgraph doctor --base-model NAME` says what fits.",
        )
