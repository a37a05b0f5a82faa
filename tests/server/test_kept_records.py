"""Token records are bounded: by age on a clock that does not jump, and by size."""

from __future__ import annotations

import numpy as np

from art_core.calls import Sampling
from art_core.records import RecordStore, TokenRecord
from art_core.server.kept_records import KeptRecords


def record(number: int, tokens: int = 10) -> TokenRecord:
    return TokenRecord(
        record_id=f"r{number}",
        choice_index=0,
        rollout_id=None,
        model="m",
        step=0,
        prompt_ids=np.zeros(tokens, np.int32),
        sampled_ids=np.zeros(1, np.int32),
        logprobs=np.zeros(1, np.float32),
        sampling=Sampling(),
        finish_reason="stop",
        message={},
        request_messages=[],
        tools=None,
        created=1e12 if number == 1 else 0.0,  # the system's clock jumps, and is not asked
        complete=True,
    )


def there(store: RecordStore, numbers: range) -> list[int]:
    found = store.get(f"r{n}" for n in numbers)
    return [n for n in numbers if (f"r{n}", 0) in found]


def test_a_record_goes_when_it_was_seen_for_long_enough() -> None:
    store = RecordStore()
    kept = KeptRecords(store, seconds=100.0, grace=10.0)
    store.put([record(1), record(2)])
    assert kept.look(0.0) == 0
    store.put([record(3)])
    assert kept.look(50.0) == 0
    assert kept.look(99.0) == 0
    assert kept.look(100.0) == 2
    assert there(store, range(1, 4)) == [3]
    assert kept.look(150.0) == 1


def test_after_a_restart_what_is_there_counts_as_new() -> None:
    store = RecordStore()
    store.put([record(1)])
    kept = KeptRecords(store, seconds=100.0)
    assert kept.look(1e9) == 0
    assert there(store, range(1, 2)) == [1]


def test_of_too_many_bytes_the_oldest_go_but_none_within_the_grace() -> None:
    store = RecordStore()
    kept = KeptRecords(store, seconds=1e9, size=2**20, grace=10.0)
    store.put([record(n, 25_000) for n in range(30)])  # 3 MB
    assert kept.look(0.0) == 0
    assert kept.look(9.0) == 0
    store.put([record(n, 25_000) for n in range(30, 35)])
    assert kept.look(10.0) == 30, "all that may go, in one part"
    assert there(store, range(40)) == list(range(30, 35))
    assert store.size() < 2**20
