"""What is asked of a `Workbench` and what it answers: named records, in one process or two.

In: plain values, our own settings, samples with their arrays. Out: the records, which know neither
torch nor the module. Left out: who does it (workbench.py), and the way between two processes
(apart.py).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from art_core.batch.probe import Probe
from art_core.batch.sample import Sample
from art_core.config import Layers, LoraSettings, TrainConfig, TrainSFTConfig


@dataclass(frozen=True)
class Loading:
    """A base model, to be trained on."""

    path: Path
    on_gpu: bool = False
    """In bfloat16 on the GPU; else in float32 on the processor."""
    four_bit: bool = False
    layers: Layers = "own"
    threads: int | None = None
    """Of the processor; None: as many as torch takes. For a process of its own."""


@dataclass(frozen=True)
class Loaded:
    """What is known of the base model, once it is in memory."""

    vocab_size: int
    context_length: int
    gpu: tuple[int, int] | None
    """(free, whole) bytes of the GPU's memory then; None: it is not on one."""


@dataclass(frozen=True)
class Opening:
    """An adapter with its trainer, as a checkpoint left them."""

    adapter: str
    """Its name in the module."""
    lora: LoraSettings
    seed: int
    optimizer: Literal["adamw", "adamw_8bit"]
    checkpoints: Path
    """The run's folder of them, lent by its owner."""
    checkpoint: Path | None
    """None: a fresh adapter, which is saved as step 0."""
    gives_way: bool = False
    """The engine has memory of the device now, and none of it while a step is trained."""


@dataclass(frozen=True)
class Opened:
    """The adapter is there."""

    running: float
    """The running baseline that its checkpoint keeps; see `TrainConfig.baseline`."""


@dataclass(frozen=True)
class Lesson:
    """A step: what it learns from, and where it is saved."""

    adapter: str
    step: int
    """That it will be."""
    checkpoints: Path
    """As in `Opening`."""
    batches: Sequence[Sequence[Sample]]
    """Of a supervised step, for each optimizer step; else one of all samples."""
    config: TrainConfig | TrainSFTConfig
    """Says too which of the two it is."""
    reference: Path | None = None
    """Folder of the adapter that a KL holds it to; None: the base model, or there is no KL."""
    running: float | None = None
    """The running baseline after it; None: as before."""
    bookmarks: Mapping[str, dict[str, Any]] = field(default_factory=dict)
    probe_within: int | None = None
    """Ids that the engine can read, if it has to be proved that the step answers; else None."""
    adopted: Path | None = None
    """Folder of an adapter that becomes the step, instead of something that is learned."""

    @property
    def samples(self) -> list[Sample]:
        """Of all batches."""
        return [sample for batch in self.batches for sample in batch]


@dataclass(frozen=True)
class Learned:
    """A step that is in the module, and whole on disk."""

    path: Path
    metrics: dict[str, float]
    """With seconds by phase."""
    probe: Probe | None
    """None: none was asked for, or there is none."""
    running: float
    """As in `Opened`, after it."""
    seconds: float
    """From the lesson's beginning to its end, where the module is."""


@dataclass(frozen=True)
class Question:
    """The loss of answers that were written, under an adapter."""

    adapter: str
    samples: Sequence[Sample]
    config: TrainSFTConfig
