"""Which adapter stands merged in memory: one at a time, the one that is asked.

In: the adapter that a pass is for. Out: its `Merged` weights, or None where the pass has to go
through the modules. Adapters that are asked by turns are not merged by turns: that costs more than
it saves.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from art_core.nn.blocks import Merged, copied_bytes, is_block_model, merge
from art_core.nn.copying import LIMIT_BYTES

PATIENCE = 8
"""Passes in a row after which an adapter takes the place of another one."""


class Merging:
    """Of one model; owned by the model's thread."""

    def __init__(self, causal: Any) -> None:
        self._causal = causal
        self._is_possible = is_block_model(causal) and copied_bytes(causal) <= LIMIT_BYTES
        self._name: str | None = None
        self._learns = False
        self._merged: Merged | None = None
        self._strangers: list[str | None] = []  # who asked since the holder did

    def weights(self, name: str | None, *, learns: bool) -> Merged | None:
        """Those of the adapter as it stands; it `learns` where its matrices need gradients."""
        if not self._is_possible:
            return None
        if self._holds(name, learns):
            self._strangers.clear()
            return self._merged
        if not self._yields_to(name, learns):
            return None
        self.forget()  # before the new copy is made
        self._merged = merge(self._causal, name, learns=learns)
        self._name, self._learns = name, learns
        return self._merged

    @property
    def bytes_to_learn(self) -> int:
        """What the weights of an adapter that learns take here, beside the model's own."""
        if not self._is_possible:
            return 0
        head = self._causal.get_output_embeddings().weight  # stays as it is while one learns
        return copied_bytes(self._causal) - int(head.numel() * head.element_size())

    @property
    def head(self) -> Tensor | None:
        """The output matrix as it is read fastest, if there is a copy."""
        return None if self._merged is None else self._merged.head

    def forget(self) -> None:
        """Give the memory back: nobody is merged."""
        self._merged = None
        self._strangers.clear()

    def _holds(self, name: str | None, learns: bool) -> bool:
        return (
            self._merged is not None
            and (self._name, self._learns) == (name, learns)
            and self._merged.is_current
        )

    def _yields_to(self, name: str | None, learns: bool) -> bool:
        if self._merged is None or self._name == name or self._learns or learns:
            return True
        if self._strangers and self._strangers[-1] != name:
            self._strangers.clear()
        self._strangers.append(name)
        return len(self._strangers) >= PATIENCE
