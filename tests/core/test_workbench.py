"""A workbench in this process: what a lesson leaves, whole or not at all."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from art_core.errors import CheckpointError
from art_core.training.requests import Lesson, Loading
from art_core.training.workbench import Workbench, load_module
from tests.core.apart import Listener, lesson, opening, saved


@pytest.fixture
def bench(tiny_llama: Path, tmp_path: Path) -> Iterator[Workbench]:
    made = Workbench(load_module(Loading(tiny_llama)))
    made.open(opening(tmp_path / "mine"))
    yield made
    made.close()


@pytest.fixture
def other(tiny_llama: Path, tmp_path: Path) -> Path:
    """Step 2 of another run, whose running baseline is 0.5."""
    made = Workbench(load_module(Loading(tiny_llama)))
    made.open(opening(tmp_path / "other"))
    for step in (1, 2):
        Listener(made).learn(lesson(tmp_path / "other", step))
    made.close()
    return tmp_path / "other" / "checkpoints" / "0002"


def adopting(folder: Path, step: int, adopted: Path) -> Lesson:
    return replace(lesson(folder, step), batches=(), running=None, adopted=adopted)


def test_an_adopted_step_brings_its_optimizer_and_baseline(
    bench: Workbench, other: Path, tmp_path: Path
) -> None:
    learned = Listener(bench).learn(adopting(tmp_path / "mine", 1, other))
    assert learned.running == 0.5
    files = ("adapter_model.safetensors", "optimizer.safetensors", "trainer.json")
    for name in files:
        assert (learned.path / name).read_bytes() == (other / name).read_bytes()


@pytest.mark.parametrize("fault", ["disk", "state"])
def test_an_adoption_that_fails_changes_nothing(
    bench: Workbench, other: Path, tmp_path: Path, fault: str
) -> None:
    """The step can't be saved; or half of what is adopted is damaged. The next step is the one that
    would have been made without it.
    """
    mine = tmp_path / "mine"
    asked = adopting(mine, 1, other)
    if fault == "disk":
        asked = replace(asked, checkpoints=Path("/proc/nowhere"))
    else:
        (other / "trainer.json").write_text("[]")
    with pytest.raises(CheckpointError):
        Listener(bench).learn(asked)
    Listener(bench).learn(lesson(mine, 1))
    assert saved(mine, 1) == saved(tmp_path / "other", 1)
