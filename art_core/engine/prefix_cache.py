"""Keys and values of prompts already computed, as a radix tree over token ids.

In: token ids. Out: the chain of nodes that spells them; stretches seen before keep their keys and
values, new ones are marked fresh and filled by the next forward pass. One tree belongs to one
adapter at one step. The idea is RadixAttention's (Zheng et al. 2023, arXiv:2312.07104, section 3).
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Iterator

import numpy as np
import torch
from torch import Tensor

from art_core.batch.leaves import common_prefix
from art_core.calls import Ids

_NO_IDS: Ids = np.empty(0, dtype=np.int32)


class Node:
    """A stretch of ids; `k` and `v` are [layers, Hkv, n, D] with rotary applied."""

    __slots__ = ("children", "fresh", "ids", "k", "parent", "used", "v")

    def __init__(self, ids: Ids, k: Tensor, v: Tensor, parent: Node | None, *, fresh: bool) -> None:
        self.ids, self.k, self.v = ids, k, v
        self.parent = parent
        self.children: dict[int, Node] = {}
        self.fresh = fresh
        """True until a forward pass has filled `k` and `v`; what is below is fresh then, too."""
        self.used = 0
        """The cache's clock when the node was last part of a prompt."""

    def __len__(self) -> int:
        return len(self.ids)

    def path(self) -> list[Node]:
        """Nodes from below the root to this one."""
        nodes: list[Node] = []
        node: Node = self
        while node.parent is not None:
            nodes.append(node)
            node = node.parent
        return nodes[::-1]


class PrefixCache:
    """A tree whose root is empty.

    Args:
        layers, kv_heads, head_dim: shape of a position's keys.
        dtype, device: of the stored tensors.
    """

    def __init__(
        self, layers: int, kv_heads: int, head_dim: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        self._shape = (layers, kv_heads, head_dim)
        self._dtype, self._device = dtype, device
        self._clock = 0
        self.root = Node(_NO_IDS, torch.empty(0), torch.empty(0), None, fresh=False)
        self.tokens = 0
        """Positions held."""

    def known(self, ids: Ids) -> int:
        """How many of the first `ids` are in the tree."""
        node, at = self.root, 0
        while at < len(ids) and (child := node.children.get(int(ids[at]))) is not None:
            shared = common_prefix(child.ids, ids[at:])
            at += shared
            if shared < len(child):
                break
            node = child
        return at

    def insert(self, ids: Ids) -> Node:
        """The node at which `ids` end; missing stretches are added as fresh nodes."""
        self._clock += 1
        node, at = self.root, 0
        while at < len(ids):
            child = node.children.get(int(ids[at]))
            if child is None:
                child = self._add(ids[at:], node)
            else:
                shared = common_prefix(child.ids, ids[at:])
                if shared < len(child):
                    child = self._split(child, shared)
            child.used = self._clock
            at += len(child)
            node = child
        return node

    def store(self, ids: Ids, k: Tensor, v: Tensor) -> None:
        """Add a computed sequence: `ids` as a whole, `k` and `v` of its last positions.

        k, v: [layers, Hkv, m, D]; what the tree already holds is not copied again. Everything
        before the last m positions must be computed.
        """
        node = self.insert(ids)
        end = k.shape[2]
        while node.fresh:
            start = end - len(node)
            node.k.copy_(k[:, :, start:end])
            node.v.copy_(v[:, :, start:end])
            node.fresh = False
            end = start
            assert node.parent is not None  # the root is never fresh
            node = node.parent

    def prune(self, end: Node, others: Iterable[Node]) -> None:
        """Take back what a path that ends at `end` added and nobody computed.

        others: where the paths end that still want to be computed.
        """
        wanted = set(others)
        node = end
        while node.fresh and not node.children and node not in wanted:
            node = self._remove(node)

    def evict(self, limit: int, keep: Iterable[Node]) -> None:
        """Drop the longest unused leaves until at most `limit` positions are held.

        keep: where the paths end that are in use; they stay, even above the limit.
        """
        if self.tokens <= limit:
            return
        kept = {self.root, *(part for node in keep for part in node.path())}
        leaves = [(n.used, id(n), n) for n in self._walk() if not n.children and n not in kept]
        heapq.heapify(leaves)
        while leaves and self.tokens > limit:
            parent = self._remove(heapq.heappop(leaves)[2])
            if not parent.children and parent not in kept:
                heapq.heappush(leaves, (parent.used, id(parent), parent))

    def _walk(self) -> Iterator[Node]:
        stack = list(self.root.children.values())
        while stack:
            node = stack.pop()
            yield node
            stack.extend(node.children.values())

    def _add(self, ids: Ids, parent: Node) -> Node:
        node = Node(ids.copy(), self._empty(len(ids)), self._empty(len(ids)), parent, fresh=True)
        parent.children[int(ids[0])] = node
        self.tokens += len(ids)
        return node

    def _remove(self, node: Node) -> Node:
        """Cut the leaf `node` off; returns its parent."""
        assert node.parent is not None
        assert not node.children
        del node.parent.children[int(node.ids[0])]
        self.tokens -= len(node)
        return node.parent

    def _split(self, node: Node, at: int) -> Node:
        """Put a node of the first `at` ids above `node`, which keeps the rest; return the upper.

        The upper part gets memory of its own: it lives longer than what is below it, and a view
        would hold the whole stretch as long. So memory never exceeds twice `tokens`.
        """
        assert node.parent is not None
        k, v = self._empty(at), self._empty(at)
        if not node.fresh:
            k.copy_(node.k[:, :, :at])
            v.copy_(node.v[:, :, :at])
        upper = Node(node.ids[:at], k, v, node.parent, fresh=node.fresh)
        upper.used = node.used
        node.parent.children[int(node.ids[0])] = upper
        node.ids, node.k, node.v = node.ids[at:], node.k[:, :, at:], node.v[:, :, at:]
        node.parent = upper
        upper.children[int(node.ids[0])] = node
        return upper

    def _empty(self, n: int) -> Tensor:
        layers, kv_heads, head_dim = self._shape
        shape = (layers, kv_heads, n, head_dim)
        return torch.empty(shape, dtype=self._dtype, device=self._device)
