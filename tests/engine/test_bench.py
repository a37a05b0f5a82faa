"""The trainer's bench beside a vLLM that shares its GPU: a stand-in that can be asleep."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("torch", reason="art-langgraph[train] is not installed")

import torch

from art_core.batch.probe import Probe
from art_core.batch.sample import Sample
from art_core.calls import Ids, Logprobs, Sampling
from art_core.config import LoraSettings
from art_core.engine.adapter_files import write_null_adapter
from art_core.engine.base import AdapterRef, GenerateRequest
from art_core.engine.vllm import VllmEngine
from art_core.errors import EngineError
from art_core.local.bench import OwnBench
from art_core.nn.lora import LoraModel
from art_core.training.canary import watch_canary
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


@pytest.fixture
async def bench(tiny_llama: Path, engine: VllmEngine) -> AsyncIterator[OwnBench]:
    made = OwnBench(LoraModel.load(tiny_llama), engine, sleeps=True, threads=1)
    yield made
    made.close()


async def test_work_has_the_gpu_to_itself_and_its_step_answers_what_was_held(
    bench: OwnBench, engine: VllmEngine, stub: StubVllm, tmp_path: Path
) -> None:
    """Sleep, train, wake, empty the cache, load the new step, answer: case 050 whole."""
    begun, go_on = threading.Event(), threading.Event()

    def work(module: LoraModel) -> str:
        begun.set()
        go_on.wait(10)
        stub.asked.append("train")
        return threading.current_thread().name

    training = asyncio.create_task(bench.exclusive(work))
    await asyncio.to_thread(begun.wait, 10)
    assert stub.is_asleep
    asked = GenerateRequest("r", np.array([1], np.int32), AdapterRef("agent", 1), Sampling(seed=1))
    write_null_adapter(tmp_path / "step1", BASE)
    await engine.load_adapter(AdapterRef("agent", 1), tmp_path / "step1")
    deltas = asyncio.create_task(anext(engine.generate(asked)))
    await asyncio.sleep(0.05)
    go_on.set()
    assert (await training).startswith("art-trainer")
    assert list((await deltas).ids) == ANSWER[:1]
    order = ["sleep level=1&mode=wait", "train", "wake", "reset", "load agent@1", "call agent@1"]
    assert stub.asked == order


async def test_work_that_fails_wakes_it_and_the_next_has_its_turn(
    bench: OwnBench, stub: StubVllm
) -> None:
    def fails(module: LoraModel) -> None:
        raise ZeroDivisionError

    jobs = (bench.exclusive(fails), bench.exclusive(lambda module: module.layers))
    failed, layers = await asyncio.gather(*jobs, return_exceptions=True)
    assert isinstance(failed, ZeroDivisionError)
    assert layers == 2
    assert stub.asked == ["sleep level=1&mode=wait", "wake", "reset"] * 2
    assert not stub.is_asleep


async def test_work_that_needs_little_lets_it_answer(bench: OwnBench, stub: StubVllm) -> None:
    assert await bench.aside(lambda module: module.layers) == 2
    assert stub.asked == []


async def test_where_little_is_too_much_it_sleeps_after_all(
    bench: OwnBench, stub: StubVllm
) -> None:
    tries = []

    def work(module: LoraModel) -> bool:
        tries.append(stub.is_asleep)
        if not stub.is_asleep:
            raise torch.OutOfMemoryError("of the GPU")
        return True

    assert await bench.aside(work)
    assert tries == [False, True]
    with pytest.raises(ZeroDivisionError):
        await bench.aside(lambda module: 1 // 0)
    assert stub.asked == ["sleep level=1&mode=wait", "wake", "reset"]


# What the canary asks


async def test_the_canary_is_what_a_step_changed_of_its_own_tokens(
    tiny_llama: Path, bench: OwnBench, tmp_path: Path
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

    def work(module: LoraModel) -> Probe | None:
        module.create_adapter("live", LoraSettings(rank=4), seed=0)
        canary = watch_canary(module, "live", samples, longest=512)
        shake(module, 1, "live")
        module.save_adapter("live", tmp_path / "live")
        return canary()

    (tmp_path / "live").mkdir()
    probe = await bench.exclusive(work)
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
    tiny_llama: Path, engine: VllmEngine, heals: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = np.linspace(-3, -1, 60)
    change = np.linspace(-0.2, 0.3, 60)
    ids = np.arange(61, dtype=np.int32)
    probe = Probe((ids,), (np.arange(1, 61),), before, before + change)
    stale = _Engine(probe, heals)
    bench = OwnBench(LoraModel.load(tiny_llama), engine, sleeps=False, threads=None)
    monkeypatch.setattr(engine, "score", stale.score)
    monkeypatch.setattr(engine.shelf, "renew", stale.renew)
    old, new = AdapterRef("agent", 1), AdapterRef("agent", 2)
    if heals:
        assert (await bench.prove(old, new, probe))["swap/proved"] == 1.0
    else:
        with pytest.raises(EngineError, match="agent@2 is not answered by its own weights"):
            await bench.prove(old, new, probe)
    assert stale.loads == 2
    bench.close()
