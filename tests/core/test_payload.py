"""Trajectories on the wire: what is written is read back, and nothing else is taken for it."""

from __future__ import annotations

import gzip
import io
import json
import struct
import tracemalloc
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import numpy as np
import pytest
from openai.types.chat.chat_completion import Choice

from art_core.calls import Origin, Sampling
from art_core.errors import ARTError, PayloadError, PayloadTooLarge, RolloutFailure, UnknownRecords
from art_core.records import RecordStore, TokenRecord
from art_core.trajectories import History, Trajectory, TrajectoryGroup
from art_core.wire.payload import Payload, compressed, read_payload, write_payload
from tests.core.sample import make_call
from tests.core.test_trajectory_files import CHOICE, assert_same, assert_same_call


def round_trip(groups: list[TrajectoryGroup], **request: Any) -> Payload:
    packed = b"".join(compressed(write_payload("train", request, groups)))
    return read_payload(io.BytesIO(gzip.decompress(packed)))


def written(groups: list[TrajectoryGroup] | None = None, **options: Any) -> bytes:
    return b"".join(write_payload("train", {}, groups or [small()], **options))


def small() -> TrajectoryGroup:
    return TrajectoryGroup([Trajectory(calls=[make_call(record_id="r")], reward=1.0)])


def test_everything_of_a_group_comes_back() -> None:
    rng = np.random.default_rng(0)
    calls = [
        make_call(
            record_id=f"r{i}",
            prompt_ids=rng.integers(0, 2**31 - 1, 50),
            sampled_ids=rng.integers(0, 2**31 - 1, 20),
            logprobs=-(rng.random(20).astype(np.float32) ** 9),
            response=bytes(range(256)),
            request={"messages": [{"role": "user", "content": "café \ud83d"}]},
            choice_index=i,
            sampling=Sampling(0.7, 0.9, 5, 0.1, 2, 99, ("a", "b"), 2**63 - 1, "tool_call"),
            origin=Origin("node", "ns|1", "('p', 2)", 3, 2, "planner", "run"),
            reward=(None, 0.1)[i],
        )
        for i in range(2)
    ]
    trajectory = Trajectory(
        messages_and_choices=[{"role": "user", "content": "Hi"}, Choice.model_validate(CHOICE)],
        additional_histories=[History(messages_and_choices=[Choice.model_validate(CHOICE)])],
        reward=float("inf"),
        metrics={"turns": 3, "won": True, "cost": float("nan")},
        metadata={"scenario": {"id": 7}},
        logs=["one"],
        calls=calls,
        ended="recursion_limit",
        rollout_id="run/7",
        start_time=1234.5,
    )
    failed = RolloutFailure("it broke", trajectory=Trajectory(calls=[calls[0]], ended="timeout"))
    group = TrajectoryGroup([trajectory], exceptions=[failed], metadata={"a": 1}, logs=["fine"])
    payload = round_trip([group, TrajectoryGroup([])], config={"x": 1})
    assert (payload.kind, payload.request) == ("train", {"config": {"x": 1}})
    back, empty = payload.groups
    assert (back.metadata, back.logs, len(empty)) == ({"a": 1}, ["fine"], 0)
    trajectory.metrics.pop("cost")
    assert np.isnan(back.trajectories[0].metrics.pop("cost"))
    assert_same(trajectory, back.trajectories[0])
    [failure] = back.exceptions
    assert isinstance(failure, RolloutFailure)
    assert (str(failure), failure.trajectory.ended) == ("it broke", "timeout")
    assert_same_call(failure.trajectory.calls[0], calls[0])


def test_a_stream_that_is_cut_anywhere_is_told() -> None:
    whole = written()
    for end in range(len(whole)):
        with pytest.raises(PayloadError):
            read_payload(io.BytesIO(whole[:end]))
    with pytest.raises(PayloadError, match="ends wrong"):
        read_payload(io.BytesIO(whole + b"x"))


def frame(header: Any, rest: bytes = b"") -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<I", len(text)) + text + rest


HEAD = frame({"art_wire": 1, "kind": "train", "request": {}})
END = frame({"end": 1})
ROW = {"group": 0, "kind": "trajectory", "trajectory": 0, "call": 0, "record_id": "r"}


