"""How a row is cut for a GPU's kernels; what the kernels make of it is in tests/gpu."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest

pytest.importorskip("torch", reason="art-langgraph[train] is not installed")

from art_core.batch.forest import Row, plant
from art_core.nn.gpu_pieces import Piece, pieces, queries_computed
from art_core.training.logprobs import tree_row
from tests.core.samples import ancestors, make_sample


def agents(seed: int) -> Row:
    """Two groups whose stems and rollouts have lengths of their own."""
    rng = np.random.default_rng(seed)
    samples = []
    for group in range(2):
        stem = [group] * int(rng.integers(900, 1500))
        samples += [
            make_sample(stem + [10 + i] * int(rng.integers(1500, 3000)), [1]) for i in range(3)
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
    """8 per doubling: of causal pieces of 2048 to 3000 positions there are 2048, 2304, ... 3072."""
    planned = [p for seed in range(30) for p in cut(agents(seed)) if p.is_planned]
    causal = {queries_computed(p) for p in planned if p.causal}
    assert causal <= {2048, 2304, 2560, 2816, 3072}
    assert len([p for p in planned if p.causal]) > 50
    stems = [p for p in planned if not p.causal]
    assert {p.k1 - p.k0 for p in stems} <= {1024, 1152, 1280, 1408}
    assert {(p.q1 - p.q0) % 512 for p in stems} == {0}
    assert all(queries_computed(p) == p.q1 - p.q0 for p in stems)
