"""Learning rates of a supervised run: one for each optimizer step."""

from __future__ import annotations

import math
from typing import Literal, TypeAlias

from art_core.errors import ConfigError

Schedule: TypeAlias = Literal["linear", "cosine", "constant"]


def create_lr_schedule(
    total_steps: int,
    peak_lr: float,
    method: Schedule = "linear",
    warmup_steps: int = 0,
    min_lr: float = 0.0,
) -> list[float]:
    """One learning rate a step: up to `peak_lr`, then down towards `min_lr`.

    Warm-up step k of w (from 1) has peak_lr * k / w. After it, with t of T steps behind it,
    "linear" has min_lr + (peak_lr - min_lr) * (1 - t / T), "cosine" (1 + cos(pi t / T)) / 2 in
    place of 1 - t / T, "constant" stays. The end of the fall lies one step behind the last, so that
    no step is without effect. 4 steps, peak 1, 2 of warm-up: [0.5, 1, 1, 0.5].

    Raises:
        ConfigError: a number is out of range, or the method is unknown.
    """
    if method not in ("linear", "cosine", "constant"):
        raise ConfigError("schedule", got=method, expected='"linear", "cosine" or "constant"')
    if total_steps < 0 or not 0 <= warmup_steps <= total_steps:
        raise ConfigError(
            "steps of a schedule",
            got={"total_steps": total_steps, "warmup_steps": warmup_steps},
            expected="0 <= warmup_steps <= total_steps",
        )
    if not (math.isfinite(peak_lr) and 0 <= min_lr <= peak_lr and peak_lr > 0):
        raise ConfigError(
            "learning rates of a schedule",
            got={"peak_lr": peak_lr, "min_lr": min_lr},
            expected="0 <= min_lr <= peak_lr, and peak_lr > 0",
        )
    falling = total_steps - warmup_steps
    rising = [peak_lr * (k + 1) / warmup_steps for k in range(warmup_steps)]
    return rising + [
        min_lr + (peak_lr - min_lr) * _left(method, t / falling) for t in range(falling)
    ]


def _left(method: Schedule, way: float) -> float:
    """How much of the peak is left, `way` of the fall being behind."""
    if method == "linear":
        return 1.0 - way
    return (1.0 + math.cos(math.pi * way)) / 2 if method == "cosine" else 1.0
