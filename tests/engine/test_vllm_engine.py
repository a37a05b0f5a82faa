"""The vLLM engine against a stand-in over real HTTP: order of sleep and wake, deaths, adapters."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from art_core.calls import Sampling
from art_core.engine.adapter_files import CONFIG, WEIGHTS, write_null_adapter
from art_core.engine.base import AdapterRef, GenerateRequest
from art_core.engine.tokenizer import ByteTokenizer
from art_core.engine.vllm import VllmEngine
from art_core.engine.vllm_adapters import AdapterShelf, Loaded
from art_core.engine.vllm_http import VllmHttp
from art_core.engine.vllm_wire import sampling_settings
from art_core.errors import CheckpointError, ContextOverflow, EngineError
from art_core.sealed import MANIFEST
from tests.engine.stub_door import ANSWER, StubVllm

BASE = {"model.layers.0.self_attn.q_proj.weight": (8, 8)}


@pytest.fixture
def stub() -> StubVllm:
    return StubVllm()


@pytest.fixture
async def engine(stub: StubVllm, tmp_path: Path) -> AsyncIterator[VllmEngine]:
    made = make(stub, tmp_path)
    for step in range(4):
        path = tmp_path / f"step{step}"
        write_null_adapter(path, BASE)
        await made.load_adapter(AdapterRef("agent", step), path)
    yield made
    await made.close()


def make(stub: StubVllm, folder: Path, **changes: Any) -> VllmEngine:
    http = VllmHttp(stub)
    shelf = AdapterShelf(http, folder / "shelf", slots=2, max_rank=8, base_shapes=BASE, **changes)
    return VllmEngine(
        stub, ByteTokenizer(), base_model="base", context_length=64, vocab_size=260,
        shelf=shelf, http=http,
    )  # fmt: skip


_count = iter(range(10**9))


def request(step: int | None = None, prompt: int = 3, **sampling: Any) -> GenerateRequest:
    return GenerateRequest(
        request_id=f"r{next(_count)}",
        prompt_ids=np.arange(prompt, dtype=np.int32),
        adapter=None if step is None else AdapterRef("agent", step),
        sampling=Sampling(seed=1, **sampling),
    )


async def collect(engine: VllmEngine, asked: GenerateRequest) -> list[int]:
    return [token async for delta in engine.generate(asked) for token in delta.ids]


async def test_deltas_end_with_the_reason_and_what_was_cached(engine: VllmEngine) -> None:
    deltas = [delta async for delta in engine.generate(request())]
    assert [token for delta in deltas for token in delta.ids] == ANSWER
    assert [delta.finish_reason for delta in deltas] == [None, None, "stop"]
    assert deltas[-1].cached_tokens == 2


@pytest.mark.parametrize("reason", ["abort", "error", None])
async def test_an_end_that_is_none_is_an_error(
    engine: VllmEngine, stub: StubVllm, reason: Any
) -> None:
    """vLLM ends aborted calls as if they were whole."""
    stub.reason = reason
    with pytest.raises(EngineError, match=f"ended a call by {reason!r}"):
        await collect(engine, request())


async def test_what_cant_be_asked_is_refused_before(engine: VllmEngine, stub: StubVllm) -> None:
    with pytest.raises(ContextOverflow, match="64 ids"):
        await collect(engine, request(prompt=64))
    with pytest.raises(EngineError, match="can't be read"):
        await collect(engine, request(prompt=0))
    with pytest.raises(EngineError, match=r"agent@9.*one of \['agent@0', 'agent@1'"):
        await collect(engine, request(9))
    assert stub.asked == []


async def test_penalties_are_vllms_and_ids_of_a_bias_are_numbers_there() -> None:
    asked = Sampling(presence_penalty=1.0, repetition_penalty=1.5, logit_bias=((7, -3.0),))
    settings = sampling_settings(asked, eos_ids=[1], room=5)
    assert (settings["presence_penalty"], settings["frequency_penalty"]) == (1.0, 0.0)
    assert (settings["repetition_penalty"], settings["logit_bias"]) == (1.5, {7: -3.0})
    assert sampling_settings(Sampling(), eos_ids=[1], room=5)["logit_bias"] is None


# Sleep


async def test_a_step_holds_waits_sleeps_works_wakes_and_empties_the_cache(
    engine: VllmEngine, stub: StubVllm
) -> None:
    """Case 050. A running call is waited for; one that comes meanwhile is held, then answered by
    what was loaded before it."""
    stub.delay = 0.05
    running = asyncio.create_task(collect(engine, request()))
    while "call None" not in stub.asked:  # noqa: ASYNC110 - a list says no more than this
        await asyncio.sleep(0.005)
    async with engine.asleep():
        assert running.done()
        assert stub.is_asleep
        assert stub.stays_down
        held = asyncio.create_task(collect(engine, request(3)))
        await asyncio.sleep(0.05)
        stub.asked.append("train")
    assert await held == ANSWER
    order = [*("call None", "sleep level=1&mode=wait", "train", "wake", "reset")]
    assert stub.asked == [*order, "load agent@3", "call agent@3"]


def start_late(stub: StubVllm) -> None:
    time.sleep(0.2)
    stub.start()


def start_once_free(stub: StubVllm) -> None:
    while stub.stays_down:
        time.sleep(0.01)
    stub.start()


async def test_one_that_dies_asleep_is_started_when_the_gpu_is_free(
    engine: VllmEngine, stub: StubVllm
) -> None:
    """It would take the trainer's memory; afterwards it comes back awake, and calls go on."""
    async with engine.asleep():
        stub.stop()
        assert stub.stays_down
        back = asyncio.create_task(asyncio.to_thread(start_once_free, stub))
    await back
    assert await collect(engine, request(1)) == ANSWER


