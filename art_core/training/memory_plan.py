"""A step's memory before it is computed: what it will take, if that is there, what to change.

In: the module, the trained numbers, the longest row, what the device has now. Out: `MemoryPlan`, by
the estimate that the doctor gives too (readiness/step_memory.py). Left out: what is done about it
(attempt.py), and what was really taken (memory_peak.py).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import torch

from art_core.config import LEAST_ROW
from art_core.errors import BaseModelError, NotEnoughMemory
from art_core.nn.keeping import layers_that_keep
from art_core.nn.lora import LoraModel
from art_core.readiness.about_machine import gib
from art_core.readiness.memory import GIB
from art_core.readiness.shape import Shape, shape_of
from art_core.readiness.step_memory import MOMENTS, SINGLE, Step, StepMemory, step_memory
from art_core.training.memory_peak import Room, room_on

DOUBT = 0.1
"""By how much of itself an estimate may be too high: only a step that would not fit then either is
refused."""
_MUCH = 0.2
"""Share of a device from which on something is worth changing."""


@dataclass(frozen=True)
class MemoryPlan:
    """Of one step."""

    shape: Shape
    step: Step
    room: Room
    on_gpu: bool
    recomputes: bool
    """Layers may compute again what they do not keep: on a GPU, if none drops out."""

    @property
    def need(self) -> StepMemory:
        """By the estimate."""
        return step_memory(self.shape, self.step)

    @property
    def keeping(self) -> int:
        """Layers that will keep what they compute."""
        need = self.need
        if not self.recomputes:
            return need.layers
        left = self.room.available - sum(need.fixed.values())
        return layers_that_keep(max(0, left), need.layer, need.inputs, need.layers)

    @property
    def expected(self) -> int:
        """Bytes at the worst moment of the step."""
        return self.need.at(self.keeping)

    @property
    def lacks(self) -> bool:
        """It will not fit, even if the estimate is too high by as much as it may be."""
        return self._least * (1 - DOUBT) > self.room.available > 0

    @property
    def is_tight(self) -> bool:
        """It may not fit."""
        return self.expected > self.room.available > 0

    @property
    def _least(self) -> int:
        return self.need.least if self.recomputes else self.need.total

    def longest_row(self) -> int:
        """Positions of the longest row that fits by the estimate; 0 if none does."""
        low, high = 0, self.step.row
        while high - low > 1:
            middle = (low + high) // 2
            if replace(self, step=replace(self.step, row=middle))._least <= self.room.available:
                low = middle
            else:
                high = middle
        return low if low >= LEAST_ROW else 0

    def changes(self, longest_call: int) -> list[str]:
        """What would make it fit, the cheapest first.

        Args:
            longest_call: positions of the longest call, which can't be parted.
        """
        found = []
        row, parts = self.longest_row(), self.need.fixed
        if row >= longest_call:
            found.append(f"Set max_tokens_per_row={row}.")
        elif row:
            found.append(f"Keep calls under {row} tokens (the longest has {longest_call}).")
        if self.on_gpu and self.room.others > _MUCH * self.room.whole:
            found.append(
                f"End what else is on the GPU ({gib(self.room.others)}), or, if that is vLLM, set "
                'VllmConfig(while_training="sleep") or a smaller gpu_share.'
            )
        if parts.get("keys and values", 0) > _MUCH * self.need.total:
            found.append("Lower EngineConfig(cache_tokens=...).")
        if parts["adapter and optimizer"] > _MUCH * self.need.total:
            found.append("Lower LoraSettings(rank=...).")
        if self.on_gpu and not self.step.four_bit and parts["weights"] > _MUCH * self._least:
            found.append("Load the base model in 4 bits: TrainerConfig(load_in_4bit=True).")
        found.append("Or take a smaller base model, or a device with more memory.")
        return found

    def check(self, longest_call: int, settings: str = "TrainConfig") -> None:
        """See that it fits.

        Args:
            longest_call: as in `changes`.
            settings: the class that the step's settings have.

        Raises:
            NotEnoughMemory: it does not.
        """
        if self.lacks:
            raise NotEnoughMemory(
                f"a step with a row of {self.step.row} tokens does not fit on {self.room.name}",
                got=f"{gib(self.room.available)} for it",
                expected=f"about {gib(self._least)} ({self._told()})",
                fix=f"Nothing was computed. {' '.join(self.changes(longest_call))} If the estimate "
                f'is wrong: {settings}(beyond_memory="try").',
            )

    def figures(self) -> dict[str, float]:
        """For the metrics."""
        return {
            "memory/row": self.step.row,
            "memory/planned_gib": self.expected / GIB,
            "memory/available_gib": self.room.available / GIB,
            "memory/layers_again": self.need.layers - self.keeping,
        }

    def __str__(self) -> str:
        again = self.need.layers - self.keeping
        how = f", {again} of {self.need.layers} layers computed again" if again else ""
        there = gib(self.room.available) if self.room.available else "an unknown size"
        others = f", {gib(self.room.others)} are others'" if self.room.whole else ""
        return (
            f"a row of {self.step.row} tokens takes about {gib(self.expected)}{how}, of {there} on "
            f"{self.room.name}{others}: {self._told()}"
        )

    def _told(self) -> str:
        parts = sorted(self.need.parts.items(), key=lambda part: -part[1])
        return ", ".join(f"{what} {gib(size)}" for what, size in parts if size >= GIB / 20)


class Planner:
    """Plans the steps of one adapter.

    Args:
        trained: numbers of the adapter.
        moments: bytes of the optimizer's state of each.
        held: says, in bytes, what else this process keeps in a processor's memory while a step is
            computed; on a GPU it is looked up.
    """

    def __init__(
        self,
        model: LoraModel,
        *,
        trained: int,
        moments: int = MOMENTS,
        held: Callable[[], Mapping[str, int]] = dict,
    ) -> None:
        self._model = model
        self._trained, self._moments = trained, moments
        self._held = held
        try:
            self._shape: Shape | None = shape_of(model.config.to_dict())
        except BaseModelError:  # of a kind that no estimate is known for
            self._shape = None

    def plan(self, row: int, updates: int) -> MemoryPlan | None:
        """Of a step whose longest row has `row` positions, as the device is now; None: this kind
        of model has no estimate."""
        if self._shape is None:
            return None
        on_gpu = self._model.device.type == "cuda"
        step = Step(
            row=row,
            weights=self._model.base_bytes,
            adapter=self._trained,
            number=self._model.dtype.itemsize,
            updates=updates,
            moments=self._moments,
            four_bit=self._model.has_four_bits,
            copied=self._model.copied_bytes,
        )
        beside = self._others(step) if on_gpu else self._held()
        return MemoryPlan(
            self._shape,
            replace(step, held=beside),
            room_on(self._model.device),
            on_gpu=on_gpu,
            recomputes=self._model.recomputes,
        )

    def _others(self, step: Step) -> dict[str, int]:
        """What of this process is on the GPU beside the step's own: other adapters, mostly."""
        taken = torch.cuda.memory_allocated(self._model.device)
        own = step.weights + step.adapter * (SINGLE + step.moments)
        return {"other adapters": max(0, taken - own)}
