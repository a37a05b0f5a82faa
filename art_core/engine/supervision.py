"""How vLLM is watched: how long what may take, and how often it is restarted.

In: nothing, or numbers. Out: `Supervision`, and how long a silence is a hang for a given build.
Left out: the watching, which is `vllm_process`.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from art_core.engine.runtime import probe
from art_core.errors import RuntimeMissing

HANG_GPU, HANG_CPU = 20.0, 180.0
"""Seconds of silence that are a hang. A step on a GPU takes a second at most; on a CPU that others
use too, thousands of prompt tokens take a minute."""


@dataclass(frozen=True)
class Supervision:
    """How a server is watched. Seconds, where nothing else is said."""

    start_within: float = 900.0
    """A start that takes longer has failed. Big models load for minutes."""
    look_every: float = 1.0
    """Between two health checks."""
    hang_after: float | None = None
    """Without an answer from its engine for so long, it hangs. An answer comes between two steps of
    the model, so this is longer than the longest step. None: `HANG_GPU` or `HANG_CPU`, by the build
    of its torch."""
    stop_within: float = 10.0
    """It may take so long to stop by itself."""
    restarts: int = 3
    """So many within `restarts_within`; the next fault is final."""
    restarts_within: float = 600.0
    first_pause: float = 0.5
    """Before the first restart; doubled for each that follows."""


def longest_silence(given: Supervision, python: Path) -> float:
    """Seconds without an answer after which vLLM in `python` hangs."""
    if given.hang_after is not None:
        return given.hang_after
    try:
        is_cpu = probe(python)["accelerator"] is None
    except RuntimeMissing:  # it serves, so it runs; whatever it is, be patient with it
        is_cpu = True
    return HANG_CPU if is_cpu else HANG_GPU
