"""A step's work done whole or not at all: planned, tried, and tried once more in less memory.

In: work on rows of at most some size. Out: its figures, with what memory it took and how long its
phases were; or an error, and nothing has changed. Left out: how the old state is put back
(trainer.py), which row sizes are possible (out_of_memory.py).
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass

import torch

from art_core.batch.sample import Sample
from art_core.config import TrainConfig, TrainSFTConfig
from art_core.errors import TrainingError
from art_core.readiness.about_machine import gib
from art_core.readiness.memory import GIB
from art_core.step_times import PREFIX
from art_core.training.memory_peak import MemoryPeak
from art_core.training.memory_plan import MemoryPlan, Planner
from art_core.training.out_of_memory import OutOfMemory, free, is_out_of_memory
from art_core.training.phases import Phases
from art_core.training.watch import OnProgress, Watch, Work

_log = logging.getLogger(__name__)


@dataclass
class Attempts:
    """Of one trainer."""

    planner: Planner
    undone_on_error: Callable[[], AbstractContextManager[None]]
    """Puts everything back as it was; torch's errors and want of memory leave it as a
    `TrainingError` that holds no tensor."""
    forget_from: Callable[[int], bool]
    """Has rows of at least so many positions compute again what they kept; False if they did."""
    device: torch.device
    _told_row: int = 0
    """The longest row whose plan was told."""

    def run(
        self,
        work: Work,
        samples: Sequence[Sample],
        config: TrainConfig | TrainSFTConfig,
        on_progress: OnProgress | None,
    ) -> dict[str, float]:
        """Do `work`; an error undoes it.

        Args:
            samples: all that it trains.

        Raises:
            NotEnoughMemory: by the estimate it can't fit; nothing was computed.
            TrainingError: torch failed, or memory ran out twice.
        """
        longest = max(sample.positions for sample in samples)
        begun = time.perf_counter()
        may_check, settings = config.beyond_memory == "refuse", type(config).__name__

        def attempt(row_size: int, *, checks: bool) -> dict[str, float] | OutOfMemory:
            return self._try(work, longest, row_size, on_progress, settings, checks=checks)

        found = attempt(config.max_tokens_per_row, checks=may_check)
        again: dict[str, float] = {}
        if isinstance(found, OutOfMemory) and (size := self._retry(found)) is not None:
            lost = time.perf_counter() - begun
            _log.warning("%s; the step begins anew with rows of at most %d", found, size)
            again = {"memory/row_tried_again": size, f"{PREFIX}lost": lost}
            free()
            found = attempt(size, checks=False)
        if isinstance(found, OutOfMemory):
            raise found.error()
        return {**found, **again}

    def _retry(self, failed: OutOfMemory) -> int | None:
        """Row size for a second try, in which nothing is kept that can be computed again; None: it
        would be the first one once more."""
        size = failed.smaller or failed.longest_row
        forgets = self.forget_from(size)
        return size if forgets else failed.smaller

    def _try(
        self,
        work: Work,
        longest_call: int,
        row_size: int,
        on_progress: OnProgress | None,
        settings: str,
        *,
        checks: bool,
    ) -> dict[str, float] | OutOfMemory:
        """Figures; or nothing has changed and no tensor is held."""
        peak, plans = MemoryPeak(self.device), list[MemoryPlan]()

        def planned(row: int, updates: int) -> None:
            plan = self.planner.plan(row, updates)
            if plan is not None:
                plans.append(plan)
                self._tell(plan)
                if checks:
                    plan.check(longest_call, settings)

        watch = Watch(on_progress, planned, Phases(self.device))
        try:
            with self.undone_on_error():
                found = work(watch, row_size)
        except TrainingError as error:
            if error.__cause__ is None or not is_out_of_memory(error.__cause__):
                raise
            return OutOfMemory(
                reason=str(error.__cause__),
                row=watch.row,
                fitted=watch.fitted,
                longest_row=watch.longest_row,
                longest_call=longest_call,
                settings=settings,
            )
        memory = plans[-1].figures() if plans else {}
        if taken := peak.bytes:
            memory["memory/peak_gib"] = taken / GIB
        if plans:
            _log.debug("memory: %s at the peak, %s planned", gib(taken), gib(plans[-1].expected))
        return {**found, **watch.phases.figures(), **memory}

    def _tell(self, plan: MemoryPlan) -> None:
        """Once for rows of this length, and loudly where it may not fit."""
        if plan.step.row <= self._told_row:
            return
        self._told_row = plan.step.row
        level = logging.WARNING if plan.is_tight else logging.INFO
        _log.log(level, "memory plan: %s", plan)
