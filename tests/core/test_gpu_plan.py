"""How a row is cut for a GPU's kernels; what the kernels make of it is in tests/gpu."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest

pytest.importorskip("torch", reason="art-langgraph[train] is not installed")

from art_core.batch.forest import Row, plant
from art_core.nn.gpu_plan import Piece, pieces
from art_core.training.logprobs import tree_row
from tests.core.samples import ancestors, make_sample


def agents(seed: int) -> Row:
    """Two groups whose stems and rollouts have lengths of their own."""
    rng = np.random.default_rng(seed)
    samples = []
    for group in range(2):
        stem = [group] * int(rng.integers(900, 1500))
        samples += [
            make_sample(stem + [10 + i] * int(rng.integers(3500, 6000)), [1]) for i in range(3)
        ]
    (row,) = plant(samples, 100_000)
    return row


def cut(row: Row) -> list[Piece]:
    found = pieces(tree_row(row).blocks(), len(row))
    assert found is not None
    return found


def test_pieces_hold_each_pair_once() -> None:
    row = agents(0)
    seen = np.zeros((len(row), len(row)), dtype=np.int8)
    for p in cut(row):
        cuts = p.cuts or (0, p.q1 - p.q0)
        for a, b in pairwise(cuts):
            if p.causal:
                seen[p.q0 + a : p.q0 + b, p.k0 + a : p.k0 + b] += np.tri(b - a, dtype=np.int8)
            else:
                seen[p.q0 : p.q1, p.k0 : p.k1] += 1
    for position, path in enumerate(ancestors(row)):
        assert seen[position].sum() == len(path)
        assert (seen[position, path] == 1).all()


def test_cudnn_sees_few_lengths() -> None:
    """8 per doubling: of causal pieces of 4096 to 6000 positions there are 4096, 4608, ... 6144."""
    planned = [(p, p.window) for seed in range(10) for p in cut(agents(seed))]
    windows = [(p, window) for p, window in planned if window is not None]
    assert all(a <= p.q0 and p.q1 <= b for p, (a, b) in windows)
    causal = [b - a for p, (a, b) in windows if p.causal]
    assert set(causal) <= {4096, 4608, 5120, 5632, 6144}
    assert len(causal) > 30
    stems = [(p, b - a) for p, (a, b) in windows if not p.causal]
    assert {p.k1 - p.k0 for p, _ in stems} <= {1024, 1152, 1280, 1408}
    assert {length % 1024 for _, length in stems} == {0}
    assert {length for _, length in stems} <= set(range(8192, 18433, 1024))
