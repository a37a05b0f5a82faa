"""What a client keeps on its own side of what its server logs: figures, and trajectories.

In: a split's groups and figures. Out: the same lines and files in the model's run folder here as
`LocalBackend` writes there. Where both are one folder, since the server runs on this machine,
nothing is written twice.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from typing import Any

from art_core.model import TrainableModel
from art_core.rundir import RunDir
from art_core.runlog import log_step, summarize
from art_core.trajectories import TrajectoryGroup


def keep(
    model: TrainableModel,
    split: str,
    step: int,
    groups: Sequence[TrajectoryGroup],
    metrics: Mapping[str, Any] | None,
) -> None:
    """Write a step of a split.

    Raises:
        ConfigError, RunFolderError: as `log_step`.
    """
    run = RunDir.at(model.base_path, model.project, model.name)
    if run.is_held():
        return
    run.describe(base_model=model.base_model)
    if groups and find_spec("pyarrow") is None:  # a light client: the trajectories are the server's
        log_step(run, split, step, (), {**summarize(groups), **(metrics or {})})
    else:
        log_step(run, split, step, groups, metrics)
