"""Calls -> token trees and loss entries: every position once, every sample kept.

In: the calls of a step as `Sample`s. Out: `Row`s of at most `max_tokens` positions in depth-first
order, their segments, and one loss entry for each sampled token of each call. Positions are
merged by token ids alone, at every level of sharing; samples never are: many entries may read one
position (rewards 1,1,1,0 on answers b,b,b,t of one prompt give the coefficients .75 and -.75 on
log p(b) and log p(t); merged samples would give .25). Numpy only.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from art_core.batch.leaves import Leaf, leaves_of
from art_core.batch.pack import pack
from art_core.batch.sample import Sample
from art_core.errors import GroupError

Int = npt.NDArray[np.int64]
Float = npt.NDArray[np.float64]
_Number = TypeVar("_Number", bound=np.generic)


@dataclass(frozen=True, eq=False)
class Entries:
    """One loss entry per sampled token; arrays of one length E."""

    position: Int
    """Row position whose logits predict the target."""
    target: Int
    """Token id that was sampled there."""
    logprob: Float
    """Of the sampler."""
    advantage: Float
    weight: Float
    temperature: Float
    distorted: npt.NDArray[np.bool_]
    call: Int
    """All entries of a call are in one row."""
    trajectory: Int
    staleness: Int
    """Steps that the policy being trained is ahead of the one that sampled."""
    observed: npt.NDArray[np.bool_]
    """What the environment said, not the policy."""

    def __len__(self) -> int:
        return len(self.position)


@dataclass(frozen=True, eq=False)
class Segments:
    """Unbranched stretches of the trees, in depth-first order; arrays of one length."""

    start: Int
    end: Int
    """Row positions [start, end)."""
    subtree_end: Int
    """Everything in [end, subtree_end) descends from the segment."""

    def __len__(self) -> int:
        return len(self.start)


@dataclass(frozen=True, eq=False)
class Row:
    """Trees computed in one forward pass."""

    ids: Int
    """[N] token ids."""
    depth: Int
    """[N] position in its sequence, from 0: what rotary embeddings see."""
    segments: Segments
    entries: Entries

    def __len__(self) -> int:
        return len(self.ids)


def plant(samples: Sequence[Sample], max_tokens: int) -> list[Row]:
    """Merge the samples' paths into trees and lay the trees into rows.

    A tree that does not fit into a row is cut, and the next row computes its stem again (`pack`).

    Raises:
        GroupError: a single path is longer than `max_tokens`.
    """
    if not samples:
        return []
    longest = max(samples, key=lambda sample: sample.positions)
    if longest.positions > max_tokens:
        raise GroupError(
            f"call {longest.call} of trajectory {longest.trajectory} is too long for a row",
            got=longest.positions,
            expected=f"at most max_tokens_per_row={max_tokens} tokens",
            fix='Raise TrainConfig(max_tokens_per_row=...), or set too_long="drop" or "cut".',
        )
    leaves = leaves_of(samples)
    rows = pack([len(leaf.ids) for leaf in leaves], [leaf.shared for leaf in leaves], max_tokens)
    return [_row(leaves, row) for row in rows]


def _row(leaves: Sequence[Leaf], row: Sequence[int]) -> Row:
    """Build one row.

    Args:
        row: which of the leaves, in order.
    """
    starts, room = _starts(leaves, row)
    longest = max(len(leaves[k].ids) for k in row)
    count = np.arange(max(longest, room))
    ids, depth = np.empty(room, np.int64), np.empty(room, np.int64)
    # Row position at each depth of the path under way.
    current = np.empty(longest, np.int64)
    run_start: list[int] = []
    attached: list[int] = []  # row position a run hangs from; -1 for a root
    samples: list[Sample] = []
    positions: list[Int] = []
    size = 0
    for k, shared in zip(row, starts, strict=True):
        path = leaves[k].ids
        run_start.append(size)
        attached.append(int(current[shared - 1]) if shared else -1)
        end = size + len(path) - shared
        ids[size:end] = path[shared:]
        depth[size:end] = count[shared : len(path)]
        current[shared : len(path)] = count[size:end]
        for sample in leaves[k].samples:
            samples.append(sample)
            first = len(sample.prompt_ids) - 1
            positions.append(current[first : first + len(sample.sampled_ids)].copy())
        size = end
    return Row(
        ids=ids,
        depth=depth,
        segments=_segments(np.array(run_start), np.array(attached), size),
        entries=_entries(samples, positions),
    )


def _starts(leaves: Sequence[Leaf], row: Sequence[int]) -> tuple[list[int], int]:
    """What each leaf of a row shares with the one before it there; positions of the row."""
    starts = [0]
    for before, k in pairwise(row):
        starts.append(min(leaf.shared for leaf in leaves[before + 1 : k + 1]))
    return starts, sum(len(leaves[k].ids) for k in row) - sum(starts)


def _segments(run_start: Int, attached: Int, size: int) -> Segments:
    """Cut runs where another run hangs from their middle, and find what lies below each piece."""
    cuts = attached[attached >= 0] + 1
    start = np.union1d(run_start, cuts)
    end = np.append(start[1:], size)
    parent = start - 1  # a piece cut from a run continues the position before it
    parent[np.searchsorted(start, run_start)] = attached
    above = (np.searchsorted(start, parent, side="right") - 1).tolist()  # -1 above a root
    below = end.tolist()
    for i in range(len(below) - 1, -1, -1):
        if above[i] >= 0:
            below[above[i]] = max(below[above[i]], below[i])
    return Segments(start=start, end=end, subtree_end=np.array(below))


def _entries(samples: Sequence[Sample], positions: Sequence[Int]) -> Entries:
    lengths = [len(s.sampled_ids) for s in samples]

    def spread(dtype: type[_Number], name: str) -> npt.NDArray[_Number]:
        return np.repeat(np.array([getattr(s, name) for s in samples], dtype), lengths)

    return Entries(
        position=np.concatenate(positions),
        target=np.concatenate([s.sampled_ids for s in samples], dtype=np.int64),
        logprob=np.concatenate([s.logprobs for s in samples], dtype=np.float64),
        advantage=spread(np.float64, "advantage"),
        weight=spread(np.float64, "weight"),
        temperature=spread(np.float64, "temperature"),
        distorted=spread(np.bool_, "distorted"),
        call=spread(np.int64, "call"),
        trajectory=spread(np.int64, "trajectory"),
        staleness=spread(np.int64, "staleness"),
        observed=spread(np.bool_, "observed"),
    )
