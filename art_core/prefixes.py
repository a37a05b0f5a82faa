"""`Prefixes`: which of many sequences a longer one begins with, found without comparing them.

In: sequences of whole numbers, such as token ids. Out: the places of those that are the beginning
of another, by their lengths and hashes; the work for one question is linear in its length. Equal
hashes of unequal sequences are all but impossible, and are the caller's to rule out.
"""

from __future__ import annotations

from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

Numbers: TypeAlias = npt.NDArray[np.integer[Any]]
Places: TypeAlias = npt.NDArray[np.intp]
Hashes: TypeAlias = npt.NDArray[np.uint64]

_BASE = np.uint64(0x9E3779B97F4A7C15)  # odd, so that no power of it vanishes modulo 2**64
_MIX = np.uint64(0xBF58476D1CE4E5B9)


class Prefixes:
    """Sequences that can be asked for.

    Args:
        size: how many are added at most.
    """

    def __init__(self, size: int) -> None:
        self._lengths = np.zeros(size, np.int64)
        self._hashes = np.zeros(size, np.uint64)
        self._places = np.zeros(size, np.intp)
        self._count = 0
        self._powers = np.ones(1, np.uint64)

    def add(self, place: int, sequence: Numbers) -> None:
        """Keep a sequence under the number `place`."""
        at = self._count
        self._lengths[at], self._places[at] = len(sequence), place
        self._hashes[at] = self._running(sequence)[-1]
        self._count += 1

    def of(self, sequence: Numbers) -> Places:
        """Places of the kept sequences that `sequence` begins with, in the order they were added.

        It begins with its equals too.
        """
        lengths, hashes = self._lengths[: self._count], self._hashes[: self._count]
        running = self._running(sequence)
        fit = lengths < len(running)
        fit[fit] = running[lengths[fit]] == hashes[fit]
        return self._places[: self._count][fit]

    def _running(self, sequence: Numbers) -> Hashes:
        """[n + 1] hashes of the first 0, 1, ... n numbers: sum of (number + 1) base**i, mixed."""
        while len(self._powers) < len(sequence):
            more = self._powers * self._powers[-1:] * _BASE
            self._powers = np.concatenate([self._powers, more])
        terms = (sequence.astype(np.uint64) + np.uint64(1)) * _MIX
        terms ^= terms >> np.uint64(29)
        running = np.zeros(len(sequence) + 1, np.uint64)
        np.cumsum(terms * self._powers[: len(sequence)], out=running[1:])
        return running