async def test_one_that_is_down_is_waited_for_before_it_sleeps(
    engine: VllmEngine, stub: StubVllm
) -> None:
    stub.stop()
    back = asyncio.create_task(asyncio.to_thread(start_late, stub))
    async with engine.asleep():
        assert stub.is_asleep
    assert stub.asked[-3:] == ["sleep level=1&mode=wait", "wake", "reset"]
    await back


async def test_work_that_fails_leaves_it_awake(engine: VllmEngine, stub: StubVllm) -> None:
    with pytest.raises(ZeroDivisionError):
        async with engine.asleep():
            raise ZeroDivisionError
    assert not stub.is_asleep
    assert await collect(engine, request()) == ANSWER


async def test_one_that_cant_be_woken_says_so_and_holds_nobody(
    engine: VllmEngine, stub: StubVllm
) -> None:
    stub.refuses_wake = True
    with pytest.raises(EngineError, match="no memory"):
        async with engine.asleep():
            pass
    with pytest.raises(EngineError, match="asleep"):
        async with asyncio.timeout(10):
            await collect(engine, request())


async def test_a_second_sleep_is_refused_and_the_first_goes_on(
    engine: VllmEngine, stub: StubVllm
) -> None:
    async with engine.asleep():
        with pytest.raises(EngineError, match="sleeps already"):
            async with engine.asleep():
                pass
        assert stub.is_asleep
    assert await collect(engine, request()) == ANSWER


# Deaths


async def test_a_call_that_meets_a_restart_is_asked_again_with_its_adapter(
    engine: VllmEngine, stub: StubVllm
) -> None:
    assert await collect(engine, request(1)) == ANSWER
    stub.stop()
    stub.start()
    assert await collect(engine, request(1)) == ANSWER
    assert stub.asked.count("load agent@1") == 2
    assert len(stub.loaded) == 1


async def test_a_death_that_nobody_has_seen_yet_is_waited_for(
    engine: VllmEngine, stub: StubVllm
) -> None:
    stub.stop()
    asking = asyncio.create_task(collect(engine, request(1)))
    await asyncio.sleep(0.1)
    assert not asking.done()
    await asyncio.to_thread(stub.start)
    assert await asking == ANSWER


async def test_one_that_breaks_before_its_first_token_is_asked_again(
    engine: VllmEngine, stub: StubVllm
) -> None:
    stub.breaks = [0]
    assert await collect(engine, request()) == ANSWER
    assert stub.asked == ["call None", "look", "call None"]


async def test_one_that_breaks_later_is_an_error(engine: VllmEngine, stub: StubVllm) -> None:
    """What was given out can't be taken back; the first token is held until the second comes."""
    stub.breaks = [2]
    with pytest.raises(EngineError, match="broke off"):
        await collect(engine, request())
    stub.breaks = [0, 0]
    with pytest.raises(EngineError, match="broke off"):
        await collect(engine, request())
    assert engine.running == 0


async def test_one_that_forgot_an_adapter_gets_it_again(engine: VllmEngine, stub: StubVllm) -> None:
    await collect(engine, request(1))
    stub.loaded.clear()
    assert await collect(engine, request(1)) == ANSWER


# Adapters


async def test_the_longest_unasked_goes_when_there_is_no_slot(
    engine: VllmEngine, stub: StubVllm, tmp_path: Path
) -> None:
    for step in (0, 1, 0, 2):
        await collect(engine, request(step))
    told = [line for line in stub.asked if not line.startswith("call")]
    assert told == ["load agent@0", "load agent@1", "load agent@2", "unload agent@1"]
    assert {path.name for path in (tmp_path / "shelf").iterdir()} == {
        Path(path).name for path in stub.loaded.values()
    }


async def test_what_is_in_use_stays_though_there_is_no_slot(
    engine: VllmEngine, stub: StubVllm
) -> None:
    stub.delay = 0.03
    answers = await asyncio.gather(*(collect(engine, request(step)) for step in (0, 1, 2, 3)))
    assert answers == [ANSWER] * 4
    assert len(stub.loaded) == 2


