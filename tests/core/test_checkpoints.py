"""Checkpoints: whole or absent, whatever happens; the newest and the best are kept (case 067)."""

from __future__ import annotations

import errno
import json
import logging
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NoReturn

import numpy as np
import pytest

from art_core import checkpoints
from art_core.checkpoints import Checkpoint
from art_core.errors import CheckpointError
from art_core.metrics import MetricsLog
from art_core.rundir import RunDir


@pytest.fixture
def run(tmp_path: Path) -> Iterator[RunDir]:
    with RunDir.open(tmp_path, "p", "m") as opened:
        yield opened


def writer(step: int) -> Callable[[Path], None]:
    """Writes what a trainer does: files, one of them in a folder."""

    def write(folder: Path) -> None:
        (folder / "adapter_config.json").write_text(json.dumps({"r": 8, "step": step}))
        (folder / "adapter_model.safetensors").write_bytes(bytes([step]) * 1000)
        (folder / "trainer").mkdir()
        (folder / "trainer" / "optimizer.bin").write_bytes(b"o" * 500)

    return write


def step_in(checkpoint: Checkpoint | None) -> int | None:
    """What the checkpoint's own file says its step is."""
    if checkpoint is None:
        return None
    config = json.loads((checkpoint.path / "adapter_config.json").read_text())
    assert config["step"] == checkpoint.step
    return checkpoint.step


# --- saving and finding


def test_the_newest_by_number_is_the_latest(run: RunDir) -> None:
    assert checkpoints.latest(run) is None
    assert checkpoints.steps(run) == []
    for step in (1, 2, 10, 9):
        path = checkpoints.save(run, step, writer(step))
        assert path == run.checkpoints / f"000{step}"[-4:]
    (run.checkpoints / "notes").mkdir()
    (run.checkpoints / "0003.tmp").mkdir()
    (run.checkpoints / "11").mkdir()  # not how we spell a step
    assert checkpoints.steps(run) == [1, 2, 9, 10]
    assert step_in(checkpoints.latest(run)) == 10
    assert checkpoints.find(run, 2) == Checkpoint(2, run.checkpoints / "0002")


def test_steps_beyond_four_digits_sort_by_number(run: RunDir) -> None:
    for step in (9999, 10000):
        checkpoints.save(run, step, writer(step % 256))
    assert [path.name for path in sorted(run.checkpoints.iterdir())] == ["10000", "9999"]
    assert checkpoints.steps(run) == [9999, 10000]


@pytest.mark.parametrize("step", [-1, 1.0, True, "1"], ids=repr)
def test_what_is_no_step_is_refused(run: RunDir, step: int) -> None:
    with pytest.raises(CheckpointError, match="step of a checkpoint"):
        checkpoints.save(run, step, writer(0))


def test_a_step_that_is_there_is_not_written_over(run: RunDir) -> None:
    checkpoints.save(run, 1, writer(1))
    with pytest.raises(CheckpointError, match="there already"):
        checkpoints.save(run, 1, writer(1))


def test_saving_needs_the_lock(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"RunDir\.open"):
        checkpoints.save(RunDir.at(tmp_path, "p", "m"), 1, writer(1))


def test_a_missing_step_is_told_with_those_that_are_there(run: RunDir) -> None:
    checkpoints.save(run, 1, writer(1))
    with pytest.raises(CheckpointError, match=r"no such folder.*\[1\]"):
        checkpoints.find(run, 2)


# --- damage


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


FILES = [
    "adapter_config.json",
    "adapter_model.safetensors",
    "trainer/optimizer.bin",
    "manifest.json",
]


@pytest.mark.parametrize("file", FILES)
@pytest.mark.parametrize("harm", [Path.unlink, cut, flip], ids=["gone", "cut", "flipped"])
def test_a_damaged_checkpoint_is_skipped_and_named(
    run: RunDir, caplog: pytest.LogCaptureFixture, harm: Callable[[Path], None], file: str
) -> None:
    """Power lost before the disk had everything, a copy that broke off, a bad block."""
    for step in (1, 2):
        checkpoints.save(run, step, writer(step))
    harm(run.checkpoints / "0002" / file)
    with caplog.at_level(logging.WARNING):
        assert step_in(checkpoints.latest(run)) == 1
    assert f"{run.checkpoints / '0002'} is skipped" in caplog.text
    with pytest.raises(CheckpointError, match="can't be used"):
        checkpoints.find(run, 2)
    checkpoints.save(run, 2, writer(2))  # the step that was lost is learned again
    assert step_in(checkpoints.latest(run)) == 2


