"""Trees packed into rows: what a row holds, what it repeats, and how full it is."""

from collections.abc import Sequence
from itertools import combinations, pairwise

import numpy as np
import pytest

from art_core.batch.pack import best_subset, pack

Leaves = tuple[list[int], list[int]]
"""Lengths, and positions shared with the leaf before."""


def leaves_of(paths: Sequence[Sequence[int]]) -> Leaves:
    """What `pack` is told of paths, none of which begins another."""
    ordered = sorted(map(tuple, paths))
    shared = [0]
    for one, other in pairwise(ordered):
        same = [a == b for a, b in zip(one, other, strict=False)]
        shared.append(same.index(False))
    return [len(path) for path in ordered], shared


def computed(row: Sequence[int], leaves: Leaves) -> int:
    """Positions of a row: each leaf's own, that is less what it shares with the leaf before."""
    lengths, shared = leaves
    first = lengths[row[0]]
    pairs = pairwise(row)
    return first + sum(lengths[b] - min(shared[a + 1 : b + 1]) for a, b in pairs)


def check(rows: Sequence[Sequence[int]], leaves: Leaves, room: int) -> list[int]:
    """Every leaf is in one row, and no row is too long; the rows' sizes."""
    assert sorted(leaf for row in rows for leaf in row) == list(range(len(leaves[0])))
    assert all(list(row) == sorted(row) for row in rows)
    sizes = [computed(row, leaves) for row in rows]
    assert max(sizes) <= room
    return sizes


def random_leaves(seed: int) -> Leaves:
    """A forest of nested stems: at each place a path may go on as several."""
    rng = np.random.default_rng(seed)
    paths: list[tuple[int, ...]] = []

    def grow(path: tuple[int, ...], level: int) -> None:
        path += (*rng.integers(0, 99, rng.integers(1, 30)).tolist(),)
        ways = int(rng.integers(2, 5)) if level < 4 and rng.random() < 0.7 else 0
        for way in range(ways):
            grow((*path, 100 + way), level + 1)
        if not ways:
            paths.append(path)

    for tree in range(int(rng.integers(1, 6))):
        grow((200 + tree,), 0)
    return leaves_of(paths)


@pytest.mark.parametrize("seed", range(40))
def test_any_forest_is_laid_whole_into_any_room(seed: int) -> None:
    leaves = random_leaves(seed)
    longest = max(leaves[0])
    whole = sum(leaves[0]) - sum(leaves[1])
    for room in (longest, longest + 7, 2 * longest, 5 * longest):
        assert sum(check(pack(*leaves, room), leaves, room)) >= whole
    assert check(pack(*leaves, whole), leaves, whole) == [whole], "one row holds all, once"


def test_small_trees_are_packed_whole() -> None:
    """Trees of 6, 5, 5 and 4 positions fill two rows of 10."""
    leaves = [6, 5, 5, 4], [0, 0, 0, 0]
    assert pack(*leaves, 10) == [[0, 3], [1, 2]]


def test_largest_first_is_mended_by_exchange() -> None:
    """Of 7, 6 and 4 in a room of 10 the largest alone leaves 3; 6 and 4 leave nothing."""
    assert pack([7, 6, 4], [0, 0, 0], 10) == [[0], [1, 2]]


def test_a_tree_is_cut_where_it_repeats_least() -> None:
    """Two trees of four leaves, stems of 1 and 6. A row of 40 takes the first tree (1 + 4 * 5 = 21)
    or the second (6 + 4 * 5 = 26) whole and a part of the other; cutting the first repeats 1.
    """
    leaves = [6] * 4 + [11] * 4, [0, 1, 1, 1, 0, 6, 6, 6]
    rows = pack(*leaves, 40)
    assert [set(row) & {4, 5, 6, 7} for row in rows] == [{4, 5, 6, 7}, set()]
    assert check(rows, leaves, 40) == [26 + 1 + 2 * 5, 1 + 2 * 5]  # leaves 0 and 1 are in the first


def test_the_next_row_begins_with_the_rest_of_a_cut_tree() -> None:
    """Ten leaves of 10 over a stem of 5, rows of 35: 3 + 3 + 3 + 1 leaves, the stem four times."""
    leaves = [15] * 10, [0] + [5] * 9
    rows = pack(*leaves, 35)
    assert rows == [[0, 1, 2], [3, 4, 5], [6, 7, 8], [9]]
    assert check(rows, leaves, 35) == [35, 35, 35, 15]


def test_a_cut_that_repeats_more_than_it_fills_is_not_made() -> None:
    """A stem of 20 with two leaves of 9 beside a tree of 60; 35 positions are left in a row of 95.

    One leaf would fill 9 and make the next row repeat 20.
    """
    leaves = [29, 29, 60], [0, 20, 0]
    assert pack(*leaves, 95) == [[0, 1], [2]]


def test_a_trajectory_that_branches_at_every_turn_needs_no_recursion() -> None:
    """A template that strips thinking: each call leaves the common path; 2000 turns of 3 + 2.

    The last call reads 6002, and a row of 6102 has 100 left. From the first call on a row of r
    positions takes the next (r - 3 t) / 5 calls at turn t, so that 2/5 of what is left of the 6102
    stays for the rest: log(6102 / 100) / log(5 / 2) = 4.5, then the last few.
    """
    turns = 2000
    lengths = [3 * turn + 5 for turn in range(turns)]
    leaves = lengths[::-1], [0, *(3 * turn for turn in range(turns - 1, 0, -1))]
    room = max(lengths) + 100
    rows = pack(*leaves, room)
    check(rows, leaves, room)
    assert len(rows) <= 10


def test_thousands_of_short_calls_over_one_stem_fill_their_rows() -> None:
    """3000 leaves of 100 to 900 over a stem of 300: rows of 4096 hold 3796 of them."""
    rng = np.random.default_rng(0)
    own = rng.integers(100, 900, 3000).tolist()
    leaves = [300 + n for n in own], [0] + [300] * 2999
    sizes = check(pack(*leaves, 4096), leaves, 4096)
    assert len(sizes) == -(-sum(own) // 3796), "no fewer rows could hold them"


@pytest.mark.parametrize("seed", range(8))
def test_best_subset_is_the_best(seed: int) -> None:
    """Against all subsets."""
    rng = np.random.default_rng(seed)
    sizes = rng.integers(1, 50, 9).tolist()
    room = int(rng.integers(0, 200))
    chosen = best_subset(sizes, room)
    sums = {sum(some) for n in range(10) for some in combinations(sizes, n)}
    assert len(set(chosen)) == len(chosen)
    assert sum(sizes[i] for i in chosen) == max(total for total in sums if total <= room)


def test_rows_of_an_agents_step_are_full_and_repeat_little() -> None:
    """64 groups x 8 rollouts over a stem of 400 for all and 100-300 a group, rollouts of 1.3k-2.9k.

    In rows of 32,768 at least 98 % full but for the last one, and at most 1.02 times the tree.
    """
    rng = np.random.default_rng(0)
    lengths, shared = [], []
    for _ in range(64):
        stem = 400 + int(rng.integers(100, 300))
        for rollout in range(8):
            shared.append(stem if rollout else 400)
            lengths.append(stem + int(rng.integers(1300, 2900)))
    shared[0] = 0
    rows = pack(lengths, shared, 32_768)
    sizes = check(rows, (lengths, shared), 32_768)
    assert sum(sizes) <= 1.02 * (sum(lengths) - sum(shared))
    assert sum(sizes) - min(sizes) >= 0.98 * 32_768 * (len(rows) - 1)
