"""Which leaves of the forest are computed together: trees packed into rows.

In: the leaves in lexicographic order, as lengths and as positions that each shares with the one
before; the room of a row. Out: the leaves of each row. Trees go whole where they fit. Where one
must be cut, its stem is computed again in the next row, so it is cut where that repeats least for
what it fills, and the next row begins with the rest of it. Knows no ids. Least cost is NP-hard
(bin packing); this is largest-first with an exact subset sum over a few.
"""

from __future__ import annotations

from bisect import bisect_right, insort
from collections.abc import Sequence
from dataclasses import dataclass, field

_EXACT = 12
"""Children that are exchanged for others to fill a gap: at most this many each way."""
_CANDIDATES = 24
"""Children that are looked at for a cut."""
_SMALL = 0.002
"""A gap of this share of a row is left as it is."""


@dataclass(eq=False, slots=True)
class _Node:
    """A stem, and what hangs below it."""

    depth: int
    """Positions from the root to the stem's end."""
    stem: int = 0
    """Positions of its own, above the children."""
    leaf: int = -1
    """Index of the leaf that it is; -1: it has children."""
    size: int = 0
    """`stem` and all that is below."""
    least: int = 0
    """Positions to compute for the cheapest of its leaves, `stem` included."""
    children: list[_Node] = field(default_factory=list)
    """By size, rising; less `begun`."""
    begun: _Node | None = None
    """The child of which a part is in an earlier row."""
    flat: bool = True
    """True if all children are leaves."""

    def close(self, above: int) -> None:
        """Set what follows from the children, which are all there; `above`: the parent's depth."""
        # Of equals the first comes last, and is so taken first.
        self.children.reverse()
        self.children.sort(key=_size)
        self.flat = all(child.leaf >= 0 for child in self.children)
        self.stem = self.depth - above
        self.size = self.stem + sum(child.size for child in self.children)
        self.least = self._least()

    def shrink(self, size: int) -> None:
        """Set what follows from children that were taken: it has `size` now."""
        self.size = size
        self.least = self._least()

    def _least(self) -> int:
        below = [] if self.begun is None else [self.begun.least]
        if self.flat:
            below += [self.children[0].size] if self.children else []
        else:
            below += [child.least for child in self.children]
        return self.stem + min(below, default=0)


def pack(lengths: Sequence[int], shared: Sequence[int], room: int) -> list[list[int]]:
    """The leaves of each row, as rising indices; every leaf is in exactly one row.

    Rows come in the order of their first leaves.

    Args:
        lengths: positions of each leaf's path; none is longer than `room`.
        shared: positions that leaf i's path has in common with leaf i - 1's, fewer than either
            has; `shared[0]` is not read.
        room: positions a row may have.
    """
    root = _tree(lengths, shared)
    rows = []
    while root.children or root.begun is not None:
        rows.append(sorted(_fill(root, room)))
    return sorted(rows)


def _tree(lengths: Sequence[int], shared: Sequence[int]) -> _Node:
    """The compressed tree of the paths, below a root of no positions."""
    stack = [_Node(0)]

    def close(down_to: int) -> None:
        while stack[-1].depth > down_to:
            node = stack.pop()
            if stack[-1].depth < down_to:
                stack.append(_Node(down_to))
            node.close(stack[-1].depth)
            stack[-1].children.append(node)

    for leaf, length in enumerate(lengths):
        close(shared[leaf] if leaf else 0)
        stack.append(_Node(length, leaf=leaf))
    close(0)
    stack[0].close(0)
    return stack[0]


def _fill(root: _Node, room: int) -> list[int]:
    """Take leaves for one row out of the tree."""
    small = int(room * _SMALL)
    taken: list[int] = []
    path = [(root, root.size)]
    gap = room
    while True:
        node, left = path[-1]
        if node.begun is not None and node.begun.size > gap:
            cut: _Node | None = node.begun
        else:
            filled = _take_whole(node, gap, small, taken)
            gap -= filled
            path[-1] = node, left - filled
            cut = _to_cut(node, gap, room) if gap > small else None
        if cut is None:
            break
        gap -= cut.stem
        path.append((cut, cut.size))
    while len(path) > 1:
        node, left = path.pop()
        above, left_above = path[-1]
        left_above -= _put_back(above, node, left)
        for child in _largest_first(above.children, gap):
            gap -= child.size
            left_above -= child.size
            _leaves(child, taken)
        path[-1] = above, left_above
    assert taken, "a leaf is longer than a row"
    return taken


