"""The workbench in the trainer's process, for the one that serves: it comes back after a crash.

In: the requests of training/requests.py. Out: as `Workbench`. If the process has ended, the next
request starts another, and adapters are opened in it again, each when it is next asked for, as its
last whole checkpoint has it. For one thread.
"""

from __future__ import annotations

import logging
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

from art_core.checkpoints import folder_name
from art_core.errors import TrainerDied
from art_core.local.trainer_process import Patience, TrainerProcess
from art_core.sealed import remove_leftovers
from art_core.training.apart import Request
from art_core.training.requests import Learned, Lesson, Loading, Opened, Opening, Question
from art_core.training.watch import OnProgress

_log = logging.getLogger(__name__)


class WorkbenchApart:
    """Starts the process and loads the base model.

    Args:
        folder: of this process alone.

    Raises:
        BaseModelError, ConfigError: as `load_module`.
        TrainerDied: the process ended meanwhile.
        EngineError: another process uses the folder.
    """

    def __init__(self, loading: Loading, folder: Path, patience: Patience | None = None) -> None:
        self.gives_back = False
        """Set while the GPU's memory is another's after each request."""
        self._process = TrainerProcess(loading, folder, patience)
        self.loaded = self._process.start()
        self._known: dict[str, Opening] = {}
        """Adapters, as their last whole checkpoint has them."""
        self._there: set[str] = set()
        """Those that the process has."""

    def open(self, opening: Opening) -> Opened:
        """As `Workbench.open`."""
        opened: Opened = self._asked(opening)
        first = opening.checkpoint or opening.checkpoints / folder_name(0)
        self._known[opening.adapter] = replace(opening, checkpoint=first)
        self._there.add(opening.adapter)
        return opened

    def learn(self, lesson: Lesson, on_progress: OnProgress, stop: threading.Event) -> Learned:
        """As `Workbench.learn`.

        Raises:
            TrainerDied: the process ended or hung. The step is not on disk.
        """
        path = lesson.checkpoints / folder_name(lesson.step)
        was_there = path.exists()
        try:
            learned: Learned = self._asked(
                lesson, about=lesson.adapter, on_progress=on_progress, stop=stop
            )
        except BaseException:
            if not self._process.runs and not was_there:
                _remove(path)
            raise
        known = self._known[lesson.adapter]
        self._known[lesson.adapter] = replace(known, checkpoint=learned.path)
        return learned

    def loss(self, question: Question) -> float:
        """As `Workbench.loss`."""
        found: float = self._asked(question, about=question.adapter)
        return found

    def close(self) -> None:
        """End the process."""
        self._process.close()

    def _asked(self, request: Request, *, about: str | None = None, **given: Any) -> Any:
        """Ask; once more of a new process, if the old one had ended before it heard of it.

        Args:
            about: an adapter that has to be there; None: none has to.
        """
        for is_last in (False, True):
            self._ready()
            if about is not None and about not in self._there:
                self._process.ask(self._known[about], gives_back=self.gives_back)
                self._there.add(about)
            try:
                return self._process.ask(request, gives_back=self.gives_back, **given)
            except TrainerDied:
                if is_last or not self._process.had_ended:
                    raise
        raise AssertionError("the last try returns or raises")

    def _ready(self) -> None:
        """Have a process with the base model in memory."""
        if self._process.runs:
            return
        _log.warning("the trainer's process is gone; a new one starts")
        self._there.clear()
        self._process.start()


def _remove(path: Path) -> None:
    """A step that was saved by a process which did not live to say so was not made."""
    if path.exists():
        path.rename(path.with_name(f".tmp-{path.name}-unsaid"))  # at once
    remove_leftovers(path)
