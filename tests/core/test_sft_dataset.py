"""Conversations in memory, in chunks under ART's names."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import art_core as art
from art_core.errors import ConfigError, GroupError
from tests.core.small_run import small_model


def rows(count: int) -> list[art.Trajectory]:
    turns: list[list[Any]] = [
        [{"role": "user", "content": f"q{i}"}, {"role": "assistant", "content": "ok"}]
        for i in range(count)
    ]
    return [art.Trajectory(messages_and_choices=messages) for messages in turns]


def chunks(count: int = 7, **options: Any) -> list[art.SFTChunk]:
    return list(art.create_sft_dataset_iterator(rows(count), show_progress=False, **options))


def numbers(chunk: art.SFTChunk) -> list[int]:
    return [int(t.messages()[0]["content"][1:]) for t in chunk.trajectories]


def test_chunks_of_two_batches() -> None:
    """Seven rows in batches of two are four steps an epoch, chunks of 2 and 2; the linear schedule
    of 8 steps, the first two of warm-up: 1/2, 1, then 1 - t/6.
    """
    found = chunks(chunk_size=2, epochs=2, peak_lr=1.0, warmup_ratio=0.25, shuffle=False)
    assert [numbers(c) for c in found] == [[0, 1, 2, 3], [4, 5, 6], [0, 1, 2, 3], [4, 5, 6]]
    assert [(c.step, c.epoch, c.epoch_step) for c in found] == [
        (0, 0, 0), (2, 0, 2), (4, 1, 0), (6, 1, 2),
    ]  # fmt: skip
    assert [c.config.batch_size for c in found] == [2] * 4
    rates = [rate for c in found for rate in c.config.learning_rate]  # type: ignore[union-attr]
    assert rates == pytest.approx([0.5, 1, 1, 5 / 6, 4 / 6, 3 / 6, 2 / 6, 1 / 6], abs=1e-15)


def test_each_epoch_has_an_order_of_its_own_that_the_seed_decides() -> None:
    first, second = chunks(epochs=2)
    assert sorted(numbers(first)) == sorted(numbers(second)) == list(range(7))
    assert numbers(first) != numbers(second)
    assert [numbers(c) for c in chunks(epochs=2)] == [numbers(first), numbers(second)]
    assert numbers(chunks(seed=1)[0]) != numbers(first)


@pytest.mark.parametrize("step", range(9))
def test_going_on_at_any_step(step: int) -> None:
    """What is left is what would have come, at its own rates, however chunks were cut before."""
    options: dict[str, Any] = {"chunk_size": 2, "epochs": 2}
    whole, left = chunks(**options), chunks(**options, initial_step=step)
    ids, rates = (
        [[x for c in part for x in numbers(c)] for part in (whole, left)],
        [[x for c in part for x in c.config.learning_rate] for part in (whole, left)],  # type: ignore[union-attr]
    )
    assert rates[1] == rates[0][step:]
    assert len(rates[1]) == 8 - step
    assert ids[1] == ids[0][len(ids[0]) - len(ids[1]) :]


def test_nothing_makes_no_chunks() -> None:
    assert chunks(0) == []


@pytest.mark.parametrize(
    ("name", "value"),
    [("chunk_size", 0), ("epochs", 0), ("batch_size", 0), ("initial_step", 5), ("initial_step", -1),
     ("warmup_ratio", 2.0)],
)  # fmt: skip
def test_numbers_that_can_not_be_meant_are_refused_at_once(name: str, value: float) -> None:
    with pytest.raises(ConfigError, match=name):
        art.create_sft_dataset_iterator(rows(7), **{name: value})  # type: ignore[arg-type]


def test_what_is_no_trajectory_is_refused() -> None:
    with pytest.raises(GroupError, match="item 0 of what is trained is a dict"):
        art.create_sft_dataset_iterator([{}])  # type: ignore[list-item]


async def test_chunks_are_trained_as_art_does(
    tiny_llama: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """ART's own loop, `_config` and `verbose` included."""
    model = small_model(tiny_llama, tmp_path)
    async with art.LocalBackend(show_progress=False) as backend:
        await model.register(backend)
        chunk, *others = chunks(chunk_size=2, peak_lr=1e-2)
        results = [
            await model.train_sft(c.trajectories, c.config, None, True) for c in (chunk, *others)
        ]
        assert [(r.step, r.metrics["updates"]) for r in results] == [(1, 2), (2, 2)]
        assert f"step 2, loss {results[1].metrics['loss']:.3f}" in capsys.readouterr().err
        with pytest.raises(ConfigError, match=r"_config.*lr.*Set TrainSFTConfig"):
            await model.train_sft(chunk.trajectories, _config={"lr": 1})
        with pytest.raises(ConfigError, match="_config"):
            await art.train_sft_from_file(model, tmp_path / "none", _config={"lr": 1})
        await model.train_sft(chunk.trajectories, chunk.config, {})
        assert not capsys.readouterr().err
