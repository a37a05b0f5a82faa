"""How a tree's attention is cut into a few kernel calls on a GPU, and of which lengths.

In: a row's rectangles. Out: pieces, or that there are too many to be worth it. cuDNN plans each
shape anew, for longer than a layer takes (seen: 80 to 160 ms, and above 1 s where a length is odd),
so what it is given has a few lengths: more queries than the piece has, which are thrown away, and
fewer of a stem's keys, the rest of which go through FlashAttention.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

LONG = 4096
"""A segment of this length is worth cuDNN; at 2624 it took as long as FlashAttention."""
_TALL = 2048
"""Queries from which on a stem is."""
_STEM = 1024
"""Keys from which on it is."""
_LENGTHS_PER_OCTAVE = 8
"""Of cuDNN's pieces."""
_FEW, _POSITIONS_A_CALL = 8, 1024
"""A row may have a few calls, and one for so many positions each."""


class Rectangle(Protocol):
    """As `tree_row.Block`."""

    @property
    def q0(self) -> int: ...
    @property
    def q1(self) -> int: ...
    @property
    def k0(self) -> int: ...
    @property
    def k1(self) -> int: ...
    @property
    def causal(self) -> bool: ...


@dataclass(frozen=True)
class Piece:
    """One kernel call: queries [q0, q1) over keys [k0, k1)."""

    q0: int
    q1: int
    k0: int
    k1: int
    causal: bool
    cuts: tuple[int, ...] = ()
    """Where sequences begin and end that see themselves only, counted from q0. Empty: there is
    one, or none as the keys are a stem's."""
    window: tuple[int, int] | None = None
    """(w0, w1) around the queries: those that cuDNN computes; keys too, where `causal`. It may
    reach beyond the row. None: not through cuDNN."""


def pieces(blocks: Sequence[Rectangle], positions: int) -> list[Piece] | None:
    """The calls for a row, segments first; None if they are too many to be worth it."""
    found: list[Piece] = []
    short: list[int] = []  # cuts of a run of short segments
    for b in sorted((b for b in blocks if b.causal), key=lambda b: b.q0):
        if b.q1 - b.q0 >= LONG:
            window = (b.q0, b.q0 + _planned(b.q1 - b.q0))
            found.append(Piece(b.q0, b.q1, b.k0, b.k1, causal=True, window=window))
        elif short and short[-1] == b.q0:
            short.append(b.q1)
        else:
            found += _together(short)
            short = [b.q0, b.q1]
    found += _together(short)
    for b in blocks:
        if not b.causal:
            found += _stem(b, positions)
    return found if len(found) <= _FEW + positions // _POSITIONS_A_CALL else None


def _together(cuts: Sequence[int]) -> list[Piece]:
    if not cuts:
        return []
    a, b = cuts[0], cuts[-1]
    return [Piece(a, b, a, b, causal=True, cuts=tuple(cut - a for cut in cuts))]


def _stem(b: Rectangle, positions: int) -> list[Piece]:
    """A stem's keys: as much of the rectangle through cuDNN as has planned lengths."""
    queries, keys = b.q1 - b.q0, b.k1 - b.k0
    if queries < _TALL or keys < _STEM:
        return [Piece(b.q0, b.q1, b.k0, b.k1, causal=False)]
    q1, k1 = b.q1, b.k0 + keys // _step(keys) * _step(keys)
    length = _planned(queries)
    if length > positions:  # fewer queries, rather than more than there are
        length = queries // _step(queries) * _step(queries)
        q1 = b.q0 + length
    start = min(b.q0, positions - length)
    window = (start, start + length)
    found = [Piece(b.q0, q1, b.k0, k1, causal=False, window=window)]
    if q1 < b.q1:
        found.append(Piece(q1, b.q1, b.k0, k1, causal=False))
    if k1 < b.k1:
        found.append(Piece(b.q0, b.q1, k1, b.k1, causal=False))
    return found


def _step(length: int) -> int:
    """Between planned lengths."""
    return (1 << (length.bit_length() - 1)) // _LENGTHS_PER_OCTAVE


def _planned(length: int) -> int:
    """The next length that is planned."""
    return -(-length // _step(length)) * _step(length)
