"""The backend protocol: where a model is served and trained.

`LocalBackend` does both in this process; `HttpBackend` asks a server. The client side above it
never needs to know which.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from art_core.bookmarks import Bookmark
from art_core.config import TrainConfig, TrainSFTConfig
from art_core.trajectories import Trajectory, TrajectoryGroup

if TYPE_CHECKING:
    from art_core.model import TrainableModel


@dataclass(frozen=True)
class Inference:
    """Where a registered model answers."""

    base_url: str
    """OpenAI-compatible, ends in "/v1"."""
    api_key: str = field(repr=False)
    model_name: str
    """Served name of the latest step; "name@N" pins one."""


@dataclass(frozen=True)
class Skipped:
    """A group, or a part of one, that was left out of a step, and why."""

    group: int
    """Index in the train call's groups; in supervised training, of the trajectory."""
    reason: str
    trajectories: int
    """How many."""
    trajectory: int | None = None
    """Index in its group of the one that was left out by itself; None: all of the group."""


@dataclass(frozen=True)
class TrainResult:
    """What a train call did."""

    step: int
    """The model's step afterwards; unchanged if nothing was learned."""
    trained: bool
    metrics: dict[str, float] = field(default_factory=dict)
    skipped: tuple[Skipped, ...] = ()
    reason: str | None = None
    """Why the step was left out although there was something to learn; None if it was not."""
    checkpoint_path: str | None = None

    @property
    def reasons(self) -> list[str]:
        """Why the step, or a part of it, was left out; each reason once."""
        own = [self.reason] if self.reason else []
        return [*own, *dict.fromkeys(skip.reason for skip in self.skipped)]


class Backend(Protocol):
    """Serves and trains models."""

    async def register(self, model: TrainableModel) -> Inference:
        """Bind `model`: load its base, its run folder and its latest checkpoint; serve it.

        Raises:
            BaseModelError: the base model is unknown or damaged.
            RunLocked: another process holds the run folder.
        """
        ...

    async def train(
        self,
        model: TrainableModel,
        groups: Sequence[TrajectoryGroup],
        config: TrainConfig,
        *,
        bookmark: Bookmark | None = None,
    ) -> TrainResult:
        """One GRPO step over `groups`; the new step serves the next call.

        Args:
            bookmark: kept in the step's checkpoint, and in those after it. If nothing is learned,
                the next checkpoint has it.
        """
        ...

    async def train_sft(
        self,
        model: TrainableModel,
        trajectories: Sequence[Trajectory],
        config: TrainSFTConfig,
        *,
        bookmark: Bookmark | None = None,
    ) -> TrainResult:
        """Supervised training on the answers in `trajectories`; the new step serves the next call.

        Args:
            bookmark: as in `train`.
        """
        ...

    async def sft_loss(
        self, model: TrainableModel, trajectories: Sequence[Trajectory], config: TrainSFTConfig
    ) -> float:
        """Weighted mean loss of the latest step on the answers, nats a token; nothing changes."""
        ...

    async def bookmarks(self, model: TrainableModel) -> dict[str, dict[str, Any]]:
        """Places in data files, by name, as the latest step has them."""
        ...

    async def set_bookmark(self, model: TrainableModel, bookmark: Bookmark) -> None:
        """Keep `bookmark` in the checkpoints to come."""
        ...

    async def join(self, model: TrainableModel, trajectories: Sequence[Trajectory]) -> None:
        """Complete calls, in place, with the tokens that the server recorded; see `join_records`.

        `train` does it by itself.
        """
        ...

    async def get_step(self, model: TrainableModel) -> int:
        """Latest whole step; 0 before anything was learned."""
        ...

    async def log(
        self,
        model: TrainableModel,
        groups: Sequence[TrajectoryGroup],
        *,
        split: str,
        metrics: dict[str, Any] | None = None,
        step: int | None = None,
    ) -> None:
        """Write trajectories and metrics of a step into the run folder."""
        ...

    async def delete_checkpoints(self, model: TrainableModel, *, best_metric: str) -> list[int]:
        """Keep the latest and the best checkpoint; return the steps that were deleted."""
        ...

    async def close(self) -> None:
        """Stop serving and give the run folders free. Safe to call twice."""
        ...
