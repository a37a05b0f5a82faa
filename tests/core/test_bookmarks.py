"""Places in data are kept with the steps that they led to."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import art_core as art
from tests.core.small_run import CONFIG, play, small_model

SCENARIOS = list(range(10))
STEPS = 15
"""Three epochs of ten rows, two a step."""


def batches(resume: dict[str, object] | None = None, size: int = 2) -> list[list[int]]:
    return [
        batch.items
        for batch in art.iterate_dataset(
            SCENARIOS, size, num_epochs=3, use_tqdm=False, seed=1, resume=resume
        )
    ]


async def loop(
    base: Path, runs: Path, *, stop_after: int, silent: tuple[int, ...] = ()
) -> list[list[int]]:
    """The rows of each step until the process ends right after a step, nothing being written then.

    Args:
        silent: steps of this loop at which all rewards are equal, so that nothing is learned.
    """
    model = small_model(base, runs)
    seen = []
    async with art.LocalBackend(show_progress=False) as backend:
        await model.register(backend)
        place = (await model.bookmarks()).get("data")
        rows = art.iterate_dataset(SCENARIOS, 2, num_epochs=3, use_tqdm=False, seed=1, resume=place)
        for number, batch in enumerate(rows):
            seen.append(batch.items)
            groups = await play(model, (1, 1) if number in silent else (1, 0))
            mark = art.Bookmark("data", batch.state)
            result = await model.train(groups, CONFIG, bookmark=mark)
            assert result.trained == (number not in silent)
            if len(seen) == stop_after:
                break
    return seen


async def test_a_loop_goes_on_with_the_row_after_its_last_step(
    tiny_llama: Path, tmp_path: Path
) -> None:
    """Case 086 for reinforcement learning: stopped after the steps 7 and 9, and at the end."""
    seen = []
    for steps in (7, 2, 100):
        seen += await loop(tiny_llama, tmp_path, stop_after=steps)
    assert seen == batches()
    assert len(seen) == STEPS
    assert await loop(tiny_llama, tmp_path, stop_after=100) == [], "finished"


async def test_another_number_of_rows_a_step(tiny_llama: Path, tmp_path: Path) -> None:
    """Case 086, batch_4."""
    await loop(tiny_llama, tmp_path, stop_after=7)
    model = small_model(tiny_llama, tmp_path)
    async with art.LocalBackend(show_progress=False) as backend:
        await model.register(backend)
        place = (await model.bookmarks())["data"]
    flat = [row for step in batches() for row in step]
    assert batches(place, size=4)[0] == flat[14:18]


async def test_a_step_that_learned_nothing_moves_the_next_bookmark(
    tiny_llama: Path, tmp_path: Path
) -> None:
    """It has no checkpoint: lost if nothing follows, and then played again by the same weights."""
    whole = batches()
    assert await loop(tiny_llama, tmp_path / "a", stop_after=3, silent=(1,)) == whole[:3]
    assert await loop(tiny_llama, tmp_path / "a", stop_after=1) == whole[3:4]
    assert await loop(tiny_llama, tmp_path / "b", stop_after=2, silent=(1,)) == whole[:2]
    assert await loop(tiny_llama, tmp_path / "b", stop_after=1) == whole[1:2]


async def test_bookmarks_are_kept_with_the_steps(tiny_llama: Path, tmp_path: Path) -> None:
    model = small_model(tiny_llama, tmp_path)
    async with art.LocalBackend(show_progress=False) as backend:
        await model.register(backend)
        await model.train_sft(conversation(), bookmark=art.Bookmark("a", {"rows": 1}))
        await backend.set_bookmark(model, art.Bookmark("b", {"rows": 2}))
        assert await backend.bookmarks(model) == {"a": {"rows": 1}, "b": {"rows": 2}}
    again = small_model(tiny_llama, tmp_path)
    async with art.LocalBackend(show_progress=False) as backend:
        await again.register(backend)
        assert await backend.bookmarks(again) == {"a": {"rows": 1}}, "b was not saved yet"


def conversation() -> art.Trajectory:
    turns: list[Any] = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "ok"}]
    return art.Trajectory(messages_and_choices=turns)
