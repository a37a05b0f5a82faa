"""The trainer's bench beside a vLLM that shares its GPU: a stand-in that can be asleep."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Coroutine
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch", reason="art-langgraph[train] is not installed")

import torch

from art_core.batch.probe import Probe
from art_core.batch.sample import Sample
from art_core.calls import Ids, Logprobs, Sampling
from art_core.config import LoraSettings, TrainSFTConfig
from art_core.engine.adapter_files import write_null_adapter
from art_core.engine.base import AdapterRef, GenerateRequest
from art_core.engine.vllm import VllmEngine
from art_core.errors import CheckpointError, EngineError, TrainerDied
from art_core.local.bench import OwnBench
from art_core.local.workbench_apart import WorkbenchApart
from art_core.nn.lora import LoraModel
from art_core.training.canary import watch_canary
from art_core.training.requests import Learned, Lesson, Opened, Opening, Question
from art_core.training.watch import OnProgress
from art_core.training.workbench import Workbench
from tests.core.apart import NAME, lesson, opening
from tests.core.tiny_policy import shake
from tests.engine.house import Plain
from tests.engine.stub_door import ANSWER, StubVllm
from tests.engine.test_vllm_engine import BASE, make


@pytest.fixture
def stub() -> StubVllm:
    return StubVllm()


@pytest.fixture
async def engine(stub: StubVllm, tmp_path: Path) -> AsyncIterator[VllmEngine]:
    made = make(stub, tmp_path)
    yield made
    await made.close()


class Here(WorkbenchApart):
    """A workbench in this process, where a test can look at what it does."""

    def __init__(self, module: LoraModel, stub: StubVllm) -> None:
        self.gives_back = False
        self._bench, self._stub = Workbench(module), stub
        self.loaded = self._bench.loaded
        self.begun, self.go_on = threading.Event(), threading.Event()
        self.thread = ""
        self.fault: Exception | None = None
        """What its next works meet while vLLM is awake."""

    def open(self, opening: Opening) -> Opened:
        self._met()
        return self._bench.open(opening)

    def learn(self, lesson: Lesson, on_progress: OnProgress, stop: threading.Event) -> Learned:
        self.begun.set()
        self.go_on.wait(10)
        self._stub.asked.append("train and give back" if self.gives_back else "train")
        self.thread = threading.current_thread().name
        self._met()
        return self._bench.learn(lesson, on_progress, stop)

    def loss(self, question: Question) -> float:
        self._met()
        return self._bench.loss(question)

    def close(self) -> None:
        self._bench.close()

    def _met(self) -> None:
        if self.fault is not None and not self._stub.is_asleep:
            raise self.fault


@pytest.fixture
def here(tiny_llama: Path, stub: StubVllm) -> Here:
    return Here(LoraModel.load(tiny_llama), stub)


@pytest.fixture
async def bench(here: Here, engine: VllmEngine) -> AsyncIterator[OwnBench]:
    made = OwnBench(here, engine, sleeps=True)
    yield made
    made.close()


OLD, NEW = AdapterRef("agent", 0), AdapterRef("agent", 1)


def learning(bench: OwnBench, asked: Lesson) -> Coroutine[Any, Any, Learned]:
    return bench.learn(asked, NEW, lambda done, total: None, threading.Event())


async def test_work_has_the_gpu_to_itself_and_its_step_answers_what_was_held(
    bench: OwnBench, here: Here, engine: VllmEngine, stub: StubVllm, tmp_path: Path
) -> None:
    """Sleep, train, wake, empty the cache, load the new step, answer: case 050 whole."""
    await bench.open(opening(tmp_path), OLD)
    training = asyncio.create_task(learning(bench, lesson(tmp_path, 1)))
    await asyncio.to_thread(here.begun.wait, 10)
    assert stub.is_asleep
    asked = GenerateRequest("r", np.array([1], np.int32), NEW, Sampling(seed=1))
    write_null_adapter(tmp_path / "step1", BASE)
    await engine.load_adapter(NEW, tmp_path / "step1")
    deltas = asyncio.create_task(anext(engine.generate(asked)))
    await asyncio.sleep(0.05)
    here.go_on.set()
    metrics = (await training).metrics
    assert here.thread.startswith("art-trainer")
    assert list((await deltas).ids) == ANSWER[:1]
    order = ["train and give back", "wake", "reset", "load agent@1", "call agent@1"]
    assert stub.asked == ["sleep level=1&mode=wait", *order]
    assert metrics["seconds/wait"] > 0
    assert metrics["seconds/wake"] > 0


async def test_a_step_that_fails_wakes_it_and_the_next_has_its_turn(
    bench: OwnBench, here: Here, stub: StubVllm, tmp_path: Path
) -> None:
    here.go_on.set()
    await bench.open(opening(tmp_path), OLD)
    steps = (lesson(tmp_path, 0), lesson(tmp_path, 1))  # step 0 is there
    jobs = [learning(bench, asked) for asked in steps]
    failed, learned = await asyncio.gather(*jobs, return_exceptions=True)
    assert isinstance(failed, CheckpointError)
    assert isinstance(learned, Learned)
    one = ["sleep level=1&mode=wait", "train and give back", "wake", "reset"]
    assert stub.asked == one * 2
    assert not stub.is_asleep


async def test_the_trainers_end_is_no_want_of_memory(
    bench: OwnBench, here: Here, stub: StubVllm, tmp_path: Path
) -> None:
    """It is told at once; vLLM is not asked to sleep for it."""
    here.go_on.set()
    await bench.open(opening(tmp_path), OLD)
    here.fault = TrainerDied("the trainer's process ended", tail="", fix="Go on.")
    with pytest.raises(TrainerDied):
        await bench.loss(Question(NAME, lesson(tmp_path, 1).samples, TrainSFTConfig()))
    assert stub.asked == []


async def test_work_that_needs_little_lets_it_answer(
    bench: OwnBench, stub: StubVllm, tmp_path: Path
) -> None:
    await bench.open(opening(tmp_path), OLD)
    assert await bench.loss(Question(NAME, lesson(tmp_path, 1).samples, TrainSFTConfig())) > 0
    assert stub.asked == []


async def test_where_little_is_too_much_it_sleeps_after_all(
    bench: OwnBench, here: Here, stub: StubVllm, tmp_path: Path
) -> None:
    here.fault = torch.OutOfMemoryError("of the GPU")
    await bench.open(opening(tmp_path), OLD)
    assert stub.asked == ["sleep level=1&mode=wait", "wake", "reset"]


# What the canary asks


def test_the_canary_is_what_a_step_changed_of_its_own_tokens(
    tiny_llama: Path, tmp_path: Path
) -> None:
    """Logprobs at temperature 1, whatever a call was sampled at, as peft has them."""
    samples = [
        Sample(
            prompt_ids=np.arange(5 + i, dtype=np.int32),
            sampled_ids=np.arange(100, 104 + i, dtype=np.int32),
            logprobs=np.zeros(4 + i, np.float32),
            advantage=1.0 - i,
            weight=1.0,
            temperature=0.5,
            distorted=False,
            call=10 + i,
            trajectory=i,
        )
        for i in range(3)
    ]

    module = LoraModel.load(tiny_llama)
    module.create_adapter("live", LoraSettings(rank=4), seed=0)
    canary = watch_canary(module, "live", samples, longest=512)
    shake(module, 1, "live")
    (tmp_path / "live").mkdir()
    module.save_adapter("live", tmp_path / "live")
    probe = canary()
    assert probe is not None
    assert [len(ids) for ids in probe.sequences] == [9, 13, 11]  # by the size of their advantage
    assert [places.tolist() for places in probe.tokens] == [
        [5, 6, 7, 8],
        [7, 8, 9, 10, 11, 12],
        [6, 7, 8, 9, 10],
    ]
    plain, wanted = Plain(tiny_llama, {"live": tmp_path / "live"}), []
    for ids, places in zip(probe.sequences, probe.tokens, strict=True):
        prompt, sampled = np.split(ids, places[:1])
        logprobs = plain.logits("live", prompt.tolist(), sampled.tolist()).log_softmax(-1)
        wanted += logprobs[torch.arange(len(sampled)), torch.from_numpy(sampled).long()].tolist()
    np.testing.assert_allclose(probe.after, wanted, rtol=0, atol=2e-4)
    assert np.abs(probe.after - probe.before).max() > 0.01


class _Engine:
    """Answers with N-1 until it loads N once more."""

    def __init__(self, probe: Probe, heals: bool) -> None:
        self.probe, self.heals, self.loads = probe, heals, 1
        self.shelf = self

    def renew(self, ref: AdapterRef) -> None:
        self.loads += 1

    async def score(self, adapter: AdapterRef | None, ids: Ids) -> Logprobs:
        is_right = self.heals and self.loads > 1 and adapter == AdapterRef("agent", 2)
        told = self.probe.after if is_right else self.probe.before
        return told.astype(np.float32)


@pytest.mark.parametrize("heals", [True, False])
async def test_a_stale_step_is_loaded_once_more_and_then_refused(
    bench: OwnBench, engine: VllmEngine, heals: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = np.linspace(-3, -1, 60)
    change = np.linspace(-0.2, 0.3, 60)
    ids = np.arange(61, dtype=np.int32)
    probe = Probe((ids,), (np.arange(1, 61),), before, before + change)
    stale = _Engine(probe, heals)
    monkeypatch.setattr(engine, "score", stale.score)
    monkeypatch.setattr(engine.shelf, "renew", stale.renew)
    old, new = AdapterRef("agent", 1), AdapterRef("agent", 2)
    if heals:
        assert (await bench.prove(old, new, probe))["swap/proved"] == 1.0
    else:
        with pytest.raises(EngineError, match="agent@2 is not answered by its own weights"):
            await bench.prove(old, new, probe)
    assert stale.loads == 2
