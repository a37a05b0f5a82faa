"""`Phases`: how long each part of a step took, on the device that it ran on.

In: code run inside `of(name)`. Out: seconds by name. On a GPU the marks are CUDA events, which the
GPU passes when it gets there, so that nobody waits for it while it works; they are read when the
step is over.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TypeAlias

import torch

from art_core.step_times import PREFIX

Mark: TypeAlias = "float | torch.cuda.Event"


class Phases:
    """Of one try of a step."""

    def __init__(self, device: torch.device | None = None) -> None:
        self._on_gpu = device is not None and device.type == "cuda"
        self._spans: list[tuple[str, Mark, Mark]] = []

    @contextmanager
    def of(self, name: str) -> Iterator[None]:
        """The body belongs to the phase `name`; phases do not nest."""
        begun = self._mark()
        try:
            yield
        finally:
            self._spans.append((name, begun, self._mark()))

    def add(self, name: str, seconds: float) -> None:
        """What was measured elsewhere."""
        self._spans.append((name, 0.0, seconds))

    def figures(self) -> dict[str, float]:
        """Seconds by metric; waits until the GPU has passed the last mark."""
        found: dict[str, float] = {}
        for name, begun, ended in self._spans:
            key = PREFIX + name
            found[key] = found.get(key, 0.0) + _between(begun, ended)
        return found

    def _mark(self) -> Mark:
        if not self._on_gpu:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event


def _between(begun: Mark, ended: Mark) -> float:
    if isinstance(begun, float) or isinstance(ended, float):
        assert isinstance(begun, float)
        assert isinstance(ended, float)
        return ended - begun
    ended.synchronize()
    return float(begun.elapsed_time(ended)) / 1000
