"""Trajectories of a step as Parquet: one row per LLM call, failures included.

In: groups. Out: `trajectories/<split>/NNNN.parquet`, and the same groups read back, ids and
float32 logprobs exact. A trajectory without calls, a failed rollout and an empty group have a row
of their own. Left out: a trajectory's `state`, and of an exception all but its text.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from itertools import count
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
from pydantic_core import to_jsonable_python

from art_core.calls import ModelCall, Origin, Sampling
from art_core.errors import ARTError, ConfigError, RolloutFailure, RunFolderError
from art_core.files import replace_file
from art_core.json_forms import described, packed, plain, unpacked
from art_core.metrics import spell
from art_core.rundir import RunDir
from art_core.trajectories import History, Trajectory, TrajectoryGroup, number_of

Row: TypeAlias = dict[str, Any]

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
_TOKENS = ("prompt_ids", "sampled_ids", "logprobs")


def trajectory_path(run: RunDir, split: str, step: int) -> Path:
    """The file of a split's step."""
    return run.trajectories(split) / f"{step:04d}.parquet"


def reward_of(trajectory: Trajectory) -> float | None:
    """The reward as a float, infinite beyond what one can hold; None: it is not set."""
    if trajectory.reward is None:
        return None
    number = number_of(trajectory.reward)
    return float(trajectory.reward) if number is None else number


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
    rows = list(_rows(groups))
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
    rows: list[Row] = table.drop(list(_TOKENS)).to_pylist()
    for name in _TOKENS:
        for row, array in zip(rows, _arrays(table[name].combine_chunks()), strict=True):
            row[name] = array
    return _groups(rows)


# --- groups to rows ------------------------------------------------------------------------------


def _rows(groups: Sequence[TrajectoryGroup]) -> Iterator[Row]:
    for number, group in enumerate(groups):
        info = _json({"metadata": group.metadata, "metrics": group.metrics, "logs": group.logs})
        rows = [
            {"kind": "trajectory", "trajectory": index} | row
            for index, trajectory in enumerate(group.trajectories)
            for row in _trajectory_rows(trajectory)
        ]
        for index, failure in enumerate(group.exceptions):
            if isinstance(failure, RolloutFailure):
                text, trajectory = str(failure), failure.trajectory
            else:
                text, trajectory = described(failure), Trajectory(ended="error", start_time=0.0)
            rows += [
                {"kind": "failure", "trajectory": index} | row | {"exception": text}
                for row in _trajectory_rows(trajectory)
            ]
        rows = rows or [{"kind": "empty"}]
        rows[0]["group_info"] = info
        yield from ({"group": number} | row for row in rows)


def _trajectory_rows(trajectory: Trajectory) -> Iterator[Row]:
    """A row a call, and one for a trajectory without calls."""
    every: Row = {
        "reward": reward_of(trajectory),
        "ended": trajectory.ended,
        "rollout_id": trajectory.rollout_id,
        "start_time": trajectory.start_time,
        "metrics": _json(trajectory.metrics),
    }
    first: Row = {
        "conversation": _json(
            {
                "messages_and_choices": [packed(x) for x in trajectory.messages_and_choices],
                "tools": trajectory.tools,
                "additional_histories": [
                    {"messages_and_choices": [packed(x) for x in h.messages_and_choices],
                     "tools": h.tools}
                    for h in trajectory.additional_histories
                ],
            }
        ),
        "metadata": _json(trajectory.metadata),
        "logs": _json(trajectory.logs),
        "exception": described(trajectory.exception) if trajectory.exception else None,
    }  # fmt: skip
    if not trajectory.calls:
        yield every | first
    for index, call in enumerate(trajectory.calls):
        yield every | (first if index == 0 else {}) | _call_row(index, call)


def _call_row(index: int, call: ModelCall) -> Row:
    return {
        "call": index,
        "node": call.origin.node,
        "record_id": call.record_id,
        "choice_index": call.choice_index,
        "model": call.model,
        "step": call.step,
        "finish_reason": call.finish_reason,
        "error": call.error,
        "left_out": call.left_out,
        "call_reward": call.reward,
        "call_started": call.started,
        "call_ended": call.ended,
        "sampling": _json(asdict(call.sampling)),
        "origin": _json(asdict(call.origin)),
        "message": _json(call.message),
        "request": _json(call.request),
        "response": call.response,
        "prompt_ids": call.prompt_ids,
        "sampled_ids": call.sampled_ids,
        "logprobs": call.logprobs,
        "prompt_rendered": call.prompt_rendered,
    }


def _json(value: object) -> str:
    """Strict ASCII JSON. NaN and infinities become text, objects without a JSON form their repr."""
    try:
        return json.dumps(value, allow_nan=False, default=plain)
    except (TypeError, ValueError):
        return json.dumps(_finite(to_jsonable_python(value, fallback=plain)))


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _finite(item) for name, item in value.items()}
    if isinstance(value, list):
        return [_finite(item) for item in value]
    return spell(value) or value


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


# --- rows to groups ------------------------------------------------------------------------------


def _groups(rows: Sequence[Row]) -> list[TrajectoryGroup]:
    groups: list[TrajectoryGroup] = []
    current: Trajectory | None = None
    for row in rows:
        if row["group"] == len(groups):
            groups.append(TrajectoryGroup(**json.loads(row["group_info"])))
        if row["kind"] == "empty":
            continue
        if row["conversation"] is not None:
            current = _trajectory(row)
            if row["kind"] == "failure":
                groups[-1].add(RolloutFailure(row["exception"], trajectory=current))
            else:
                groups[-1].add(current)
        if current is not None and row["call"] is not None:
            current.calls.append(_call(row))
    return groups


def _trajectory(row: Row) -> Trajectory:
    said = json.loads(row["conversation"])
    failed = row["kind"] == "trajectory" and row["exception"] is not None
    return Trajectory(
        messages_and_choices=[unpacked(item) for item in said["messages_and_choices"]],
        tools=said["tools"],
        additional_histories=[
            History(
                messages_and_choices=[unpacked(item) for item in history["messages_and_choices"]],
                tools=history["tools"],
            )
            for history in said["additional_histories"]
        ],
        reward=row["reward"],
        metrics={
            name: float(value) if isinstance(value, str) else value  # "NaN", "Infinity"
            for name, value in json.loads(row["metrics"]).items()
        },
        metadata=json.loads(row["metadata"]),
        logs=json.loads(row["logs"]),
        ended=row["ended"],
        exception=ARTError(row["exception"]) if failed else None,
        rollout_id=row["rollout_id"],
        start_time=row["start_time"],
    )


def _call(row: Row) -> ModelCall:
    sampling = json.loads(row["sampling"])
    return ModelCall(
        record_id=row["record_id"],
        model=row["model"],
        step=row["step"],
        request=json.loads(row["request"]),
        message=json.loads(row["message"]),
        finish_reason=row["finish_reason"],
        choice_index=row["choice_index"],
        response=row["response"],
        prompt_ids=row["prompt_ids"],
        sampled_ids=row["sampled_ids"],
        logprobs=row["logprobs"],
        sampling=Sampling.from_json(sampling),
        origin=Origin(**json.loads(row["origin"])),
        started=row["call_started"],
        ended=row["call_ended"],
        error=row["error"],
        left_out=row.get("left_out"),  # files of older releases have none of these three columns
        reward=row.get("call_reward"),
        prompt_rendered=bool(row.get("prompt_rendered")),
    )


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
