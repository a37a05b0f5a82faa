"""The radix tree of keys and values, against a plain dict of every prefix ever stored."""

from __future__ import annotations

import random
from collections.abc import Sequence

import numpy as np
import pytest

pytest.importorskip("torch", reason="art-langgraph[train] is not installed")

import torch

from art_core.calls import Ids
from art_core.engine.prefix_cache import Node, PrefixCache

LAYERS, HEADS, DIM = 2, 3, 4


def cache() -> PrefixCache:
    return PrefixCache(LAYERS, HEADS, DIM, torch.float32, torch.device("cpu"))


def ids(*values: int) -> Ids:
    return np.array(values, np.int32)


def keys(prefix: Sequence[int]) -> torch.Tensor:
    """[layers, heads, dim] that no other prefix has: what a model would compute at its last id."""
    generator = torch.Generator().manual_seed(hash(tuple(prefix)) % 2**63)
    return torch.rand(LAYERS, HEADS, DIM, generator=generator)


def computed(sequence: Sequence[int], last: int) -> torch.Tensor:
    """[layers, heads, last, dim]: keys of the last positions of `sequence`."""
    n = len(sequence)
    return torch.stack([keys(sequence[: i + 1]) for i in range(n - last, n)], dim=2)


def store(tree: PrefixCache, sequence: Sequence[int], last: int | None = None) -> None:
    k = computed(sequence, len(sequence) if last is None else last)
    tree.store(ids(*sequence), k, -k)


def fill(node: Node) -> None:
    """What a forward pass does: compute the fresh stretches of a path."""
    at, path = 0, [int(i) for n in node.path() for i in n.ids]
    for part in node.path():
        at += len(part)
        if part.fresh:
            part.k.copy_(computed(path[:at], len(part)))
            part.v.copy_(-part.k)
            part.fresh = False


def nodes(tree: PrefixCache) -> list[Node]:
    found, stack = [], list(tree.root.children.values())
    while stack:
        node = stack.pop()
        found.append(node)
        stack.extend(node.children.values())
    return found


def check(tree: PrefixCache) -> None:
    """Every node is where its ids say, and holds what its whole prefix gives."""
    assert tree.tokens == sum(len(node) for node in nodes(tree))
    for node in nodes(tree):
        assert len(node) > 0
        assert node.parent is not None
        assert node.parent.children[int(node.ids[0])] is node
        assert node.fresh or node.parent is tree.root or not node.parent.fresh
        assert node.used <= node.parent.used or node.parent is tree.root
        if not node.fresh:
            path = [int(i) for n in node.path() for i in n.ids]
            torch.testing.assert_close(node.k, computed(path, len(node)), rtol=0, atol=0)
            torch.testing.assert_close(node.v, -node.k, rtol=0, atol=0)


def test_a_new_sequence_is_one_fresh_node() -> None:
    tree = cache()
    node = tree.insert(ids(1, 2, 3))
    assert [n.ids.tolist() for n in node.path()] == [[1, 2, 3]]
    assert node.fresh
    assert tuple(node.k.shape) == (LAYERS, HEADS, 3, DIM)
    assert tree.tokens == 3


def test_no_ids_end_at_the_root_which_is_never_fresh() -> None:
    tree = cache()
    assert tree.insert(ids()) is tree.root
    assert tree.root.path() == []
    assert not tree.root.fresh
    assert tree.tokens == 0


def test_a_branch_splits_the_stretch_and_both_parts_keep_their_values() -> None:
    tree = cache()
    store(tree, [1, 2, 3, 4])
    before = tree.insert(ids(1, 2, 3, 4))
    branch = tree.insert(ids(1, 2, 9))
    assert [n.ids.tolist() for n in branch.path()] == [[1, 2], [9]]
    assert [n.ids.tolist() for n in before.path()] == [[1, 2], [3, 4]]
    assert [n.fresh for n in branch.path()] == [False, True]
    assert tree.tokens == 5
    check(tree)