def adapter(folder: Path, *, rows: int = 2) -> None:
    """An adapter as peft writes it: JSON, and float32 tensors by the safetensors format."""
    data = np.ones((rows, 4), np.float32).tobytes()
    header = json.dumps(
        {
            "__metadata__": {"format": "pt"},
            "lora_A.weight": {
                "dtype": "F32",
                "shape": [rows, 4],
                "data_offsets": [0, len(data)],
            },
        }
    ).encode()
    folder.mkdir(parents=True)
    (folder / "adapter_config.json").write_text('{"peft_type": "LORA"}')
    (folder / "adapter_model.safetensors").write_bytes(
        len(header).to_bytes(8, "little") + header + data
    )


def test_adapters_that_art_left_count_if_they_are_whole(run: RunDir) -> None:
    for name in ("0001", "0002", "0010", "0011", "0012", "0013"):
        adapter(run.checkpoints / name)
    (run.checkpoints / "0011" / "adapter_config.json").unlink()
    cut(run.checkpoints / "0012" / "adapter_model.safetensors")
    (run.checkpoints / "0013" / "adapter_model.safetensors").write_bytes(b"\xff" * 20)
    assert checkpoints.steps(run) == [1, 2, 10]
    latest = checkpoints.latest(run)
    assert latest is not None
    assert latest.step == 10


# --- killed at any moment


@pytest.mark.skipif(not hasattr(os, "fork"), reason="not on this platform: kills forked processes")
def test_a_kill_at_any_moment_leaves_the_last_whole_step(tmp_path: Path) -> None:
    """Each child is killed at its n-th operation on the file system, n = 1, 2, ... until none is
    killed any more; each time, the run is opened again and goes on.
    """
    with RunDir.open(tmp_path, "p", "m") as run:
        checkpoints.save(run, 1, writer(1))
    survived = seen_two = 0
    for moment in range(1, 500):
        if child := os.fork():
            _, status = os.waitpid(child, 0)
        else:
            die_at(moment, tmp_path)
        with RunDir.open(tmp_path, "p", "m") as run:
            newest = checkpoints.latest(run)
            assert step_in(newest) in (1, 2)
            assert {p.name for p in run.checkpoints.iterdir()} <= {"0001", "0002"}
            if step_in(newest) == 2:
                seen_two += 1
                checkpoints.delete(run, [2])
            checkpoints.save(run, 2, writer(2))
            checkpoints.delete(run, [2])
        if os.waitstatus_to_exitcode(status) == 0:
            survived += 1
            break
    assert survived == 1
    assert moment > 20  # a dozen opens, renames and folders at least were each the last one
    assert seen_two > 1  # killed after the rename, too


def die_at(moment: int, base: Path) -> NoReturn:
    """In a forked child: open the run, save step 2, end at the `moment`-th operation."""
    left = moment

    def watch(event: str, args: tuple[object, ...]) -> None:
        nonlocal left
        operates = event == "open" or event.startswith(("os.", "shutil."))
        if operates and any(str(base) in str(arg) for arg in args):
            left -= 1
            if left == 0:
                os._exit(9)  # as kill -9: nothing is cleaned up

    code = 1
    try:
        sys.addaudithook(watch)
        with RunDir.open(base, "p", "m") as run:
            checkpoints.save(run, 2, writer(2))
        code = 0
    finally:
        os._exit(code)


# --- no space


def no_space(folder: Path) -> None:
    (folder / "adapter_model.safetensors").write_bytes(b"x" * 100)
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def serializer_fault(folder: Path) -> None:
    raise RuntimeError("PytorchStreamWriter failed writing file data/0")


