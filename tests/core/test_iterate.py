"""Scenarios in batches: each once an epoch, resumed on the right row (case 086)."""

from __future__ import annotations

import json
import subprocess
import sys
from collections import Counter
from dataclasses import dataclass
from typing import Any

import pytest
from pydantic import BaseModel

import art_core as art
from art_core.errors import ConfigError

ROWS = list(range(10))


def batches(**arguments: Any) -> list[art.DatasetBatch[int]]:
    """Ten rows, two a batch, three epochs, unless said otherwise."""
    defaults: dict[str, Any] = {"groups_per_step": 2, "num_epochs": 3, "use_tqdm": False}
    return list(art.iterate_dataset(ROWS, **defaults | arguments))


def rows_of(found: list[art.DatasetBatch[int]]) -> list[list[int]]:
    return [batch.items for batch in found]


def order_of(found: list[art.DatasetBatch[int]]) -> list[int]:
    return [row for batch in found for row in batch.items]


def test_every_row_comes_once_an_epoch_in_another_order() -> None:
    found = batches()
    assert [batch.step for batch in found] == list(range(15))
    assert [batch.epoch for batch in found] == [0] * 5 + [1] * 5 + [2] * 5
    assert [batch.epoch_step for batch in found] == [0, 1, 2, 3, 4] * 3
    epochs = [order_of(found[i : i + 5]) for i in (0, 5, 10)]
    assert [sorted(epoch) for epoch in epochs] == [ROWS] * 3
    assert epochs[0] != epochs[1] != epochs[2] != ROWS


def test_the_order_is_the_same_in_another_process_and_another_with_another_seed() -> None:
    assert rows_of(batches()) == rows_of(batches())
    assert rows_of(batches(seed=1)) != rows_of(batches())
    script = (
        "import art_core as art; print([b.items for b in art.iterate_dataset("
        "list(range(10)), 2, 3, use_tqdm=False)])"
    )
    other = subprocess.run([sys.executable, "-c", script], capture_output=True, check=True)
    assert json.loads(other.stdout) == rows_of(batches())


@pytest.mark.parametrize("done", [0, 5, 7, 14, 15])
def test_a_restart_by_step_or_by_state_goes_on_with_the_next_row(done: int) -> None:
    whole = batches()
    assert rows_of(batches(initial_step=done)) == rows_of(whole)[done:]
    if done:
        state = json.loads(json.dumps(whole[done - 1].state))  # as a state file keeps it
        resumed = batches(resume=state)
        assert rows_of(resumed) == rows_of(whole)[done:]
        assert [batch.step for batch in resumed] == list(range(done, 15))


def test_a_finished_run_says_so(capfd: pytest.CaptureFixture[str]) -> None:
    last = batches()[-1].state
    assert batches(resume=last, use_tqdm=True) == []
    assert "steps: 30/30  finished" in capfd.readouterr().err


def test_another_batch_size_goes_on_with_the_next_row() -> None:
    """After 7 steps of 2 come rows 14 on: 4 of them, then the last 2 of the epoch."""
    whole = batches()
    order = order_of(whole)
    resumed = batches(resume=whole[6].state, groups_per_step=4)
    assert rows_of(resumed)[:3] == [order[14:18], order[18:20], order[20:24]]
    counted = Counter(order_of(whole[:7]) + order_of(resumed))
    assert counted == Counter(dict.fromkeys(ROWS, 3))


def test_killed_twice() -> None:
    whole = batches()
    second = batches(resume=batches(resume=whole[6].state)[1].state)
    assert rows_of(second) == rows_of(whole)[9:]


def test_the_state_is_of_the_trained_batch_however_far_was_read_ahead() -> None:
    source = art.iterate_dataset(ROWS, 2, 3, use_tqdm=False)
    ahead = [next(source) for _ in range(9)]
    assert rows_of(batches(resume=ahead[6].state)) == rows_of(batches())[7:]


@pytest.mark.parametrize(
    ("rows", "arguments", "name"),
    [
        ([*ROWS, 10], {}, "size"),
        ([0, 1, 2, 3, 4, 5, 6, 7, 9, 8], {}, "fingerprint"),
        (ROWS, {"seed": 1}, "seed"),
    ],
    ids=["row added", "rows changed", "other seed"],
)
def test_a_state_of_another_order_is_refused(
    rows: list[int], arguments: dict[str, int], name: str
) -> None:
    state = batches()[6].state
    with pytest.raises(ConfigError, match=f"another dataset or seed.*{name}"):
        art.iterate_dataset(rows, 2, 3, resume=state, **arguments)  # type: ignore[arg-type]  # ints


def test_what_is_no_state_is_refused() -> None:
    with pytest.raises(ConfigError, match="resume lacks 'step'"):
        art.iterate_dataset(ROWS, resume={})


@dataclass
class Plain:
    id: int


class Checked(BaseModel):
    id: int


def test_scenarios_of_any_kind_have_a_stable_fingerprint() -> None:
    def state(change: int) -> dict[str, Any]:
        rows = [Plain(change), Checked(id=change), {"a": {"x", "y", "z"}}, {1: change}, object()]
        [batch] = art.iterate_dataset(rows, 5, use_tqdm=False)
        return batch.state

    assert state(1) == state(1)
    assert state(1) != state(2)


def test_the_last_batch_of_an_epoch_may_be_smaller_and_nothing_may_be_there() -> None:
    found = list(art.iterate_dataset(iter("abc"), 2, 2, use_tqdm=False))
    assert [(b.step, b.epoch, b.epoch_step, len(b.items)) for b in found] == [
        (0, 0, 0, 2),
        (1, 0, 1, 1),
        (2, 1, 0, 2),
        (3, 1, 1, 1),
    ]
    assert list(art.iterate_dataset([], use_tqdm=False)) == []
    assert batches(num_epochs=0) == []


@pytest.mark.parametrize(
    "arguments", [{"groups_per_step": 0}, {"num_epochs": -1}, {"initial_step": 1.5}], ids=str
)
def test_bad_arguments_are_refused_at_the_call(arguments: dict[str, Any]) -> None:
    [name] = arguments
    with pytest.raises(ConfigError, match=name):
        art.iterate_dataset(ROWS, **arguments)