def test_a_prefix_of_something_known_ends_inside_it() -> None:
    tree = cache()
    store(tree, [1, 2, 3, 4])
    node = tree.insert(ids(1, 2))
    assert [n.ids.tolist() for n in node.path()] == [[1, 2]]
    assert not node.fresh
    assert tree.tokens == 4
    check(tree)


def test_a_node_that_someone_holds_stays_the_end_of_its_path_when_it_is_split() -> None:
    tree = cache()
    held = tree.insert(ids(1, 2, 3, 4))
    tree.insert(ids(1, 7))
    tree.insert(ids(1, 2, 3, 8))
    assert np.concatenate([n.ids for n in held.path()]).tolist() == [1, 2, 3, 4]
    assert held.ids.tolist() == [4]


def test_parts_of_an_uncomputed_stretch_are_filled_apart() -> None:
    tree = cache()
    long = tree.insert(ids(1, 2, 3, 4))
    short = tree.insert(ids(1, 2, 9))
    fill(short)
    fill(long)
    check(tree)


def test_known_counts_the_ids_that_need_no_new_node() -> None:
    tree = cache()
    store(tree, [1, 2, 3])
    store(tree, [1, 2, 5, 6])
    for sequence, known in [
        ([], 0), ([9], 0), ([1], 1), ([1, 2, 3], 3), ([1, 2, 3, 4], 3), ([1, 2, 5, 7], 3),
    ]:  # fmt: skip
        tokens = tree.tokens
        assert tree.known(ids(*sequence)) == known
        tree.insert(ids(*sequence))
        assert tree.tokens == tokens + len(sequence) - known
        tree.prune(tree.insert(ids(*sequence)), [])


def test_store_copies_only_what_is_missing() -> None:
    tree = cache()
    store(tree, [1, 2, 3])
    wrong = torch.full((LAYERS, HEADS, 5, DIM), 7.0)
    right = computed([1, 2, 3, 4, 5], 2)
    wrong[:, :, 3:] = right
    tree.store(ids(1, 2, 3, 4, 5), wrong, -wrong)
    assert tree.tokens == 5
    check(tree)


def test_store_of_a_sequences_end_goes_below_its_computed_prompt() -> None:
    tree = cache()
    fill(tree.insert(ids(1, 2, 3)))
    store(tree, [1, 2, 3, 4, 5], last=2)
    check(tree)
    store(tree, [1, 2, 3, 4, 6, 7], last=3)
    assert tree.tokens == 7
    check(tree)


def test_store_from_the_very_first_position() -> None:
    """A prompt of one id has nothing computed above what it stores."""
    tree = cache()
    store(tree, [5, 6])
    check(tree)
    assert [n.fresh for n in nodes(tree)] == [False]


def test_store_fills_the_part_it_knows_of_a_stretch_that_waits() -> None:
    tree = cache()
    fill(tree.insert(ids(1)))
    waits = tree.insert(ids(1, 2, 3, 4))
    store(tree, [1, 2, 3], last=2)
    assert [(n.ids.tolist(), n.fresh) for n in waits.path()] == [
        ([1], False), ([2, 3], False), ([4], True),
    ]  # fmt: skip
    check(tree)


def test_eviction_takes_the_longest_unused_leaves_first() -> None:
    tree = cache()
    store(tree, [1, 2, 3])
    store(tree, [1, 2, 4])
    store(tree, [5, 6])
    tree.insert(ids(1, 2, 3))  # used again
    tree.evict(5, [])
    left = {tuple(n.ids.tolist()) for n in nodes(tree)}
    assert left == {(1, 2), (3,), (5, 6)}  # [4] went
    tree.evict(4, [])
    assert {tuple(n.ids.tolist()) for n in nodes(tree)} == {(1, 2), (3,)}
    assert tree.tokens == 3
    check(tree)