@pytest.mark.parametrize("write", [no_space, serializer_fault])
def test_a_fault_while_saving_keeps_the_old_and_removes_the_part(
    run: RunDir, write: Callable[[Path], None]
) -> None:
    checkpoints.save(run, 1, writer(1))
    with pytest.raises(CheckpointError, match="step 2 can't be saved") as caught:
        checkpoints.save(run, 2, write)
    assert isinstance(caught.value.__cause__, OSError | RuntimeError)
    assert [path.name for path in run.checkpoints.iterdir()] == ["0001"]
    assert step_in(checkpoints.latest(run)) == 1


def test_ctrl_c_while_saving_removes_the_part(run: RunDir) -> None:
    def interrupted(folder: Path) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        checkpoints.save(run, 1, interrupted)
    assert list(run.checkpoints.iterdir()) == []


def test_a_disk_that_is_really_full(tmp_path: Path) -> None:
    """A file system of 1 MiB in memory, and a checkpoint of 700 kB that fits once."""
    mounted = (
        shutil.which("mount")
        and not subprocess.run(
            ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(tmp_path)],
            capture_output=True,
            check=False,
        ).returncode
    )
    if not mounted:
        pytest.skip("not on this platform: only root may mount a file system")
    try:
        with RunDir.open(tmp_path, "p", "m") as run:

            def big(folder: Path) -> None:
                (folder / "adapter_config.json").write_text('{"step": 1}')
                (folder / "weights.bin").write_bytes(b"w" * 700_000)

            checkpoints.save(run, 1, big)
            with pytest.raises(CheckpointError, match=r"No space left.*bytes free") as caught:
                checkpoints.save(run, 2, big)
            assert isinstance(caught.value.__cause__, OSError)
            assert step_in(checkpoints.latest(run)) == 1
            checkpoints.delete(run, [1])
            checkpoints.save(run, 2, big)
            MetricsLog(run.history).append(2, "train", {"reward": 1.0})
        assert checkpoints.steps(run) == [2]
    finally:
        subprocess.run(["umount", str(tmp_path)], check=True)


# --- what is kept


def rewards(run: RunDir, by_step: dict[int, float]) -> None:
    for step, reward in by_step.items():
        MetricsLog(run.history).append(step, "val", {"reward": reward})


def test_the_latest_and_the_best_are_kept(run: RunDir) -> None:
    for step in (1, 2, 3, 10):
        checkpoints.save(run, step, writer(step))
    rewards(run, {1: 0.2, 2: 0.9, 3: float("inf"), 10: float("nan"), 99: 5.0})
    assert checkpoints.delete_all_but_best(run, "val/reward") == [1, 3]
    assert checkpoints.steps(run) == [2, 10]


def test_of_equals_the_newest_is_the_best(run: RunDir) -> None:
    for step in (1, 2, 3):
        checkpoints.save(run, step, writer(step))
    rewards(run, {1: 0.9, 2: 0.9, 3: 0.1})
    assert checkpoints.delete_all_but_best(run) == [1]


def test_the_best_may_be_the_latest_and_served_steps_stay(run: RunDir) -> None:
    for step in (1, 2, 3):
        checkpoints.save(run, step, writer(step))
    rewards(run, {1: 0.1, 3: 0.9})
    assert checkpoints.delete_all_but_best(run, in_use=[2]) == [1]
    assert checkpoints.steps(run) == [2, 3]


@pytest.mark.parametrize("history", [None, {1: float("nan")}, {7: 0.5}], ids=str)
def test_without_a_value_nothing_is_deleted_and_that_is_said(
    run: RunDir, caplog: pytest.LogCaptureFixture, history: dict[int, float] | None
) -> None:
    for step in (1, 2, 3):
        checkpoints.save(run, step, writer(step))
    rewards(run, history or {})
    with caplog.at_level(logging.WARNING):
        assert checkpoints.delete_all_but_best(run, "val/reward") == []
    assert checkpoints.steps(run) == [1, 2, 3]
    assert "no checkpoint is deleted" in caplog.text
    assert "'val/reward'" in caplog.text


def test_damaged_folders_are_neither_kept_as_best_nor_deleted(run: RunDir) -> None:
    for step in (1, 2, 3):
        checkpoints.save(run, step, writer(step))
    cut(run.checkpoints / "0002" / "adapter_model.safetensors")
    rewards(run, {1: 0.1, 2: 0.9, 3: 0.2})
    assert checkpoints.delete_all_but_best(run) == [1]
    assert (run.checkpoints / "0002").exists()
