"""A step that goes wrong beside a model that is served: told, undone, and the next one works."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import art_core as art
from art_core.errors import CheckpointError, NotEnoughMemory, TrainingError
from art_core.metrics import MetricsLog
from art_core.readiness.memory import GIB
from art_core.step_times import times_of
from art_core.training import memory_plan, workbench
from art_core.training.memory_peak import Room
from art_core.training.trainer import Trainer
from tests.core.small_run import CONFIG, play, run_folder, say, small_model


@pytest.fixture
async def model(tiny_llama: Path, tmp_path: Path) -> Any:
    made = small_model(tiny_llama, tmp_path)
    async with art.LocalBackend(show_progress=False) as backend:
        await made.register(backend)
        yield made


def history(runs: Path) -> dict[str, Any]:
    """The train metrics of step 0."""
    log = MetricsLog(run_folder(runs) / "history.jsonl")
    return next(r.values for r in log.read() if (r.step, r.split) == (0, "train"))


def out_of_memory(*_: Any, **__: Any) -> Any:
    raise torch.OutOfMemoryError("Tried to allocate 2.00 GiB")


def torch_fails(*_: Any, **__: Any) -> Any:
    raise RuntimeError("CUDA error: an illegal memory access was encountered")


def a_bug(*_: Any, **__: Any) -> Any:
    raise ZeroDivisionError("division by zero")


@pytest.mark.parametrize(
    ("fault", "told"),
    [(torch_fails, TrainingError), (out_of_memory, TrainingError), (a_bug, ZeroDivisionError)],
)
@pytest.mark.parametrize("where", ["_update", "save", "canary"])
async def test_an_error_in_a_step_is_delivered_and_serving_goes_on(
    model: art.TrainableModel[Any],
    monkeypatch: pytest.MonkeyPatch,
    fault: Callable[..., Any],
    told: type[Exception],
    where: str,
) -> None:
    """In the passes, while the checkpoint is saved, and before the first pass."""
    groups = await play(model, (1, 0, 0, 1))
    with monkeypatch.context() as broken:
        if where == "canary":
            broken.setattr(workbench, "watch_canary", fault)
        else:
            broken.setattr(Trainer, where, fault)
        with pytest.raises(CheckpointError if where == "save" else told):
            await model.train(groups, CONFIG)
        assert await model.get_step() == 0
        await say(model)
    result = await model.train(groups, CONFIG)
    assert (result.trained, result.step) == (True, 1)
    await say(model)


async def test_a_saved_step_is_served_though_its_proof_finds_no_memory(
    model: art.TrainableModel[Any],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    groups = await play(model, (1, 0, 0, 1))
    monkeypatch.setattr(workbench, "watch_canary", lambda *_, **__: out_of_memory)
    result = await model.train(groups, CONFIG)
    assert (result.trained, await model.get_step()) == (True, 1)
    await say(model, name="agent@1")
    assert "served without a proof" in caplog.text


async def test_a_step_that_cannot_fit_loses_no_rollout(
    model: art.TrainableModel[Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is refused when its rollouts are on disk, and serving goes on."""
    groups = await play(model, (1, 0, 0, 1))
    with monkeypatch.context() as small:
        small.setattr(memory_plan, "room_on", lambda device: Room("this machine", GIB, GIB // 4))
        with pytest.raises(NotEnoughMemory, match="Nothing was computed"):
            await model.train(groups, CONFIG)
    assert (run_folder(tmp_path) / "trajectories" / "train" / "0000.parquet").exists()
    await say(model)
    assert (await model.train(groups, CONFIG)).step == 1


async def test_memory_is_foretold_when_a_model_is_registered(
    tiny_llama: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Before anything is played; a process of half a GiB that has a quarter."""
    monkeypatch.setattr(memory_plan, "room_on", lambda device: Room("this machine", GIB, GIB // 4))
    with caplog.at_level(logging.WARNING):
        async with art.LocalBackend(show_progress=False) as backend:
            await small_model(tiny_llama, tmp_path).register(backend)
    assert "a step will not fit: a row of 4096 tokens takes about 0.5 GiB" in caplog.text


async def test_a_step_leaves_its_memory_and_its_times(
    model: art.TrainableModel[Any], tmp_path: Path
) -> None:
    """The phases make up the step but for what is between them, and stand in the history."""
    result = await model.train(await play(model, (1, 0, 0, 1)), CONFIG)
    metrics = history(tmp_path)
    assert metrics["memory/planned_gib"] == result.metrics["memory/planned_gib"] > 0
    assert metrics["memory/row"] <= CONFIG.max_tokens_per_row
    (times,) = times_of(MetricsLog(run_folder(tmp_path) / "history.jsonl").read())
    phases = dict(times.seconds)
    named = ("gather", "select", "wait", "pack", "forward", "backward", "optimizer", "save", "swap")
    assert set(named) <= phases.keys()
    assert min(phases[name] for name in ("gather", "forward", "backward", "save")) > 0
    apart = phases.pop("gather") + phases.pop("select")
    assert apart > 0
    assert sum(phases.values()) <= metrics["step_seconds"]
