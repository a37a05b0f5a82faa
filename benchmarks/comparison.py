"""Two ways measured side by side on one machine, and the line that says what came out.

In: two functions that each measure one run. Out: `Comparison`, printed as one line of JSON. Runs
are interleaved, so that a slow minute of the machine hits both; reported are medians and the
span from the 10th to the 90th percentile of the paired ratios.
"""

from __future__ import annotations

import json
import os
import platform
from argparse import ArgumentTypeError
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

MIN_REPEATS = 5


@dataclass(frozen=True)
class Comparison:
    """What a benchmark found."""

    name: str
    ours: float
    """Median of our runs, in the benchmark's own unit."""
    peer: float
    peer_name: str
    ratio: float
    """How many times better than the peer: above 1 is in our favour, whatever the unit."""
    goal: str
    spread: tuple[float, float]
    """10th and 90th percentile of the paired ratios."""
    machine: str

    def line(self) -> str:
        """One line of JSON."""
        return json.dumps(asdict(self))


def compare_seconds(
    ours: Callable[[], float], peer: Callable[[], float], *, repeats: int
) -> tuple[float, float, float, tuple[float, float]]:
    """Measure seconds both ways, by turns, after one run of each that does not count.

    Returns:
        median of ours, median of the peer's, median of peer / ours, and that ratio's span.
    """
    ours(), peer()
    pairs = np.array([(ours(), peer()) for _ in range(repeats)])
    ratios = pairs[:, 1] / pairs[:, 0]
    low, high = np.percentile(ratios, [10, 90])
    mine, theirs = np.median(pairs, axis=0)
    return float(mine), float(theirs), float(np.median(ratios)), (float(low), float(high))


def at_least_five(told: str) -> int:
    """The value of `--repeats`, for argparse: too few are refused before anything is measured."""
    if not told.isdigit() or int(told) < MIN_REPEATS:
        raise ArgumentTypeError(f"{told} repeats say nothing, at least {MIN_REPEATS} are needed")
    return int(told)


def machine() -> str:
    """This machine in words: processor, cores, system, Python."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return f"{_processor()}, {cores} cores, {platform.system()}, Python {platform.python_version()}"


def _processor() -> str:
    info = Path("/proc/cpuinfo")
    if info.exists():
        for line in info.read_text("utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()
