"""What a run keeps beside its checkpoints and metrics, so that a second start goes on with it.

In: the phases of a run as they pass, the evaluations before and after. Out: the model's state in
the run folder, written at the end of every phase and step. Left out: figures of the steps, which
are in `history.jsonl`.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from typing import Any

from art_core.errors import ConfigError
from art_core.model import Model
from art_langgraph.quickstart.recipe import Recipe
from art_langgraph.quickstart.score import Score

_KEY = "quickstart"


class Journal:
    """The notes of one run.

    Args:
        model: whose state holds them; need not be registered.
        recipe: of the run.

    Raises:
        ConfigError: the run began with another recipe.
    """

    def __init__(self, model: Model[Any], recipe: Recipe) -> None:
        kept: dict[str, Any] = (model.read_state() or {}).get(_KEY, {})
        self.is_new = not kept
        self.phases: dict[str, float] = kept.get("phases", {})
        """Seconds, over all starts, by phase."""
        self.first_reward_seconds: float | None = kept.get("first_reward_seconds")
        """From the command's first start to the first reward, download apart."""
        self.before = _score(kept.get("before"))
        self.after = _score(kept.get("after"))
        self.stopped: str | None = kept.get("stopped")
        """Why training ended: "learned" or "max_steps"; None while it goes on."""
        self._model = model
        self._settings = recipe.settings()
        self._phase: str | None = None
        self._since = 0.0
        if kept:
            _check_same(kept["settings"], self._settings, model.name)
        self._max_steps = recipe.max_steps
        if self.stopped == "max_steps" and recipe.max_steps > kept["max_steps"]:
            self.stopped = self.after = None  # asked to go on for longer

    @property
    def seconds(self) -> float:
        """Seconds of all phases, over all starts."""
        return sum(self.phases.values())

    @property
    def finished(self) -> bool:
        """True if there is nothing left to do."""
        return self.after is not None

    @contextmanager
    def phase(self, name: str, *, began: float | None = None) -> Iterator[None]:
        """Count the time of the context as `name`, and save at its end, however it ends.

        Args:
            name: of the phase.
            began: `time.monotonic()` at its true beginning; None means now.
        """
        self._phase, self._since = name, time.monotonic() if began is None else began
        try:
            yield
        finally:
            self.save()
            self._phase = None

    def note_first_reward(self) -> None:
        """The first reward is known now; only the first call counts."""
        self._count()
        if self.first_reward_seconds is None:
            self.first_reward_seconds = self.seconds

    def save(self) -> None:
        """Write all that is known by now."""
        self._count()
        kept = {
            "settings": self._settings,
            "max_steps": self._max_steps,
            "phases": self.phases,
            "first_reward_seconds": self.first_reward_seconds,
            "before": self.before and asdict(self.before),
            "after": self.after and asdict(self.after),
            "stopped": self.stopped,
        }
        self._model.merge_state({_KEY: kept})

    def _count(self) -> None:
        if self._phase is not None:
            now = time.monotonic()
            self.phases[self._phase] = self.phases.get(self._phase, 0.0) + now - self._since
            self._since = now


def _score(kept: dict[str, Any] | None) -> Score | None:
    return None if kept is None else Score.from_json(kept)


def _check_same(kept: dict[str, Any], now: dict[str, Any], name: str) -> None:
    old, new = dict(_leaves(kept)), dict(_leaves(now))
    changed = [key for key in {**old, **new} if old.get(key) != new.get(key)]
    if changed:
        raise ConfigError(
            f"run {name!r} began with other settings",
            got={key: new.get(key) for key in changed},
            expected=str({key: old.get(key) for key in changed}),
            fix="Start anew with --fresh; the old run is kept.",
        )


def _leaves(settings: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Every setting by its whole name, like "train.learning_rate"."""
    for key, value in settings.items():
        if isinstance(value, dict):
            yield from _leaves(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value