async def test_what_was_loaded_for_a_call_is_not_unloaded_before_it(
    engine: VllmEngine, stub: StubVllm
) -> None:
    """Two long calls hold both slots; two others need a slot each. Seen with vLLM: each unloaded
    what the other had just loaded, thousands of times, and vLLM came to nothing else."""
    stub.delay = 0.2
    await asyncio.gather(*(collect(engine, request(step)) for step in (0, 1, 2, 3)))
    loads = [line for line in stub.asked if line.startswith("load")]
    assert sorted(loads) == [f"load agent@{step}" for step in range(4)]


async def test_many_calls_load_an_adapter_once(engine: VllmEngine, stub: StubVllm) -> None:
    await asyncio.gather(*(collect(engine, request(1)) for _ in range(20)))
    assert stub.asked.count("load agent@1") == 1


async def test_calls_of_several_event_loops_share_it(engine: VllmEngine, stub: StubVllm) -> None:
    stub.delay = 0.01

    def elsewhere() -> list[int]:
        return asyncio.run(collect(engine, request(1)))

    answers = await asyncio.gather(*(asyncio.to_thread(elsewhere) for _ in range(4)))
    assert answers == [ANSWER] * 4
    assert stub.asked.count("load agent@1") == 1


async def test_a_step_that_is_saved_elsewhere_is_loaded_under_another_name(
    engine: VllmEngine, stub: StubVllm, tmp_path: Path
) -> None:
    await collect(engine, request(1))
    write_null_adapter(tmp_path / "other", BASE)
    await engine.load_adapter(AdapterRef("agent", 1), tmp_path / "other")
    await collect(engine, request(1))
    names = {line for line in stub.asked if line.startswith(("load", "unload"))}
    assert names == {"load agent@1", "unload agent@1"}
    assert len(stub.loaded) == 1


async def test_what_is_forgotten_while_it_loads_is_not_served(
    engine: VllmEngine, stub: StubVllm, tmp_path: Path
) -> None:
    stub.load_delay = 0.1
    asking = asyncio.create_task(collect(engine, request(1)))
    while "load agent@1" not in stub.asked:  # noqa: ASYNC110 - a list says no more than this
        await asyncio.sleep(0.005)
    await engine.unload_adapter(AdapterRef("agent", 1))
    with pytest.raises(EngineError, match="adapter is not served"):
        await asking
    assert stub.loaded == {}
    assert list((tmp_path / "shelf").iterdir()) == []


async def test_an_adapter_that_changed_since_it_was_saved_is_not_served(
    engine: VllmEngine, stub: StubVllm, tmp_path: Path
) -> None:
    path = tmp_path / "step1"
    told = {"files": {WEIGHTS: {"size": 1, "sha256": "0" * 64}}}
    (path / MANIFEST).write_text(json.dumps(told))
    with pytest.raises(CheckpointError, match="with the SHA-256"):
        await collect(engine, request(1))
    assert await collect(engine, request(2)) == ANSWER


async def test_an_unloading_that_is_cancelled_is_done_by_the_next(
    engine: VllmEngine, stub: StubVllm, tmp_path: Path
) -> None:
    """Else it would keep its place in vLLM, and its files, for ever."""
    await collect(engine, request(1))
    stub.unload_delay = 0.2
    forgetting = asyncio.create_task(engine.unload_adapter(AdapterRef("agent", 1)))
    await asyncio.sleep(0.05)
    forgetting.cancel()
    await asyncio.gather(forgetting, return_exceptions=True)
    assert len(list((tmp_path / "shelf").iterdir())) == 1
    stub.unload_delay = 0.0
    await collect(engine, request(2))
    [path] = stub.loaded.values()
    assert [Path(path)] == list((tmp_path / "shelf").iterdir())


async def test_one_that_is_started_again_while_an_adapter_is_read_knows_it(
    engine: VllmEngine, stub: StubVllm, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was loaded into the new process: it is not loaded there a second time, and leaves it."""
    stage = engine.shelf._stage

    def slow(ref: AdapterRef, path: Path) -> Loaded:
        staged = stage(ref, path)
        stub.stop()
        stub.start()
        return staged

    monkeypatch.setattr(engine.shelf, "_stage", slow)
    assert await collect(engine, request(1)) == ANSWER
    monkeypatch.undo()
    assert await collect(engine, request(1)) == ANSWER
    assert stub.asked.count("load agent@1") == 1
    await engine.unload_adapter(AdapterRef("agent", 1))
    assert stub.loaded == {}


async def test_the_base_model_answers_through_an_adapter_that_changes_nothing(
    stub: StubVllm, tmp_path: Path
) -> None:
    """On a CPU vLLM gives calls without an adapter that of the last slot."""
    engine = make(stub, tmp_path, stand_in=True)
    assert await collect(engine, request()) == ANSWER
    assert stub.asked == ["load @0", "call @0"]
    assert engine.adapters() == []
    [folder] = stub.loaded.values()
    assert json.loads((Path(folder) / CONFIG).read_text())["target_modules"] == ["q_proj"]
    await engine.close()
