"""Which rows of some data come in which optimizer step, over all epochs.

In: how many rows there are, their order in each epoch, the size of a batch. Out: batches of row
numbers, and steps as rows and back. No batch spans two epochs. The order depends on no batch, so
that a run whose batches change goes on at the same row.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Plan:
    """Passes over `count` rows."""

    count: int
    """1 or more."""
    epochs: int
    batch: int
    """Rows an optimizer step; the last of an epoch may have fewer."""
    order: Callable[[int], list[int]]
    """The rows of an epoch, each once."""

    @property
    def steps_per_epoch(self) -> int:
        """Optimizer steps."""
        return -(-self.count // self.batch)

    @property
    def steps(self) -> int:
        """Optimizer steps of all epochs."""
        return self.epochs * self.steps_per_epoch

    @property
    def rows(self) -> int:
        """Of all epochs."""
        return self.epochs * self.count

    def step_at(self, rows: int) -> int:
        """Optimizer steps that lie before row `rows`, in batches of today's size."""
        epoch, begin = divmod(rows, self.count)
        return epoch * self.steps_per_epoch + begin // self.batch

    def rows_at(self, step: int) -> int:
        """Rows that lie before an optimizer step."""
        epoch, done = divmod(step, self.steps_per_epoch)
        return epoch * self.count + done * self.batch

    def chunk(self, rows: int, end: int, size: int) -> list[list[int]]:
        """At most `size` batches from row `rows` on and before row `end`, of one epoch."""
        epoch, begin = divmod(rows, self.count)
        order = self.order(epoch)
        last = min(len(order), begin + end - rows, begin + size * self.batch)
        return [order[at : min(at + self.batch, last)] for at in range(begin, last, self.batch)]


def rows_in(batches: Sequence[Sequence[int]]) -> int:
    """How many rows the batches have."""
    return sum(map(len, batches))
