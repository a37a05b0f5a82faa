"""Trajectories as flat rows, one per LLM call, and back: what files and the wire are made of.

In: groups. Out: rows of plain values, of JSON as text, of bytes and of arrays; and the same groups
read back, ids and float32 logprobs exact. A trajectory without calls, a failed rollout and an empty
group have a row of their own. Left out: a trajectory's `state`, and of an exception all but its
text.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import asdict
from typing import Any, TypeAlias

from pydantic_core import to_jsonable_python

from art_core.calls import ModelCall, Origin, Sampling
from art_core.errors import ARTError, RewardError, RolloutFailure
from art_core.json_forms import described, packed, plain, unpacked
from art_core.metrics import spell
from art_core.trajectories import History, Trajectory, TrajectoryGroup, number_of

Row: TypeAlias = dict[str, Any]
COLUMNS = (
    *("group", "kind", "trajectory", "call", "reward", "ended", "rollout_id", "start_time"),
    *("metrics", "conversation", "metadata", "logs", "exception", "group_info", "node"),
    *("record_id", "choice_index", "model", "step", "finish_reason", "error", "left_out"),
    *("call_reward", "call_started", "call_ended", "sampling", "origin", "message", "request"),
    *("response", "prompt_ids", "sampled_ids", "logprobs", "prompt_rendered"),
)
"""What a row may have; a column that it lacks is None. trajectory_files.py says what each is."""
TOKENS = ("prompt_ids", "sampled_ids", "logprobs")
"""Columns of arrays."""


def reward_of(trajectory: Trajectory) -> float | None:
    """The reward as a float, infinite beyond what one can hold; None: it is not set.

    Raises:
        RewardError: it is no number.
    """
    if trajectory.reward is None:
        return None
    number = number_of(trajectory.reward)
    if number is None:
        raise RewardError(
            "reward of a trajectory",
            got=trajectory.reward,
            expected="a number, or None",
            fix="Set traj.reward before training or logging.",
        )
    return number


# --- groups to rows ------------------------------------------------------------------------------


def rows_of(groups: Iterable[TrajectoryGroup]) -> Iterator[Row]:
    """A row for each call and what has none; those of one group are made at a time."""
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


# --- rows to groups ------------------------------------------------------------------------------


def groups_of(rows: Iterable[Row]) -> list[TrajectoryGroup]:
    """The groups of `rows`, each of which has every column.

    Raises:
        KeyError, TypeError, ValueError, CaptureError: a row is not of `rows_of`.
    """
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
