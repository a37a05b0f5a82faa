"""The half of `Backend` that stand-ins without a model to train leave out."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import art_core as art
from art_core.bookmarks import Bookmark


class Unsupervised:
    """Supervised training that nobody is to ask for."""

    async def train_sft(
        self,
        model: art.TrainableModel,
        trajectories: Sequence[art.Trajectory],
        config: art.TrainSFTConfig,
        *,
        bookmark: Bookmark | None = None,
    ) -> art.TrainResult:
        raise NotImplementedError

    async def sft_loss(
        self,
        model: art.TrainableModel,
        trajectories: Sequence[art.Trajectory],
        config: art.TrainSFTConfig,
    ) -> float:
        raise NotImplementedError

    async def bookmarks(self, model: art.TrainableModel) -> dict[str, dict[str, Any]]:
        raise NotImplementedError

    async def set_bookmark(self, model: art.TrainableModel, bookmark: Bookmark) -> None:
        raise NotImplementedError