@pytest.mark.parametrize(
    ("raw", "told"),
    [
        (b"", "cut"),
        (b"\x80\x02pickle", "header"),
        (frame(b"[" * 50_000), "not JSON"),
        (frame(b"\xff"), "not JSON"),
        (frame([]), "expected an object"),
        (frame({"art_wire": 2}), "another version"),
        (frame({"art_wire": 1, "kind": 3, "request": {}}), "first frame"),
        (struct.pack("<I", 2**32 - 1), "header: got .4294967295"),
        (HEAD + frame({"row": 1}), "a frame of a payload"),
        (HEAD + frame({"row": ROW, "arrays": {"prompt_ids": 2**40}}), "cut"),
        (HEAD + frame({"row": ROW, "arrays": {"prompt_ids": -1}}), "length of prompt_ids"),
        (HEAD + frame({"row": ROW, "arrays": {"prompt_ids": True}}), "length of prompt_ids"),
        (HEAD + frame({"row": ROW, "arrays": {}}) + END, "a row of a payload"),
        (HEAD + frame({"row": {**ROW, "conversation": "{"}, "arrays": {}}) + END, "a row of"),
        (HEAD + frame({"end": 3}), "ends wrong"),
    ],
)
def test_what_is_no_payload_is_refused(raw: bytes, told: str) -> None:
    with pytest.raises(PayloadError, match=told):
        read_payload(io.BytesIO(raw))


def test_calls_go_by_their_records_and_unknown_ones_are_named() -> None:
    store = RecordStore()
    call = make_call(record_id="known", request={"model": "m", "messages": []})
    assert call.prompt_ids is not None
    assert call.sampled_ids is not None
    assert call.logprobs is not None
    store.put(
        [
            TokenRecord(
                record_id="known",
                choice_index=0,
                rollout_id=None,
                model=call.model,
                step=call.step,
                prompt_ids=call.prompt_ids,
                sampled_ids=call.sampled_ids,
                logprobs=call.logprobs,
                sampling=call.sampling,
                finish_reason=call.finish_reason,
                message=call.message,
                request_messages=[],
                tools=None,
                created=0.0,
                complete=True,
            )
        ]
    )
    local = make_call(record_id="local-1")
    group = TrajectoryGroup([Trajectory(calls=[call, local], reward=0.0)])
    raw = written([group], by_record=True)
    assert call.sampled_ids.tobytes() not in raw.replace(local.sampled_ids.tobytes(), b"")  # type: ignore[union-attr]  # it has some
    [back] = read_payload(io.BytesIO(raw), records=store).groups
    for one, two in zip((call, local), back.trajectories[0].calls, strict=True):
        assert one.sampled_ids is not None
        assert two.sampled_ids is not None
        assert two.sampled_ids.tolist() == one.sampled_ids.tolist()
    lost = TrajectoryGroup([Trajectory(calls=[make_call(record_id="lost")], reward=0.0)])
    with pytest.raises(UnknownRecords, match="lost") as caught:
        read_payload(io.BytesIO(written([lost], by_record=True)), records=store)
    assert caught.value.ids == ("lost",)


def test_what_is_sent_is_never_held_whole() -> None:
    """A hundred trajectories of a MiB each, made and dropped one by one: 100 MiB through 12."""

    def groups() -> Iterator[TrajectoryGroup]:
        for i in range(100):
            ids = np.zeros(2**18, np.int32)
            call = make_call(
                record_id=f"r{i}",
                prompt_ids=ids,
                sampled_ids=ids[:1],
                logprobs=np.zeros(1, np.float32),
            )
            yield TrajectoryGroup([Trajectory(calls=[call], reward=0.0)])

    tracemalloc.start()
    try:
        size = sum(map(len, write_payload("train", {}, groups())))
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert size > 100 * 2**20
    assert peak < 12 * 2**20


def test_a_header_beyond_the_bound_is_refused_before_it_is_sent() -> None:
    group = small()
    group.metadata["page"] = "x" * (64 * 2**20)
    with pytest.raises(PayloadTooLarge, match="Shorten"):
        written([group])


def test_whatever_is_changed_in_a_payload_is_read_or_refused() -> None:
    """A byte, a cut, a piece twice: never another error."""
    whole, rng = written(), np.random.default_rng(0)
    for _ in range(3000):
        raw = bytearray(whole)
        for _ in range(rng.integers(1, 4)):
            at, kind = int(rng.integers(len(raw))), rng.integers(3)
            if kind == 0:
                raw[at] = int(rng.integers(256))
            elif kind == 1:
                del raw[at : at + int(rng.integers(1, 9))]
            else:
                raw[at:at] = raw[at : at + int(rng.integers(1, 9))]
        with suppress(ARTError):
            read_payload(io.BytesIO(raw))
