"""What the doctor says of memory: what fits on this machine, and which GPU is enough.

In: what every way of using a model needs, and a machine. Out: rows of a table, and findings.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from art_core.finding import Finding
from art_core.readiness.about_machine import gib
from art_core.readiness.machine import Machine
from art_core.readiness.memory import GIB, Need, Way

CARDS = (8, 12, 16, 24, 32, 48, 80, 96, 141, 192)
"""Memory of GPUs that there are, in GiB."""
_USABLE = 0.92
"""Of a GPU's memory: the rest is the driver's, and in pieces."""
_WORDS: dict[Way, str] = {
    "serve": "serve by vLLM",
    "serve 4-bit": "serve by vLLM, 4 bits",
    "train": "train, 16 bits",
    "train 4-bit": "train, 4 bits",
    "embedded": "both on a processor",
}


@dataclass(frozen=True)
class Row:
    """A way of using the model."""

    way: Way
    what: str
    least: int
    """Bytes: one call at a time, layers computed again."""
    most: int
    """Bytes: all calls at once, nothing computed twice."""
    fits: bool | None
    """Whether `least` fits here; None: there is no such device here."""
    card: int | None
    """GiB of the smallest GPU that `least` fits on; None: none, or it is not for a GPU."""


def rows(needs: Sequence[Need], machine: Machine) -> list[Row]:
    """A row for each need."""
    return [_row(need, machine) for need in needs]


def about_memory(table: Sequence[Row], machine: Machine) -> list[Finding]:
    """Whether this machine can serve and train the model."""
    by_way = {row.way: row for row in table}
    if not machine.gpus:
        return [_on_processor(by_way, machine)]
    serve, train = by_way["serve"], by_way["train"]
    found = [_on_gpu("serving", serve, machine), _on_gpu("training", train, machine)]
    if not (serve.fits and train.fits):
        return found
    biggest = max(gpu.total for gpu in machine.gpus)
    if len(machine.gpus) > 1:
        what = "serving and training may have a GPU each"
    elif serve.least + train.least <= _USABLE * biggest:
        what = "serving and training fit side by side on one GPU"
    else:
        what = "serving and training take turns on one GPU: vLLM sleeps while a step is trained"
    return [*found, Finding("one GPU for both", "pass", what)]


def _row(need: Need, machine: Machine) -> Row:
    if need.way == "embedded":
        fits = need.least <= machine.memory if machine.memory else None
        return Row(need.way, _WORDS[need.way], need.least, need.total, fits, None)
    biggest = max((gpu.total for gpu in machine.gpus), default=0)
    here = need.least <= _USABLE * biggest if machine.gpus else None
    card = next((size for size in CARDS if need.least <= _USABLE * size * GIB), None)
    return Row(need.way, _WORDS[need.way], need.least, need.total, here, card)


def _on_processor(by_way: Mapping[Way, Row], machine: Machine) -> Finding:
    row = by_way["embedded"]
    cards = (by_way["serve"].card, by_way["train"].card)
    gpu = f"a GPU of {max(filter(None, cards))} GiB" if all(cards) else "several GPUs"
    needed = f"about {gib(row.least)} are needed to serve and train on the processor"
    if row.fits is None:
        return Finding("memory", "skipped", needed)
    if not row.fits:
        what = f"{needed}, this machine has {gib(machine.memory)}"
        return Finding("memory", "fail", what, f"Use a smaller model, or {gpu}.")
    if row.least > machine.free_memory:
        what = f"{needed}, only {gib(machine.free_memory)} are free now"
        return Finding("memory", "warn", what, "End other programs first.")
    return Finding("memory", "pass", needed)


def _on_gpu(what: str, row: Row, machine: Machine) -> Finding:
    biggest = max(gpu.total for gpu in machine.gpus)
    needed = f"{gib(row.least)} at least, {gib(row.most)} with nothing spared"
    if row.fits:
        return Finding(f"memory for {what}", "pass", f"{needed}, of {gib(biggest)}")
    fix = f"A GPU with {row.card} GiB is enough." if row.card else "Use a smaller model."
    return Finding(f"memory for {what}", "fail", f"{needed}; the GPU has {gib(biggest)}", fix)