def _take_whole(node: _Node, gap: int, small: int, taken: list[int]) -> int:
    """Move children that fit into `taken`, the begun one first; the positions that they fill."""
    filled = 0
    if node.begun is not None:
        filled += node.begun.size
        _leaves(node.begun, taken)
        node.begun = None
    chosen = _largest_first(node.children, gap - filled)
    filled += sum(child.size for child in chosen)
    if gap - filled > small and node.children and chosen:
        filled += _exchange(node.children, chosen, gap - filled)
    for child in chosen:
        _leaves(child, taken)
    return filled


def _largest_first(children: list[_Node], gap: int) -> list[_Node]:
    """Take out of `children` the largest that fits, again and again."""
    chosen = []
    at = len(children)
    while (at := bisect_right(children, gap, hi=at, key=_size)) > 0:
        at -= 1
        chosen.append(children.pop(at))
        gap -= chosen[-1].size
    return chosen


def _exchange(children: list[_Node], chosen: list[_Node], gap: int) -> int:
    """Swap a few of `chosen` for others of `children` to close the gap; by how much it did."""
    free = chosen[-_EXACT:]
    room = gap + sum(child.size for child in free)
    fitting = children[: bisect_right(children, room, key=_size)]
    free += fitting[:: -(-len(fitting) // _EXACT) or 1]
    best = {id(free[i]) for i in best_subset([child.size for child in free], room)}
    before = sum(child.size for child in chosen)
    for child in free:
        is_chosen = child in chosen
        if is_chosen and id(child) not in best:
            chosen.remove(child)
            insort(children, child, key=_size)
        elif not is_chosen and id(child) in best:
            children.remove(child)
            chosen.append(child)
    return sum(child.size for child in chosen) - before


def best_subset(sizes: Sequence[int], room: int) -> list[int]:
    """Indices of those of `sizes` whose sum is the largest that is at most `room`.

    Bit n of `reach[i]` says that the first i sizes can sum to n.
    """
    within = (1 << (room + 1)) - 1
    reach = [1]
    for size in sizes:
        reach.append((reach[-1] | reach[-1] << size) & within)
    total = reach[-1].bit_length() - 1
    chosen = []
    for i in range(len(sizes) - 1, -1, -1):
        if not reach[i] >> total & 1:
            chosen.append(i)
            total -= sizes[i]
    return chosen[::-1]


def _to_cut(node: _Node, gap: int, room: int) -> _Node | None:
    """The child of which a part goes into the gap; None if it had better stay empty.

    A child that fits into a row of its own is only cut if that fills more than it repeats; a
    larger one must be cut anyhow, so that whatever of it goes into the gap is won.
    """
    fitting = [child for child in node.children if child.least <= gap and child.leaf < 0]
    best, most = None, 0
    for child in sorted(fitting, key=_stem)[:_CANDIDATES]:
        gain = _fillable(child, gap - child.stem)
        if node.depth + child.size <= room:
            gain -= child.stem
        if gain > most:
            best, most = child, gain
    if best is not None:
        node.children.remove(best)
        node.begun = best
    return best


def _fillable(node: _Node, gap: int) -> int:
    """Positions below `node` that would go into the gap, at least."""
    fitting = node.children[: bisect_right(node.children, gap, key=_size)]
    sizes = [child.size for child in fitting[-2 * _EXACT :]]
    return max(sum(sizes[i] for i in best_subset(sizes, gap)), node.least - node.stem)


def _put_back(above: _Node, node: _Node, left: int) -> int:
    """Put a child that was cut back with what is left of it; by how much it has shrunk."""
    before = node.size
    if not node.children and node.begun is None:
        above.begun = None
        return before
    above.begun = node
    node.shrink(left)
    return before - left


def _leaves(node: _Node, into: list[int]) -> None:
    """All leaves at or below `node`."""
    below = [node]
    while below:
        node = below.pop()
        if node.leaf >= 0:
            into.append(node.leaf)
        below += node.children
        if node.begun is not None:
            below.append(node.begun)


def _size(node: _Node) -> int:
    return node.size


def _stem(node: _Node) -> int:
    return node.stem
