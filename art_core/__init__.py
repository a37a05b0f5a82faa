"""Train small open models to do an agent's job: the public names, under ART's.

`import art_core as art`. Importing does nothing else: no settings are read, nothing is patched, and
the heavy side (torch, transformers) is loaded only when `art.LocalBackend` is first touched.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from art_core import errors, types
from art_core.backend import Backend, Inference, Skipped, TrainResult
from art_core.bookmarks import Bookmark
from art_core.calls import ModelCall, Origin, Sampling
from art_core.completeness import Completeness
from art_core.config import (
    EngineConfig,
    LoraSettings,
    ModelConfig,
    SamplingConfig,
    TrainConfig,
    TrainerConfig,
    TrainSFTConfig,
    VllmConfig,
)
from art_core.errors import ARTError, RolloutFailure
from art_core.gather import (
    gather_trajectories,
    gather_trajectory_groups,
    trajectory_group_batches,
)
from art_core.iterate import DatasetBatch, iterate_dataset
from art_core.model import Model, TrainableModel
from art_core.retry import retry
from art_core.sft.dataset import SFTChunk, create_sft_dataset_iterator
from art_core.sft.file import iterate_file
from art_core.sft.run import SFTResult, train_sft_from_file
from art_core.sft.schedule import create_lr_schedule
from art_core.trajectories import History, Trajectory, TrajectoryGroup
from art_core.types import Choice, Message, Messages, MessagesAndChoices, Tools

if TYPE_CHECKING:
    from art_core.client import HttpBackend
    from art_core.local import LocalBackend

__all__ = [
    "ARTError",
    "Backend",
    "Bookmark",
    "Choice",
    "Completeness",
    "DatasetBatch",
    "EngineConfig",
    "History",
    "HttpBackend",
    "Inference",
    "LocalBackend",
    "LoraSettings",
    "Message",
    "Messages",
    "MessagesAndChoices",
    "Model",
    "ModelCall",
    "ModelConfig",
    "Origin",
    "RolloutFailure",
    "SFTChunk",
    "SFTResult",
    "Sampling",
    "SamplingConfig",
    "Skipped",
    "Tools",
    "TrainConfig",
    "TrainResult",
    "TrainSFTConfig",
    "TrainableModel",
    "TrainerConfig",
    "Trajectory",
    "TrajectoryGroup",
    "VllmConfig",
    "create_lr_schedule",
    "create_sft_dataset_iterator",
    "errors",
    "gather_trajectories",
    "gather_trajectory_groups",
    "iterate_dataset",
    "iterate_file",
    "retry",
    "train_sft_from_file",
    "trajectory_group_batches",
    "types",
]


if not TYPE_CHECKING:  # a checker that saw this would take any name for granted

    def __getattr__(name: str) -> object:
        if name == "HttpBackend":
            from art_core.client import HttpBackend

            return HttpBackend
        if name == "LocalBackend":
            from art_core.local import LocalBackend

            return LocalBackend
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
