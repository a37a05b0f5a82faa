"""Trajectories of a step as Parquet: one row per LLM call, failures included.

In: groups. Out: `trajectories/<split>/NNNN.parquet`, and the same groups read back, ids and
float32 logprobs exact. What a row holds is in trajectory_rows.py.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np

from art_core.errors import ConfigError, RunFolderError
from art_core.files import replace_file
from art_core.rundir import RunDir
from art_core.trajectories import TrajectoryGroup
from art_core.trajectory_rows import TOKENS, Row, groups_of, rows_of

_VERSION = {b"art_version": b"1"}
_COLUMNS = {
    # Where the row belongs. "kind" is "trajectory", "failure" (of a rollout), or "empty" (a group).
    "group": "int32", "kind": "string", "trajectory": "int32", "call": "int32",
    # Of the trajectory, in every row of it.
    "reward": "double", "ended": "string", "rollout_id": "string", "start_time": "double",
    "metrics": "json",
    # Of the trajectory and its group, in the trajectory's first row only.
    "conversation": "json", "metadata": "json", "logs": "json", "exception": "string",
    "group_info": "json",
    # Of the call; null where a trajectory has none.
    "node": "string", "record_id": "string", "choice_index": "int32", "model": "string",
    "step": "int64", "finish_reason": "string", "error": "string", "left_out": "string",
    "call_reward": "double", "call_started": "double", "call_ended": "double", "sampling": "json",
    "origin": "json", "message": "json", "request": "json", "response": "binary",
    "prompt_ids": "ids", "sampled_ids": "ids", "logprobs": "logprobs",
    "prompt_rendered": "bool",
}  # fmt: skip


def trajectory_path(run: RunDir, split: str, step: int) -> Path:
    """The file of a split's step."""
    return run.trajectories(split) / f"{step:04d}.parquet"


def write_trajectories(
    run: RunDir, split: str, step: int, groups: Sequence[TrajectoryGroup]
) -> Path:
    """Write the step's file, whole or not at all; return its path.

    If the step was logged before (a resumed run plays it again), the older file is kept beside as
    `NNNN.replaced-K.parquet`.

    Raises:
        ConfigError: pyarrow is not installed, or the split's name breaks the rule.
        RunFolderError: the disk is full or refuses.
    """
    pa, parquet = _arrow()
    rows = list(rows_of(groups))
    types = {
        "json": pa.string(),
        "ids": pa.list_(pa.int32()),
        "logprobs": pa.list_(pa.float32()),
        "string": pa.string(),
        "binary": pa.binary(),
        "bool": pa.bool_(),
        "double": pa.float64(),
        "int32": pa.int32(),
        "int64": pa.int64(),
    }
    columns = {
        name: pa.array([_cell(row.get(name)) for row in rows], types[kind])
        for name, kind in _COLUMNS.items()
    }
    table = pa.table(columns).replace_schema_metadata(_VERSION)
    path = trajectory_path(run, split, step)

    def write(aside: Path) -> None:
        parquet.write_table(table, aside, compression="zstd")
        if path.exists():
            _keep_older(path)

    replace_file(path, write)
    return path


def read_trajectories(path: Path) -> list[TrajectoryGroup]:
    """The groups that `write_trajectories` wrote, in their order.

    Raises:
        ConfigError: pyarrow is not installed.
        RunFolderError: the file is missing, damaged, or from another program.
    """
    pa, parquet = _arrow()
    fix = "Give a file that art-langgraph wrote under trajectories/<split>/."
    try:
        table = parquet.read_table(path, partitioning=None)
    except (OSError, pa.ArrowException) as error:
        raise RunFolderError(f"{path} can't be read: {error}", fix=fix) from error
    version = (table.schema.metadata or {}).get(b"art_version")
    if version != _VERSION[b"art_version"]:
        raise RunFolderError(
            f"the version of the trajectory file {path}", got=version, expected="1", fix=fix
        )
    rows: list[Row] = table.drop(list(TOKENS)).to_pylist()
    for name in TOKENS:
        for row, array in zip(rows, _arrays(table[name].combine_chunks()), strict=True):
            row[name] = array
    return groups_of(rows)


def _cell(value: Any) -> Any:
    """Text without lone surrogates, which Parquet can't hold."""
    return value.encode("utf-8", "replace").decode() if isinstance(value, str) else value


def _keep_older(path: Path) -> None:
    """Give the file a second name, under which it stays when `path` is replaced."""
    names = (path.with_name(f"{path.stem}.replaced-{k}{path.suffix}") for k in count(1))
    free = next(name for name in names if not name.exists())
    try:
        free.hardlink_to(path)
    except OSError:  # a file system without links
        path.rename(free)


def _arrays(column: Any) -> Iterator[np.ndarray[Any, Any] | None]:
    """The arrays of a list column, without a Python object per number."""
    offsets, values = column.offsets.to_numpy(), column.values.to_numpy(zero_copy_only=False)
    for index, valid in enumerate(column.is_valid().to_pylist()):
        yield values[offsets[index] : offsets[index + 1]].copy() if valid else None


def _arrow() -> tuple[Any, Any]:
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError as error:
        raise ConfigError(
            "trajectories are kept as Parquet, and pyarrow is not installed",
            fix="Run: pip install pyarrow",
        ) from error
    return pyarrow, pyarrow.parquet
