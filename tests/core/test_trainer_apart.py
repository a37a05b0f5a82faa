"""`LocalBackend` with its trainer in a process of its own, as beside vLLM: kills, and what goes on.

What answers here is the embedded engine with a module of its own, which reads saved steps as vLLM
does; tests/conformance does the same with vLLM.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

import art_core as art
from art_core.config import ModelConfig
from art_core.engine.base import Engine
from art_core.engine.embedded import EmbeddedEngine
from art_core.engine.tokenizer import HFTokenizer
from art_core.errors import TrainerDied, TrainingError
from art_core.local import served_base
from art_core.local.bench import Bench, OwnBench
from art_core.local.workbench_apart import WorkbenchApart
from art_core.metrics import MetricsLog
from art_core.nn.lora import LoraModel
from art_core.training.requests import Loading
from tests.core.apart import kill, until_gone
from tests.core.small_run import CONFIG, play, run_folder, say, small_model, trained_bytes

if sys.platform == "win32":
    pytest.skip("not on this platform: vLLM is Unix only", allow_module_level=True)

LONG = CONFIG.model_copy(update={"minibatches": 200})
"""With hundreds of rows, seconds: time to do something meanwhile."""


def make_apart(name: str, path: Path, folder: Path, config: ModelConfig) -> tuple[Engine, Bench]:
    """As `served_base._vllm`, but for what answers."""
    workbench = WorkbenchApart(Loading(path, threads=1), folder / "trainer")
    module, tokenizer = LoraModel.load(path), HFTokenizer(path)
    engine: Any = EmbeddedEngine(module, tokenizer, base_model=name, config=config.engine)
    bench = OwnBench(workbench, engine, sleeps=False)
    bench.wants_probe = False
    return engine, bench


class House:
    """A backend, and how far its steps are."""

    def __init__(self) -> None:
        self.begun = threading.Event()
        self.backend = art.LocalBackend(show_progress=False, on_progress=self._on_progress)

    def _on_progress(self, model: art.TrainableModel[Any], done: int, total: int) -> None:
        self.begun.set()

    async def begun_step(
        self,
        model: art.TrainableModel[Any],
        groups: list[art.TrajectoryGroup],
    ) -> asyncio.Task[art.TrainResult]:
        """A long step, of which a row is computed."""
        self.begun.clear()
        step = asyncio.create_task(model.train(groups, LONG))
        assert await asyncio.to_thread(self.begun.wait, 60)
        return step


@asynccontextmanager
async def apart_backend(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[House]:
    monkeypatch.setattr(served_base, "_make", make_apart)
    house = House()
    async with house.backend:
        yield house


@pytest.fixture
async def house(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[House]:
    async with apart_backend(monkeypatch) as made:
        yield made


def trainer(runs: Path) -> int:
    """Pid of the trainer's process."""
    record = run_folder(runs) / "trainer" / "process.json"
    return int(json.loads(record.read_text())["main"][0])


async def many(model: art.TrainableModel[Any]) -> list[art.TrajectoryGroup]:
    return await play(model, *[(1, 0, 0, 1)] * 20)


async def test_a_trainer_that_is_killed_in_a_step_leaves_serving_up(
    house: House, tiny_llama: Path, tmp_path: Path
) -> None:
    """Calls that the step held are answered, the error comes, and the next step works."""
    model = small_model(tiny_llama, tmp_path / "apart")
    await model.register(house.backend)
    groups, long = await play(model, (1, 0, 0, 1), (0, 1, 1, 1)), await many(model)
    await model.train(groups, CONFIG)
    first = trainer(tmp_path / "apart")
    step = await house.begun_step(model, long)
    held = asyncio.create_task(say(model, name="agent@1"))
    kill(first)
    with pytest.raises(TrainerDied, match="it was killed, as the system does when memory runs out"):
        await step
    await held
    await say(model)
    assert await model.get_step() == 1
    result = await model.train(groups, CONFIG)
    assert (result.step, result.trained) == (2, True)
    assert trainer(tmp_path / "apart") != first
    await say(model, name="agent@2")
    log = MetricsLog(run_folder(tmp_path / "apart") / "history.jsonl").read()
    assert [r.step for r in log if r.split == "train" and r.values.get("trained")] == [0, 1]


async def test_both_ways_make_the_same_steps(
    tiny_llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In one process, and in two with a kill between the steps."""
    async with art.LocalBackend(show_progress=False) as backend:
        model = small_model(tiny_llama, tmp_path / "one")
        await model.register(backend)
        groups = await play(model, (1, 0, 0, 1), (0, 1, 1, 1))
        for _ in range(2):
            await model.train(groups, CONFIG)
    async with apart_backend(monkeypatch) as house:
        model = small_model(tiny_llama, tmp_path / "two")
        await model.register(house.backend)
        for _ in range(2):
            await model.train(groups, CONFIG)
            kill(trainer(tmp_path / "two"))
    for step in (0, 1, 2):
        assert trained_bytes(tmp_path / "two", step) == trained_bytes(tmp_path / "one", step)


async def test_a_cancelled_step_leaves_the_trainer_as_it_was(
    house: House, tiny_llama: Path, tmp_path: Path
) -> None:
    model = small_model(tiny_llama, tmp_path)
    await model.register(house.backend)
    groups, first = await many(model), trainer(tmp_path)
    step = await house.begun_step(model, groups)
    step.cancel()
    with pytest.raises(asyncio.CancelledError):
        await step
    assert await model.get_step() == 0
    assert (await model.train(groups, CONFIG)).step == 1
    assert trainer(tmp_path) == first


async def test_models_on_one_base_model_come_back_each_as_it_was(
    house: House, tiny_llama: Path, tmp_path: Path
) -> None:
    """Two adapters in one process: a crash in a step of one loses no step of the other."""
    ann, bob = (small_model(tiny_llama, tmp_path, name=name) for name in ("ann", "bob"))
    for model in (ann, bob):
        await model.register(house.backend)
    groups = await play(bob, (1, 0, 0, 1), key="bob")
    before = await bob.train(groups, CONFIG)
    assert before.step == 1
    long = await play(ann, *[(1, 0, 0, 1)] * 20, key="ann")
    step = await house.begun_step(ann, long)
    record = run_folder(tmp_path, "ann") / "trainer" / "process.json"  # the first one's folder
    os.kill(int(json.loads(record.read_text())["main"][0]), signal.SIGABRT)
    with pytest.raises(TrainerDied, match="SIGABRT"):
        await step
    assert (await bob.train(groups, CONFIG)).step == 2
    assert (await ann.train(long, CONFIG)).step == 1


async def test_a_backend_that_is_closed_in_a_step_leaves_no_process(
    house: House, tiny_llama: Path, tmp_path: Path
) -> None:
    model = small_model(tiny_llama, tmp_path)
    await model.register(house.backend)
    groups, process = await many(model), trainer(tmp_path)
    step = await house.begun_step(model, groups)
    await house.backend.close()
    until_gone(process)
    with pytest.raises(TrainingError, match="stopped before its end"):
        await step
