"""The record store: what is put comes back, in order, from any thread and after a restart."""

from __future__ import annotations

import sqlite3
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from art_core.calls import Sampling
from art_core.errors import CaptureError
from art_core.records import RecordStore, TokenRecord


def make_record(record_id: str = "r1", **changes: Any) -> TokenRecord:
    fields: dict[str, Any] = {
        "record_id": record_id,
        "choice_index": 0,
        "rollout_id": "roll",
        "model": "agent",
        "step": 3,
        "prompt_ids": [1, 2, 70_000],
        "sampled_ids": [4, 5],
        "logprobs": [-0.25, -1.5],
        "sampling": Sampling(temperature=0.7, stop=("a", "b"), seed=2**62, grammar="json_schema"),
        "finish_reason": "stop",
        "message": {"role": "assistant", "content": "hé \u0000 \ud83d"},
        "request_messages": [{"role": "user", "content": "q"}],
        "tools": [{"type": "function", "function": {"name": "t"}}],
        "created": 10.5,
        "complete": True,
    }
    return TokenRecord(**{**fields, **changes})


def assert_same(left: TokenRecord, right: TokenRecord) -> None:
    for name in TokenRecord.__dataclass_fields__:
        a, b = getattr(left, name), getattr(right, name)
        if isinstance(a, np.ndarray):
            assert a.dtype == b.dtype, name
            assert a.tolist() == b.tolist(), name
        else:
            assert a == b, name


@pytest.fixture
def store(tmp_path: Path) -> RecordStore:
    return RecordStore(tmp_path / "records.sqlite")


def test_a_record_comes_back_as_it_was_put(store: RecordStore) -> None:
    record = make_record()
    store.put([record])
    assert_same(store.get(["r1"])["r1", 0], record)


def test_none_survives(store: RecordStore) -> None:
    record = make_record(
        rollout_id=None, step=None, finish_reason=None, tools=None, sampled_ids=[], logprobs=[]
    )
    store.put([record])
    assert_same(store.get(["r1"])["r1", 0], record)


def test_get_gives_all_choices_and_leaves_unknown_ids_out(store: RecordStore) -> None:
    store.put([make_record(choice_index=0), make_record(choice_index=1)])
    assert set(store.get(["r1", "r1", "nobody"])) == {("r1", 0), ("r1", 1)}


def test_get_takes_more_ids_than_one_statement_has_room_for(store: RecordStore) -> None:
    ids = [f"r{i}" for i in range(1203)]
    store.put(make_record(record_id) for record_id in ids)
    assert set(store.get(ids)) == {(record_id, 0) for record_id in ids}


def test_a_rollout_is_read_in_the_order_its_calls_began(store: RecordStore) -> None:
    store.put([make_record("late", created=2.0)])
    store.put([make_record("other", rollout_id="another")])
    store.put(
        [make_record("early", created=1.0), make_record("early", created=1.0, choice_index=1)]
    )
    keys = [record.key for record in store.of_rollout("roll")]
    assert keys == [("early", 0), ("early", 1), ("late", 0)]


def test_records_outlive_the_store(tmp_path: Path) -> None:
    path = tmp_path / "records.sqlite"
    first = RecordStore(path)
    first.put([make_record()])
    second = RecordStore(path)  # the first was never closed, as when a process is killed
    assert_same(second.get(["r1"])["r1", 0], make_record())


def test_a_second_record_of_the_same_id_is_refused_and_nothing_of_it_stays(
    store: RecordStore,
) -> None:
    store.put([make_record()])
    with pytest.raises(CaptureError, match="already stored"):
        store.put([make_record("new"), make_record(model="other")])
    assert store.get(["new"]) == {}
    assert store.get(["r1"])["r1", 0].model == "agent"


def test_many_threads_write_and_read_one_store() -> None:
    store = RecordStore()

    def work(thread: int) -> None:
        for i in range(25):
            store.put([make_record(f"{thread}-{i}", rollout_id=str(thread))])
            assert len(store.of_rollout(str(thread))) == i + 1

    threads = [threading.Thread(target=work, args=(i,)) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(store.get(f"{t}-{i}" for t in range(8) for i in range(25))) == 200


def test_ids_without_a_logprob_each_make_no_record() -> None:
    with pytest.raises(ValueError, match="2 sampled ids but 1 logprobs"):
        make_record(logprobs=[-0.1])


def test_a_file_that_is_no_store_is_named(tmp_path: Path) -> None:
    path = tmp_path / "records.sqlite"
    path.write_bytes(b"not a database" * 100)
    with pytest.raises(CaptureError, match=r"records\.sqlite"):
        RecordStore(path)


def test_a_store_of_a_newer_version_is_not_touched(tmp_path: Path) -> None:
    path = tmp_path / "records.sqlite"
    database = sqlite3.connect(path)
    database.execute("PRAGMA user_version = 99")
    database.close()
    with pytest.raises(CaptureError, match="got 99, expected 1"):
        RecordStore(path)


def test_close_twice(store: RecordStore) -> None:
    store.close()
    store.close()
