"""Served names: which policy answers under which name.

In: models as they are published step by step. Out: for a name that a client asks for, the adapter
that answers. "name" is the latest step, "name@N" a pinned one, the base model's own name no
adapter at all.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass

from art_core.config import SamplingConfig
from art_core.engine.api_errors import ApiError
from art_core.engine.base import AdapterRef
from art_core.errors import ConfigError


@dataclass(frozen=True)
class Served:
    """What answers a request."""

    name: str
    """Model name without its step; the base model's name if there is no adapter."""
    adapter: AdapterRef | None
    sampling: SamplingConfig
    """Settings of requests that name none."""
    seed: int
    """Seed of the sampling noise of requests that name none."""

    @property
    def step(self) -> int | None:
        """The policy's step; None for the base model."""
        return None if self.adapter is None else self.adapter.step

    @property
    def policy(self) -> str:
        """ "name@step", or the base model's name."""
        return self.name if self.adapter is None else str(self.adapter)


@dataclass
class _Published:
    steps: dict[int, None]
    sampling: SamplingConfig
    seed: int


class ModelRegistry:
    """The names that one engine serves. Thread-safe.

    Args:
        base_model: name under which the base model itself answers.
    """

    def __init__(self, base_model: str) -> None:
        self.base_model = base_model
        self._lock = threading.Lock()
        self._models: dict[str, _Published] = {}

    def publish(
        self, name: str, step: int, seed: int = 0, sampling: SamplingConfig | None = None
    ) -> None:
        """Serve `name` at `step`, and at its latest step from now on if there is no later one.

        The engine must know the adapter `AdapterRef(name, step)` before.

        Raises:
            ConfigError: a name that can't be served.
        """
        if not name or "@" in name or name == self.base_model or step < 0:
            raise ConfigError(
                "a model can't be served under this name",
                got=f"{name}@{step}",
                expected=f"a name without '@', not {self.base_model!r}, and a step >= 0",
                fix="Rename the model.",
            )
        with self._lock:
            known = self._models.get(name)
            steps = {**known.steps, step: None} if known else {step: None}
            self._models[name] = _Published(steps, sampling or SamplingConfig(), seed)

    def retire(self, name: str, step: int | None = None) -> None:
        """Stop serving `name` at `step`, or at all; unknown ones are ignored."""
        with self._lock:
            known = self._models.get(name)
            if known is None:
                return
            known.steps.pop(step, None) if step is not None else known.steps.clear()
            if not known.steps:
                del self._models[name]

    def resolve(self, asked: str) -> Served:
        """What answers under the name `asked`.

        Raises:
            ApiError: 404 `model_not_found`, which names what is there.
        """
        if asked == self.base_model:
            return Served(self.base_model, None, SamplingConfig(), 0)
        name, at, pinned = asked.partition("@")
        with self._lock:
            known = self._models.get(name)
            if known is not None:
                step = _step(pinned) if at else max(known.steps)
                if step in known.steps:
                    return Served(name, AdapterRef(name, step), known.sampling, known.seed)
        raise ApiError(
            f"The model {asked!r} does not exist. Served here: {', '.join(self.names())}",
            param="model",
            code="model_not_found",
            status=404,
        )

    def names(self) -> list[str]:
        """Every name that can be asked for: the base model, names, and pinned steps."""
        with self._lock:
            names = [self.base_model]
            for name, known in self._models.items():
                names += [name, *(f"{name}@{step}" for step in sorted(known.steps))]
        return names


def _step(text: str) -> int:
    """The step in "name@N"; -1 if it is no step."""
    return int(text) if text.isascii() and text.isdigit() and str(int(text)) == text else -1
