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

import numpy as np
import numpy.typing as npt

from art_core.batch.pack import pack
from art_core.calls import Ids, Logprobs, ModelCall
from art_core.errors import GroupError

Int = npt.NDArray[np.int64]
Float = npt.NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class Sample:
    """One trained call: what it read, what it sampled, and what that was worth."""

    prompt_ids: Ids
    """[P], P >= 1."""
    sampled_ids: Ids
    """[S], S >= 1."""
    logprobs: Logprobs
    """[S] of the sampler."""
    advantage: float
    weight: float
    """Share of each of its entries in the step's loss; see `weights.entry_weights`."""
    temperature: float
    distorted: bool
    """True: the sampler's logprobs are not those of softmax(logits / temperature)."""
    call: int
    """Index over the step."""
    trajectory: int
    """Index over the step."""
    staleness: int = 0
    """Steps that the policy being trained is ahead of the one that sampled."""

    @classmethod
    def of(
        cls,
        call: ModelCall,
        *,
        advantage: float,
        weight: float,
        index: int,
        trajectory: int,
        staleness: int = 0,
    ) -> Sample:
        """The sample that a trainable call is; `index` and `trajectory` count over the step."""
        assert call.prompt_ids is not None
        assert call.sampled_ids is not None
        assert call.logprobs is not None
        return cls(
            prompt_ids=call.prompt_ids,
            sampled_ids=call.sampled_ids,
            logprobs=call.logprobs,
            advantage=advantage,
            weight=weight,
            temperature=call.sampling.temperature,
            distorted=call.sampling.distorted,
            call=index,
            trajectory=trajectory,
            staleness=staleness,
        )

    @property
    def path(self) -> Ids:
        """[P + S - 1] ids that must be computed: the last sampled token predicts nothing."""
        return np.concatenate([self.prompt_ids, self.sampled_ids[:-1]])


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
    trajectory: Int

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
    longest = max(samples, key=_positions)
    if _positions(longest) > max_tokens:
        raise GroupError(
            f"call {longest.call} of trajectory {longest.trajectory} is too long for a row",
            got=_positions(longest),
            expected=f"at most max_tokens_per_row={max_tokens} tokens",
            fix='Raise TrainConfig(max_tokens_per_row=...), or set too_long="drop" or "cut".',
        )
    paths = _Paths.of(samples)
    rows = pack([len(paths.ids[i]) for i in paths.leaves], paths.shared, max_tokens)
    return [_row(paths, row) for row in rows]


def _positions(sample: Sample) -> int:
    """P + S - 1."""
    return len(sample.prompt_ids) + len(sample.sampled_ids) - 1


@dataclass(frozen=True, eq=False)
class _Paths:
    """The samples in an order of their paths in which neighbours share the most."""

    samples: list[Sample]
    ids: list[Ids]
    """Path of each."""
    leaves: list[int]
    """Places of the paths that no other one extends. What is between two of them is the beginning
    of the second one, so that it costs nothing."""
    shared: list[int]
    """Positions that each leaf has in common with the one before; 0 for the first."""

    @classmethod
    def of(cls, samples: Sequence[Sample]) -> _Paths:
        # Bytes have an order in which a prefix comes right before what extends it; that it is not
        # the order of the numbers does not matter.
        keys = [s.prompt_ids.tobytes() + s.sampled_ids[:-1].tobytes() for s in samples]
        order = sorted(range(len(keys)), key=keys.__getitem__)
        ids = [np.frombuffer(keys[i], np.int32) for i in order]
        after = [*order[1:], None]
        leaves = [
            place
            for place, (this, following) in enumerate(zip(order, after, strict=True))
            if following is None or not keys[following].startswith(keys[this])
        ]
        shared = [0, *(common_prefix(ids[i], ids[i + 1]) for i in leaves[:-1])]
        return cls([samples[i] for i in order], ids, leaves, shared)


def common_prefix(a: Ids, b: Ids) -> int:
    """Number of leading ids that `a` and `b` share."""
    n = min(len(a), len(b))
    differs = a[:n] != b[:n]
    first = int(differs.argmax()) if n else 0
    return first if n and differs[first] else n


def _row(paths: _Paths, row: Sequence[int]) -> Row:
    """Build one row.

    Args:
        row: which of the leaves, in order.
    """
    current = np.zeros(max(len(paths.ids[paths.leaves[k]]) for k in row), dtype=np.int64)
    """Row position at each depth of the path under way."""
    ids: list[Ids] = []
    depth: list[Int] = []
    run_start: list[int] = []
    attached: list[int] = []  # row position a run hangs from; -1 for a root
    samples: list[Sample] = []
    positions: list[Int] = []
    size, before = 0, -1
    for k in row:
        path = paths.ids[paths.leaves[k]]
        shared = min(paths.shared[before + 1 : k + 1]) if before >= 0 else 0
        new = len(path) - shared
        run_start.append(size)
        attached.append(int(current[shared - 1]) if shared else -1)
        current[shared : len(path)] = np.arange(size, size + new)
        ids.append(path[shared:])
        depth.append(np.arange(shared, len(path)))
        for place in range(paths.leaves[k - 1] + 1 if k else 0, paths.leaves[k] + 1):
            sample = paths.samples[place]
            samples.append(sample)
            first = len(sample.prompt_ids) - 1
            positions.append(current[first : first + len(sample.sampled_ids)].copy())
        size += new
        before = k
    return Row(
        ids=np.concatenate(ids).astype(np.int64),
        depth=np.concatenate(depth),
        segments=_segments(np.array(run_start), np.array(attached), size),
        entries=_entries(samples, positions),
    )


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

    def spread(values: Sequence[float] | Sequence[int] | Sequence[bool]) -> npt.NDArray[np.generic]:
        return np.repeat(np.asarray(values), lengths)

    return Entries(
        position=np.concatenate(positions),
        target=np.concatenate([s.sampled_ids for s in samples]).astype(np.int64),
        logprob=np.concatenate([s.logprobs for s in samples]).astype(np.float64),
        advantage=spread([s.advantage for s in samples]).astype(np.float64),
        weight=spread([s.weight for s in samples]).astype(np.float64),
        temperature=spread([s.temperature for s in samples]).astype(np.float64),
        distorted=spread([s.distorted for s in samples]).astype(np.bool_),
        call=spread([s.call for s in samples]).astype(np.int64),
        trajectory=spread([s.trajectory for s in samples]).astype(np.int64),
    )
