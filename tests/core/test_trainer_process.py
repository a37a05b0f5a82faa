"""The trainer's process: the same bits as in this one, and what becomes of it when it ends, hangs,
fails or is told to stop. Real processes, real kills.
"""

from __future__ import annotations

import logging
import os
import pickle
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from art_core import errors
from art_core.config import TrainConfig, TrainSFTConfig
from art_core.engine.keeper import start_of
from art_core.errors import (
    CheckpointError,
    ForeignError,
    NonFiniteStep,
    NotEnoughMemory,
    TrainerDied,
    TrainingError,
)
from art_core.local.trainer_process import Patience
from art_core.local.workbench_apart import WorkbenchApart
from art_core.training.apart import _failed, _lost_gpu
from art_core.training.requests import Loading, Question
from art_core.training.workbench import Workbench, load_module
from tests.core.apart import (
    CONFIG,
    NAME,
    Listener,
    apart,
    lesson,
    opening,
    pid,
    saved,
    until_gone,
)

if sys.platform == "win32":
    pytest.skip("not on this platform: vLLM is Unix only", allow_module_level=True)

SFT = TrainSFTConfig(learning_rate=1e-2, max_tokens_per_row=24)


@pytest.fixture(scope="module")
def here(tiny_llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of three steps that a workbench of this process made, two and a supervised one; as a
    trainer's process computes: one thread, no denormals.
    """
    folder, threads = tmp_path_factory.mktemp("here"), torch.get_num_threads()
    torch.set_num_threads(1)
    torch.set_flush_denormal(True)
    bench = Workbench(load_module(Loading(tiny_llama)))
    bench.open(opening(folder))
    listener = Listener(bench)
    for step, config in ((1, CONFIG), (2, CONFIG), (3, SFT)):
        listener.learn(lesson(folder, step, config))
    bench.close()
    torch.set_flush_denormal(False)
    torch.set_num_threads(threads)
    return folder


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of the process that tests share; to start one takes seconds."""
    return tmp_path_factory.mktemp("home")


@pytest.fixture(scope="module")
def shared(tiny_llama: Path, home: Path) -> Iterator[WorkbenchApart]:
    made = apart(tiny_llama, home)
    yield made
    made.close()


@pytest.fixture
def bench(shared: WorkbenchApart, tmp_path: Path) -> WorkbenchApart:
    """With a fresh adapter; where its process was ended by another test, that starts one."""
    shared.open(opening(tmp_path))
    return shared


class Disturbs(Listener):
    """Sends the trainer's process, which was started in `home`, a signal at the first row."""

    def __init__(self, bench: WorkbenchApart, home: Path, number: int) -> None:
        super().__init__(bench)
        self._home, self._number = home, number

    def act(self) -> None:
        os.kill(pid(self._home), self._number)


class Stops(Listener):
    def act(self) -> None:
        self.stop.set()


# The same bits


def test_steps_in_a_process_of_their_own_are_those_of_this_one_bit_for_bit(
    bench: WorkbenchApart, here: Path, tmp_path: Path
) -> None:
    listener = Listener(bench)
    configs: dict[int, TrainConfig | TrainSFTConfig] = {1: CONFIG, 2: CONFIG, 3: SFT}
    steps = [listener.learn(lesson(tmp_path, *each)) for each in configs.items()]
    for step, learned in enumerate(steps, start=1):
        assert learned.path == tmp_path / "checkpoints" / f"{step:04d}"
        assert saved(tmp_path, step) == saved(here, step)
        assert learned.metrics["seconds/forward"] > 0
        assert learned.probe is not None
        assert not np.array_equal(learned.probe.before, learned.probe.after)
    assert listener.heard[0][0] < listener.heard[0][1]
    assert len(saved(here, 3)) == 5, "weights, moments, counters, base, bookmarks"


def test_a_run_goes_on_from_its_checkpoint_as_if_nothing_had_been(
    bench: WorkbenchApart, here: Path, tmp_path: Path
) -> None:
    Listener(bench).learn(lesson(tmp_path, 1))
    bench.close()
    assert bench.open(opening(tmp_path, 1)).running == 0.25
    Listener(bench).learn(lesson(tmp_path, 2))
    assert saved(tmp_path, 2) == saved(here, 2)


def test_a_loss_is_the_same(bench: WorkbenchApart, tiny_llama: Path, tmp_path: Path) -> None:
    asked = Question(NAME, lesson(tmp_path, 1).samples, SFT)
    mine = Workbench(load_module(Loading(tiny_llama)))
    mine.open(opening(tmp_path, 0))
    assert bench.loss(asked) == pytest.approx(mine.loss(asked), rel=1e-6)
    mine.close()


# Its end


def test_one_that_was_killed_while_idle_is_started_again(
    bench: WorkbenchApart,
    home: Path,
    here: Path,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    Listener(bench).learn(lesson(tmp_path, 1))
    first = pid(home)
    os.kill(first, signal.SIGKILL)  # it may be dying still when it is asked
    Listener(bench).learn(lesson(tmp_path, 2))
    assert saved(tmp_path, 2) == saved(here, 2)
    assert pid(home) != first
    assert "a new one starts" in caplog.text


@pytest.mark.parametrize(
    ("number", "told"),
    [
        (signal.SIGKILL, "it was killed, as the system does when memory runs out"),
        (signal.SIGABRT, "it was ended by SIGABRT"),
    ],
)
def test_one_that_dies_in_a_step_is_told_and_the_next_step_works(
    bench: WorkbenchApart, home: Path, here: Path, tmp_path: Path, number: int, told: str
) -> None:
    """Out of memory, and an abort in CUDA."""
    Listener(bench).learn(lesson(tmp_path, 1))
    with pytest.raises(TrainerDied, match=told) as caught:
        Disturbs(bench, home, number).learn(lesson(tmp_path, 2))
    assert isinstance(caught.value, TrainingError)
    if number != signal.SIGKILL:
        assert caught.value.tail.startswith("Fatal Python error"), "where it was"
        assert caught.value.tail in str(caught.value)
    assert names(tmp_path) == ["0000", "0001"]
    Listener(bench).learn(lesson(tmp_path, 2))
    assert saved(tmp_path, 2) == saved(here, 2)


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in (folder / "checkpoints").iterdir())


KILLS_ITSELF = """
import os, signal, sys
from pathlib import Path
folder, moments = Path({folder!r}), Path({moments!r})
def watch(event, args):
    is_named = (folder / "0001").exists()
    before = event == "os.rename" and str(args[1]) == str(folder / "0001")
    after = event == "open" and str(args[0]) == str(folder) and is_named
    left = moments.read_text().split() if before or after else []
    if left[:1] == ["before" if before else "after"]:
        moments.write_text(" ".join(left[1:]))
        os.kill(os.getpid(), signal.SIGKILL)
sys.addaudithook(watch)
"""
"""Before the folder of step 1 gets its name, and after it, when nobody was told."""


def test_one_that_is_killed_while_it_saves_leaves_no_step(
    tiny_llama: Path, here: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    moments = tmp_path / "moments"
    moments.write_text("before after")
    hook = KILLS_ITSELF.format(folder=str(tmp_path / "checkpoints"), moments=str(moments))
    (tmp_path / "sitecustomize.py").write_text(hook)
    before = os.environ.get("PYTHONPATH", "")
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}{os.pathsep}{before}")
    bench = apart(tiny_llama, tmp_path)
    bench.open(opening(tmp_path))
    for left in ("after", ""):
        with pytest.raises(TrainerDied, match="it was killed"):
            Listener(bench).learn(lesson(tmp_path, 1))
        assert moments.read_text() == left
        assert names(tmp_path) == ["0000"]
    Listener(bench).learn(lesson(tmp_path, 1))
    assert saved(tmp_path, 1) == saved(here, 1)
    bench.close()


def test_one_that_cannot_start_says_why(
    tiny_llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "torch.py").write_text("raise ImportError('no such library')")
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")
    with pytest.raises(TrainerDied, match="it ended with status 1") as caught:
        apart(tiny_llama, tmp_path)
    assert caught.value.tail.endswith("ImportError: no such library")


# Silence


def test_one_that_hangs_is_ended_and_told(tiny_llama: Path, here: Path, tmp_path: Path) -> None:
    """In a step; and when it is asked, by what no buffer takes: 4 MB."""
    bench = apart(tiny_llama, tmp_path, Patience(silence=4.0))
    bench.open(opening(tmp_path))
    first, asked = pid(tmp_path), lesson(tmp_path, 1)
    with pytest.raises(TrainerDied, match="hung: nothing was heard of it for 4 s"):
        Disturbs(bench, tmp_path, signal.SIGSTOP).learn(asked)
    assert start_of(first) is None
    Listener(bench).learn(asked)
    assert saved(tmp_path, 1) == saved(here, 1)
    os.kill(pid(tmp_path), signal.SIGSTOP)
    big = asked.samples[0]._replace(prompt_ids=np.zeros(2**20, np.int32))
    with pytest.raises(TrainerDied, match="hung: nothing was heard of it for 4 s"):
        Listener(bench).learn(replace(asked, step=2, batches=[[big]]))
    bench.close()


# To stop


def test_a_step_that_is_stopped_ends_at_the_next_row(
    bench: WorkbenchApart, home: Path, here: Path, tmp_path: Path
) -> None:
    first, stops = pid(home), Stops(bench)
    config = CONFIG.model_copy(update={"minibatches": 400})
    asked = lesson(tmp_path, 1, config)
    long = replace(asked, batches=[asked.samples * 50])
    with pytest.raises(TrainingError, match="stopped before its end"):
        stops.learn(long)
    assert stops.heard[-1][0] < stops.heard[-1][1]
    assert names(tmp_path) == ["0000"]
    Listener(bench).learn(lesson(tmp_path, 1))
    assert saved(tmp_path, 1) == saved(here, 1)
    assert pid(home) == first


class StopsInVain(Disturbs):
    def act(self) -> None:
        super().act()
        self.stop.set()


def test_one_that_does_not_stop_is_ended(tiny_llama: Path, tmp_path: Path) -> None:
    bench = apart(tiny_llama, tmp_path, Patience(stop=0.5))
    bench.open(opening(tmp_path))
    first = pid(tmp_path)
    with pytest.raises(TrainingError, match="stopped before its end"):
        StopsInVain(bench, tmp_path, signal.SIGSTOP).learn(lesson(tmp_path, 1))
    assert start_of(first) is None
    assert names(tmp_path) == ["0000"]
    bench.close()


class Fails(Listener):
    def act(self) -> None:
        raise BrokenPipeError("the display is gone")


def test_an_error_of_who_looks_on_undoes_the_step(
    bench: WorkbenchApart, here: Path, tmp_path: Path
) -> None:
    """As in one process; and it is not taken for the trainer's end."""
    with pytest.raises(BrokenPipeError, match="the display is gone"):
        Fails(bench).learn(lesson(tmp_path, 1))
    Listener(bench).learn(lesson(tmp_path, 1))
    assert saved(tmp_path, 1) == saved(here, 1)


# Errors


def test_errors_come_as_the_class_that_they_were(
    bench: WorkbenchApart, home: Path, here: Path, tmp_path: Path
) -> None:
    """With fields and cause; the process goes on, and nothing has changed."""
    first, asked = pid(home), lesson(tmp_path, 1)
    wild = [sample._replace(advantage=float("inf")) for sample in asked.samples]
    with pytest.raises(NonFiniteStep) as caught:
        Listener(bench).learn(replace(asked, batches=[wild]))
    assert caught.value.tensor
    assert caught.value.fix.startswith("The adapter is unchanged")
    with pytest.raises(CheckpointError, match="step 1 can't be saved") as failed:
        Listener(bench).learn(replace(asked, checkpoints=Path("/proc/nowhere")))
    assert isinstance(failed.value.__cause__, OSError)
    with pytest.raises(CheckpointError, match="is there already"):
        Listener(bench).learn(replace(asked, step=0))
    Listener(bench).learn(asked)
    assert saved(tmp_path, 1) == saved(here, 1)
    assert pid(home) == first


def test_a_base_model_that_is_damaged_is_told_as_in_one_process(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(errors.BaseModelError):
        apart(tmp_path, tmp_path)
    assert not (tmp_path / "trainer" / "process.json").exists(), "nothing runs"


def test_errors_of_packages_that_are_not_known_come_as_text() -> None:
    """To read them would import what made them; a bug brings its trace along."""
    odd = type("Odd", (Exception,), {"__module__": "unsloth.kernels"})
    try:
        raise odd("wrong") from ZeroDivisionError("by zero")
    except Exception as error:  # noqa: BLE001 - as the trainer does
        answer = _failed(error)
    assert isinstance(answer.error, ForeignError)
    assert str(answer.error) == "Odd: wrong"
    assert "test_trainer_process.py" in answer.error.__notes__[0]
    assert isinstance(answer.cause, ZeroDivisionError)


def test_a_gpu_that_answers_no_more_is_the_trainers_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """CUDA repeats the fault of a kernel to whoever asks next."""

    def repeats() -> None:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    assert _lost_gpu() is None, "there is none"
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    assert _lost_gpu() is None, "it is well"
    monkeypatch.setattr(torch.cuda, "synchronize", repeats)
    lost = _lost_gpu()
    assert lost is not None
    assert "has lost its GPU (CUDA error: an illegal memory access" in str(lost)


@pytest.mark.parametrize(
    "error",
    [
        NonFiniteStep("a step", tensor="loss", got=float("nan"), fix="Lower the rate."),
        TrainerDied("the trainer ended", tail="a\nb", fix="Go on."),
        NotEnoughMemory("it does not fit", got="1 GiB", expected="2 GiB", fix="Buy."),
        errors.UnknownRecords("records", ids=("a", "b")),
    ],
    ids=lambda error: type(error).__name__,
)
def test_an_error_goes_between_processes_whole(error: errors.ARTError) -> None:
    again: Any = pickle.loads(pickle.dumps(error))  # noqa: S301 - our own
    assert type(again) is type(error)
    assert str(again) == str(error)
    assert vars(again) == vars(error)


def test_what_it_logs_is_logged_here(
    shared: WorkbenchApart, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO):
        shared.open(opening(tmp_path))
    told = [r.getMessage() for r in caplog.records if r.name == "art_core.training.foretold"]
    assert len(told) == 1
    assert told[0].startswith("memory plan: a row of 4096 tokens")


# Orphans


def test_no_trainer_outlives_a_process_that_was_killed(tiny_llama: Path, tmp_path: Path) -> None:
    """Not even one that is stopped and can't see that its line is gone."""
    command = [sys.executable, "-m", "tests.core.apart", str(tiny_llama), str(tmp_path)]
    parent = subprocess.Popen(command, stdout=subprocess.PIPE)
    assert parent.stdout is not None
    assert parent.stdout.readline() == b"up\n"
    trainer = pid(tmp_path)
    os.kill(trainer, signal.SIGSTOP)
    parent.kill()
    parent.wait()
    parent.stdout.close()
    until_gone(trainer)
