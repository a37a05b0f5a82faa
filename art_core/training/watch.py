"""`Watch`: how far a try to train has come, for whoever waits, and for what is tried next.

In: the rows as they are planned, begun and done. Out: positions told, and the sizes that say which
rows would fit where memory ran out.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from art_core.batch.forest import Row
from art_core.errors import TrainingError
from art_core.training.phases import Phases

OnProgress = Callable[[int, int], None]
"""Called with (positions done, positions in all)."""
OnPlan = Callable[[int, int], None]
"""Called with (positions of the longest row, optimizer steps) before any is computed."""


@dataclass
class Watch:
    """How far a try has come."""

    on_progress: OnProgress | None
    on_plan: OnPlan | None = None
    phases: Phases = field(default_factory=Phases)
    total: int = 0
    done: int = 0
    longest_row: int = 0
    row: int = 0
    """Positions of the row under way."""
    fitted: int = 0
    """Positions of the longest row that was done."""

    def plan(self, updates: Iterable[Sequence[Row]]) -> None:
        """Say which rows will be computed."""
        sizes = [[len(row) for row in rows] for rows in updates]
        self.total, self.longest_row = sum(map(sum, sizes)), max(map(max, sizes))
        self.row = self.longest_row
        if self.on_plan is not None:
            self.on_plan(self.longest_row, len(sizes))

    def begin(self, row: Row) -> None:
        self.row = len(row)

    def end(self, row: Row) -> None:
        self.done += len(row)
        self.fitted = max(self.fitted, len(row))
        self.tell()

    def tell(self) -> None:
        """Say how far it is; also where that is as far as before, so that it can be stopped."""
        if self.on_progress is not None:
            self.on_progress(self.done, self.total)


def stopped() -> TrainingError:
    """What a step ends with that was asked to stop."""
    return TrainingError(
        "the step was stopped before its end",
        fix="Nothing has changed; the same groups can be trained again.",
    )


Work = Callable[[Watch, int], dict[str, float]]
"""Trains with rows of at most so many positions; tells the watch; returns figures."""