def test_eviction_reaches_a_parent_before_a_leaf_that_is_younger() -> None:
    """[1, 2] was last used before [5]; once its child is gone, it is the next to go."""
    tree = cache()
    store(tree, [1, 2, 3])
    store(tree, [5])
    tree.evict(1, [])
    assert [n.ids.tolist() for n in nodes(tree)] == [[5]]

    tree = cache()
    store(tree, [1, 2, 3])
    tree.insert(ids(1, 2))
    store(tree, [5])
    tree.evict(1, [])
    assert [n.ids.tolist() for n in nodes(tree)] == [[5]]


def test_what_is_kept_is_never_evicted_even_above_the_limit() -> None:
    tree = cache()
    store(tree, [1, 2, 3])
    store(tree, [1, 2, 4])
    running = tree.insert(ids(1, 2, 3))
    tree.evict(0, [running, tree.root])
    assert np.concatenate([n.ids for n in running.path()]).tolist() == [1, 2, 3]
    assert tree.tokens == 3
    tree.evict(0, [])
    assert tree.tokens == 0
    assert tree.root.children == {}


def test_eviction_gives_back_the_memory_of_a_stretch_that_was_split() -> None:
    """The part above a split must not hold the part below in memory once that is evicted."""
    tree = cache()
    store(tree, list(range(100)))
    upper = tree.insert(ids(0, 1))
    tree.evict(2, [upper])
    assert tree.tokens == 2
    storage = upper.k.untyped_storage().nbytes()
    assert storage == LAYERS * HEADS * 2 * DIM * 4  # two positions of float32
    check(tree)


def test_prune_takes_back_what_was_never_computed() -> None:
    tree = cache()
    store(tree, [1, 2])
    gone = tree.insert(ids(1, 2, 3, 4))
    tree.prune(gone, [])
    assert tree.tokens == 2
    first, second = tree.insert(ids(1, 2, 3, 4)), tree.insert(ids(1, 2, 3, 5))
    tree.prune(first, [second])
    assert [n.ids.tolist() for n in second.path()] == [[1, 2], [3], [5]]
    assert tree.tokens == 4
    tree.prune(second, [])
    assert tree.tokens == 2
    check(tree)


def test_prune_leaves_what_another_ends_at_and_what_is_computed() -> None:
    tree = cache()
    long, short = tree.insert(ids(1, 2, 3)), tree.insert(ids(1, 2))
    tree.prune(long, [short])
    assert [n.ids.tolist() for n in nodes(tree)] == [[1, 2]]
    same = tree.insert(ids(1, 2))
    tree.prune(same, [short])
    assert tree.tokens == 2
    fill(short)
    tree.prune(short, [])
    tree.prune(tree.root, [])
    assert tree.tokens == 2


@pytest.mark.parametrize("seed", range(5))
def test_a_long_random_life(seed: int) -> None:
    """Sequences over three ids, so that they share, branch and nest in every way; a plain dict
    says what each prefix's keys are (`keys`), and `check` compares all of them at each move."""
    rng = random.Random(seed)
    tree = cache()
    waiting: list[Node] = []
    for _ in range(150):
        sequence = [rng.randrange(3) for _ in range(rng.randrange(0, 12))]
        move = rng.random()
        if move < 0.4:
            known, tokens = tree.known(ids(*sequence)), tree.tokens
            node = tree.insert(ids(*sequence))
            assert [int(i) for n in node.path() for i in n.ids] == sequence
            assert tree.tokens - tokens == len(sequence) - known
            waiting.append(node)
        elif move < 0.6 and waiting:
            while waiting:
                fill(waiting.pop())
        elif move < 0.8 and sequence:
            node = tree.insert(ids(*sequence[:-1]))
            fill(node)
            store(tree, sequence, last=1)
        elif move < 0.9 and waiting:
            gone = waiting.pop(rng.randrange(len(waiting)))
            tree.prune(gone, waiting)
        else:
            limit = rng.randrange(30)
            tree.evict(limit, waiting)
            kept = {n for node in waiting for n in node.path()}
            leaves = [n for n in nodes(tree) if not n.children and n not in kept]
            assert tree.tokens <= limit or not leaves
        for node in waiting:
            assert not node.path() or node.path()[0].parent is tree.root
        check(tree)
