"""The paths of a forest that no other path extends, in an order in which neighbours share the most.

In: samples. Out: a `Leaf` for each such path, with the samples that lie on it. Ids alone decide
what is shared: not who asked, nor when. It leaves out rows (forest.py, pack.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from art_core.batch.sample import Sample
from art_core.calls import Ids

_ID = ">i4"
"""Big-endian bytes have the order of the numbers."""


@dataclass(frozen=True, eq=False)
class Leaf:
    """A path that no other one extends."""

    ids: Ids
    samples: list[Sample]
    """Those whose path it is, or begins with; the latter cost nothing."""
    shared: int
    """Positions in common with the leaf before; 0 for the first."""


def leaves_of(samples: Sequence[Sample]) -> list[Leaf]:
    """The leaves of the paths of `samples`, which are at least one."""
    chains = _chains(samples)
    leaves: list[Leaf] = []
    waiting: list[Sample] = []
    # A prefix comes right before what extends it.
    chains.sort(key=lambda chain: chain[0])
    for (key, chain), (following, _) in zip(chains, [*chains[1:], (b"", [])], strict=True):
        waiting += chain
        if not following.startswith(key):
            ids = np.frombuffer(key, _ID).astype(np.int32)
            shared = common_prefix(leaves[-1].ids, ids) if leaves else 0
            leaves.append(Leaf(ids, waiting, shared))
            waiting = []
    return leaves


def _chains(samples: Sequence[Sample]) -> list[tuple[bytes, list[Sample]]]:
    """Samples each of which goes on from the one before, with the path of the last as bytes.

    It spares most of an agent's calls the sorting, and their copies the memory.
    """
    chains = [[samples[0]]]
    last = _bytes(samples[0])
    for sample in samples[1:]:
        path = _bytes(sample)
        if path.startswith(last):
            chains[-1].append(sample)
        else:
            chains.append([sample])
        last = path
    return [(chain[-1].path.astype(_ID).tobytes(), chain) for chain in chains]


def _bytes(sample: Sample) -> bytes:
    """Its path in the machine's own order."""
    return b"".join((sample.prompt_ids.data, sample.sampled_ids[:-1].data))


def common_prefix(a: Ids, b: Ids) -> int:
    """Number of leading ids that `a` and `b` share."""
    n = min(len(a), len(b))
    differs = a[:n] != b[:n]
    first = int(differs.argmax()) if n else 0
    return first if n and differs[first] else n
