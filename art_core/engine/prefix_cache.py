"""Keys and values of prompts already computed, as a radix tree over token ids.

In: token ids. Out: the chain of nodes that spells them; stretches seen before keep their keys and
values, new ones are marked fresh and filled by the next forward pass. One tree belongs to one
adapter at one step. The idea is RadixAttention's (Zheng et al. 2023, arXiv:2312.07104, section 3).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import numpy as np
import torch
from torch import Tensor

from art_core.batch.forest import common_prefix
from art_core.calls import Ids

_NO_IDS: Ids = np.empty(0, dtype=np.int32)


class Node:
    """A stretch of ids; `k` and `v` are [layers, Hkv, n, D] with rotary applied."""

    __slots__ = ("children", "fresh", "ids", "k", "parent", "used", "v")

    def __init__(self, ids: Ids, k: Tensor, v: Tensor, parent: Node | None) -> None:
        self.ids, self.k, self.v = ids, k, v
        self.parent = parent
        self.children: dict[int, Node] = {}
        self.fresh = True
        """True until a forward pass has filled `k` and `v`."""
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
        self._options = {"dtype": dtype, "device": device}
        self._clock = 0
        self.root = Node(_NO_IDS, torch.empty(0), torch.empty(0), None)
        self.tokens = 0
        """Positions held."""

    def insert(self, ids: Ids) -> Node:
        """The node at which `ids` end; missing stretches are added as fresh nodes."""
        self._clock += 1
        node, at = self.root, 0
        while at < len(ids):
            child = node.children.get(int(ids[at]))
            if child is None:
                child = self._new(ids[at:], node)
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

        k, v: [layers, Hkv, m, D]; what the tree already holds is not copied again.
        """
        node = self.insert(ids)
        end = len(ids)
        while node.fresh:
            start = end - len(node)
            offset = start - (len(ids) - k.shape[2])
            node.k.copy_(k[:, :, offset : offset + len(node)])
            node.v.copy_(v[:, :, offset : offset + len(node)])
            node.fresh = False
            end = start
            assert node.parent is not None
            node = node.parent

    def evict(self, limit: int, keep: Iterable[Node]) -> None:
        """Drop the longest unused leaves until at most `limit` positions are held."""
        if self.tokens <= limit:
            return
        kept = {id(n) for node in keep for n in node.path()}
        while self.tokens > limit:
            leaves = [n for n in self._walk() if not n.children and id(n) not in kept]
            if not leaves:
                return
            for leaf in sorted(leaves, key=lambda n: n.used):
                assert leaf.parent is not None
                del leaf.parent.children[int(leaf.ids[0])]
                self.tokens -= len(leaf)
                if self.tokens <= limit:
                    return

    def _walk(self) -> Iterator[Node]:
        stack = list(self.root.children.values())
        while stack:
            node = stack.pop()
            yield node
            stack.extend(node.children.values())

    def _new(self, ids: Ids, parent: Node) -> Node:
        layers, kv_heads, head_dim = self._shape
        shape = (layers, kv_heads, len(ids), head_dim)
        node = Node(
            ids.copy(), torch.empty(shape, **self._options), torch.empty(shape, **self._options), parent
        )
        parent.children[int(ids[0])] = node
        self.tokens += len(ids)
        return node

    def _split(self, node: Node, at: int) -> Node:
        """Put a node of the first `at` ids above `node`, which keeps the rest; return the upper."""
        assert node.parent is not None
        upper = Node(node.ids[:at], node.k[:, :, :at], node.v[:, :, :at], node.parent)
        upper.fresh, upper.used = node.fresh, node.used
        node.parent.children[int(node.ids[0])] = upper
        node.ids, node.k, node.v = node.ids[at:], node.k[:, :, at:], node.v[:, :, at:]
        node.parent = upper
        upper.children[int(node.ids[0])] = node
        return upper
