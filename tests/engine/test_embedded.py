"""The embedded engine: behind HTTP it conforms; by itself it survives what callers do to it."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import openai
import pytest

pytest.importorskip("torch", reason="art-langgraph[train] is not installed")

import torch

from art_core.calls import Sampling
from art_core.config import EngineConfig
from art_core.engine import embedded
from art_core.engine.base import AdapterRef, Delta, GenerateRequest
from art_core.engine.embedded import EmbeddedEngine
from art_core.engine.generate import Lane
from art_core.engine.tokenizer import HFTokenizer
from art_core.errors import ContextOverflow, EngineError
from art_core.nn.lora import LoraModel
from tests.engine.conformance import (
    JSON_FORMAT,
    Conformance,
    Served,
    ids_of,
    logprobs_of,
    prompt_of,
)
from tests.engine.house import NAMES, House, Plain, write_adapters


@pytest.fixture(scope="module")
def adapters(tiny_llama: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return write_adapters(tiny_llama, tmp_path_factory.mktemp("adapters"), scale=0.3)


@pytest.fixture(scope="module")
def plain(tiny_llama: Path, adapters: dict[str, Path]) -> Plain:
    return Plain(tiny_llama, adapters)


@pytest.fixture(scope="module")
def house(tiny_llama: Path, adapters: dict[str, Path]) -> Iterator[House]:
    made = House(tiny_llama, adapters)
    yield made
    made.close()


class TestTiny(Conformance):
    """On the random model, within the noise that DESIGN allows float32."""

    @pytest.fixture
    def served(self, house: House, plain: Plain) -> Served:
        return house.served(plain, noise=2e-4)


# Records, and what the client is told beside OpenAI's fields


async def test_records_hold_what_was_sampled(house: House, plain: Plain) -> None:
    served = house.served(plain, 2e-4)
    done = await served.chat("agent@1", n=2, max_tokens=6, temperature=0.8)
    record_id = done.system_fingerprint or ""
    for i in range(2):
        record = house.records.get([record_id])[record_id, i]
        assert record.prompt_ids.tolist() == prompt_of(done)
        assert record.sampled_ids.tolist() == ids_of(done, i)
        assert record.logprobs.tolist() == np.array(logprobs_of(done, i), np.float32).tolist()
        assert (record.model, record.step, record.complete) == ("agent", 1, True)
        assert record.sampling.temperature == 0.8
        assert not record.sampling.distorted


async def test_a_bias_is_refused_by_name(house: House, plain: Plain) -> None:
    with pytest.raises(openai.BadRequestError, match=r"without penalties.*EngineConfig\(kind="):
        await house.served(plain, 2e-4).chat(logit_bias={"5": 1}, max_tokens=2)


async def test_an_answer_under_a_grammar_is_recorded_as_distorted(
    house: House, plain: Plain
) -> None:
    done = await house.served(plain, 2e-4).chat(response_format=JSON_FORMAT, max_tokens=100)
    record_id = done.system_fingerprint or ""
    record = house.records.get([record_id])[record_id, 0]
    assert record.sampling.grammar == "json_schema"
    assert record.sampling.distorted


async def test_a_client_that_leaves_frees_its_place(house: House, plain: Plain) -> None:
    """Both ways of asking; the record says that the call broke off."""
    served = house.served(plain, 2e-4)
    messages: Any = [{"role": "user", "content": "hi"}]
    body: Any = {"model": "agent", "messages": messages, "extra_body": {"min_tokens": 400}}
    rollout = {"x-art-rollout": "leaves"}
    async with served.client() as client:
        stream = await client.chat.completions.create(stream=True, extra_headers=rollout, **body)
        async for _ in stream:
            break
        await stream.close()
        await until(lambda: house.engine.running == 0)
        asking = asyncio.ensure_future(
            client.chat.completions.create(extra_headers=rollout, **body)
        )
        await until(lambda: house.engine.running == 1)
        asking.cancel()
    await until(lambda: house.engine.running == 0)
    await until(lambda: len(house.records.of_rollout("leaves")) == 2)
    for record in house.records.of_rollout("leaves"):
        assert not record.complete
        assert len(record.sampled_ids) < 400


# The engine by itself


@pytest.fixture
async def engine(tiny_llama: Path, adapters: dict[str, Path]) -> AsyncIterator[EmbeddedEngine]:
    made = await start(tiny_llama)
    for name, path in adapters.items():
        await made.load_adapter(ref(name), path)
    yield made
    await made.close()


async def start(base: Path, **config: Any) -> EmbeddedEngine:
    settings = EngineConfig(threads=1, **config)
    return EmbeddedEngine(
        LoraModel.load(base), HFTokenizer(base), base_model="base", config=settings
    )


def ref(name: str) -> AdapterRef:
    model, step = name.split("@")
    return AdapterRef(model, int(step))


_count = iter(range(10**9))


def request(
    prompt: Sequence[int] = (1, 2, 3), adapter: str | None = None, **sampling: Any
) -> GenerateRequest:
    settings = {"seed": 1, "max_tokens": 6, "min_tokens": 0, **sampling}
    return GenerateRequest(
        request_id=f"r{next(_count)}",
        prompt_ids=np.array(prompt, np.int32),
        adapter=None if adapter is None else ref(adapter),
        sampling=Sampling(**settings),
    )


def endless(prompt: Sequence[int] = (1, 2, 3), adapter: str | None = None) -> GenerateRequest:
    """A request that runs for as long as the context lasts."""
    return request(prompt, adapter, max_tokens=None, min_tokens=10_000)


async def collect(engine: EmbeddedEngine, asked: GenerateRequest) -> tuple[list[int], list[float]]:
    ids: list[int] = []
    logprobs: list[float] = []
    async for delta in engine.generate(asked):
        ids += delta.ids
        logprobs += delta.logprobs
    return ids, logprobs


async def begin(
    engine: EmbeddedEngine, asked: GenerateRequest
) -> tuple[AsyncGenerator[Delta, None], list[int]]:
    """Start a call and wait for its first token."""
    deltas = engine.generate(asked)
    first = await anext(deltas)
    return deltas, list(first.ids)


async def until(condition: Callable[[], bool]) -> None:
    """Wait at most 60 s."""
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline, "waited 60 s in vain"
        await asyncio.sleep(0.005)


def check(plain: Plain, asked: GenerateRequest, answer: tuple[list[int], list[float]]) -> None:
    name = str(asked.adapter) if asked.adapter else "base"
    ids, logprobs = answer
    logits = plain.logits(name, asked.prompt_ids.tolist(), ids)
    wanted = logits.double().log_softmax(-1)[torch.arange(len(ids)), ids]
    np.testing.assert_allclose(logprobs, wanted, rtol=0, atol=2e-4)


async def test_many_calls_of_many_adapters_at_once(engine: EmbeddedEngine, plain: Plain) -> None:
    """Seven policies on disk would not fit in memory at once (four do): all are answered."""
    asked = [
        request([1, 2, i % 3], name, seed=i, max_tokens=4 + i % 7)
        for i, name in enumerate([None, *NAMES] * 4)
    ]
    answers = await asyncio.gather(*(collect(engine, r) for r in asked))
    for one, answer in zip(asked, answers, strict=True):
        check(plain, one, answer)


async def test_a_batch_starts_with_all_that_came_together(
    engine: EmbeddedEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes: list[int] = []
    step = Lane.step

    def counted(lane: Lane) -> Any:
        sizes.append(len(lane))
        return step(lane)

    monkeypatch.setattr(Lane, "step", counted)
    await asyncio.gather(*(collect(engine, request(max_tokens=3)) for _ in range(16)))
    assert sizes == [16, 16, 16]


async def test_no_more_than_max_batch_and_max_row_tokens_at_a_time(
    tiny_llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prompts of 21 ids that share none: three of 20 positions make 60, a fourth would pass 70.
    The last is longer than 70 by itself, so it comes alone."""
    engine = await start(tiny_llama, max_batch=5, max_row_tokens=70)
    admitted: list[list[int]] = [[]]
    admit, step = Lane.admit, Lane.step
    running: list[int] = []

    def counted_admit(lane: Lane, one: GenerateRequest, matcher: Any) -> None:
        admitted[-1].append(len(one.prompt_ids) - 1)
        admit(lane, one, matcher)

    def counted_step(lane: Lane) -> Any:
        running.append(len(lane))
        admitted.append([])
        return step(lane)

    monkeypatch.setattr(Lane, "admit", counted_admit)
    monkeypatch.setattr(Lane, "step", counted_step)
    prompts = [[i] * 21 for i in range(9)] + [[9] * 100]
    await asyncio.gather(*(collect(engine, request(p, max_tokens=4)) for p in prompts))
    await engine.close()
    assert [batch for batch in admitted if batch] == [
        [20, 20, 20], [20, 20], [20, 20, 20], [20], [99],
    ]  # fmt: skip
    assert max(running) == 5


async def test_a_shared_stem_counts_once_in_a_row(
    tiny_llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Eight prompts of 60 positions in common and one of their own fit in a row of 70."""
    engine = await start(tiny_llama, max_row_tokens=70)
    sizes: list[int] = []
    step = Lane.step

    def counted(lane: Lane) -> Any:
        sizes.append(len(lane))
        return step(lane)

    monkeypatch.setattr(Lane, "step", counted)
    asked = [request([7] * 60 + [i, i], max_tokens=2) for i in range(8)]
    await asyncio.gather(*(collect(engine, one) for one in asked))
    await engine.close()
    assert sizes == [8, 8]


async def test_calls_from_several_loops_and_threads(engine: EmbeddedEngine, plain: Plain) -> None:
    asked = [request([i, i + 1], NAMES[i % 4], seed=i) for i in range(12)]
    answers: dict[int, tuple[list[int], list[float]]] = {}

    def work(i: int) -> None:
        answers[i] = asyncio.run(collect(engine, asked[i]))

    threads = [threading.Thread(target=work, args=(i,)) for i in range(12)]
    for thread in threads:
        thread.start()
    here = await collect(engine, request([50]))
    await until(lambda: len(answers) == 12)
    for thread in threads:
        thread.join()
    for i, one in enumerate(asked):
        check(plain, one, answers[i])
    assert len(here[0]) == 6


async def test_a_loop_that_is_gone_frees_its_calls(engine: EmbeddedEngine) -> None:
    """Its generator is never closed: nothing tells the engine but the loop that is closed."""

    def work() -> None:
        loop = asyncio.new_event_loop()
        left.append(loop.run_until_complete(begin(engine, endless()))[0])
        loop.close()

    left: list[AsyncGenerator[Delta, None]] = []
    await asyncio.to_thread(work)
    await until(lambda: engine.running == 0)
    assert len((await collect(engine, request()))[0]) == 6
    left.clear()


async def test_a_closed_iterator_frees_its_place_for_one_that_waits(tiny_llama: Path) -> None:
    engine = await start(tiny_llama, max_batch=1)
    deltas, _ = await begin(engine, endless())
    waits = asyncio.ensure_future(collect(engine, request()))
    gives_up = asyncio.ensure_future(collect(engine, endless()))
    await asyncio.sleep(0.05)
    assert not waits.done()
    gives_up.cancel()  # before it was begun
    await deltas.aclose()
    assert len((await waits)[0]) == 6
    await until(lambda: engine.running == 0)
    await engine.close()


async def test_a_second_request_under_one_id_is_refused_and_the_first_goes_on(
    engine: EmbeddedEngine,
) -> None:
    first = request(max_tokens=30, min_tokens=30)
    deltas, ids = await begin(engine, first)
    with pytest.raises(EngineError, match="one id"):
        await collect(engine, first)
    async for delta in deltas:
        ids += delta.ids
    assert len(ids) == 30


@pytest.mark.parametrize("prompt", [[], [1, 300], [-1, 4]])
async def test_a_prompt_that_can_not_be_read_harms_nobody(
    engine: EmbeddedEngine, prompt: list[int]
) -> None:
    """The model has 300 embeddings."""
    neighbour = asyncio.ensure_future(collect(engine, request()))
    with pytest.raises(EngineError, match="can't be read"):
        await collect(engine, request(prompt))
    assert len((await neighbour)[0]) == 6


async def test_a_prompt_as_long_as_the_context_is_refused(engine: EmbeddedEngine) -> None:
    """The context is 512: 511 ids leave room for one."""
    with pytest.raises(ContextOverflow, match="512"):
        await collect(engine, request([1] * 512))
    ids, _ = await collect(engine, request([1] * 511, max_tokens=None))
    assert len(ids) == 1


async def test_an_unknown_adapter_is_refused_by_name(engine: EmbeddedEngine) -> None:
    with pytest.raises(EngineError, match=r"agent@7.*agent@0"):
        await collect(engine, request(adapter="agent@7"))


async def test_a_step_that_fails_tells_every_caller_and_the_engine_goes_on(
    engine: EmbeddedEngine, plain: Plain, monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    """Two calls of the lane that fails, one of a lane that does not."""
    step = Lane.step

    def fails(lane: Lane) -> Any:
        if len(lane) == 2:
            raise RuntimeError("out of luck")
        return step(lane)

    other = request([9, 9], "other@5", max_tokens=20)
    monkeypatch.setattr(Lane, "step", fails)
    with caplog.at_level(logging.CRITICAL, "art_core"):
        one, two, three = await asyncio.gather(
            *(collect(engine, r) for r in (request([5]), request([6]), other)),
            return_exceptions=True,
        )
    for failed in (one, two):
        assert isinstance(failed, EngineError)
        assert "RuntimeError: out of luck" in str(failed)
    assert isinstance(three, tuple)
    check(plain, other, three)
    monkeypatch.setattr(Lane, "step", step)
    again = request([5])
    check(plain, again, await collect(engine, again))
    assert engine.running == 0


# Adapters


async def test_old_steps_are_read_from_disk_and_the_longest_unasked_goes(
    engine: EmbeddedEngine, plain: Plain, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(embedded, "_LOADED_FROM_DISK", 2)
    reads: list[Path] = []
    load = LoraModel.load_adapter

    def counted(model: LoraModel, name: str, folder: Path) -> None:
        reads.append(folder)
        load(model, name, folder)

    monkeypatch.setattr(LoraModel, "load_adapter", counted)
    for name in ["agent@0", "agent@1", "agent@0", "agent@2", "agent@0", "agent@1"]:
        asked = request(adapter=name)
        check(plain, asked, await collect(engine, asked))
    # agent@2 took the place of agent@1, and that then the place of agent@2
    assert [path.name for path in reads] == ["agent@0", "agent@1", "agent@2", "agent@1"]
    names = await engine.exclusive(lambda model: model.adapters())
    assert len(names) == 2


async def test_more_steps_at_once_than_are_kept_are_all_answered(
    engine: EmbeddedEngine, plain: Plain, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(embedded, "_LOADED_FROM_DISK", 1)
    asked = [request([i], name, max_tokens=20) for i, name in enumerate(NAMES)]
    answers = await asyncio.gather(*(collect(engine, one) for one in asked))
    for one, answer in zip(asked, answers, strict=True):
        check(plain, one, answer)
    assert len(await engine.exclusive(lambda model: model.adapters())) == 1


async def test_an_adapter_that_can_not_be_read_fails_its_callers_alone(
    engine: EmbeddedEngine, tmp_path: Path
) -> None:
    await engine.load_adapter(AdapterRef("bad", 1), tmp_path)
    neighbour = asyncio.ensure_future(collect(engine, request(max_tokens=20, min_tokens=20)))
    with pytest.raises(EngineError, match="adapter can't be read"):
        await collect(engine, request(adapter="bad@1"))
    assert len((await neighbour)[0]) == 20


async def test_unloading_lets_running_calls_end_and_refuses_later_ones(
    engine: EmbeddedEngine, plain: Plain
) -> None:
    asked = request(adapter="agent@1", max_tokens=40, min_tokens=40)
    deltas, ids = await begin(engine, asked)
    await engine.unload_adapter(ref("agent@1"))
    with pytest.raises(EngineError, match="not served"):
        await collect(engine, request(adapter="agent@1"))
    async for delta in deltas:
        ids += delta.ids
    assert len(ids) == 40
    names = await engine.exclusive(lambda model: model.adapters())
    assert names == []  # nothing of it is left in memory
    await engine.unload_adapter(ref("agent@1"))  # a second time changes nothing
    assert ref("agent@1") not in engine.adapters()


async def test_an_adapter_loaded_again_from_elsewhere_answers_with_the_new_weights(
    engine: EmbeddedEngine, plain: Plain, adapters: dict[str, Path]
) -> None:
    old = request(adapter="agent@1", max_tokens=30, min_tokens=30)
    deltas, ids = await begin(engine, old)
    await engine.load_adapter(ref("agent@1"), adapters["other@5"])
    asked = request([1, 2, 3], "agent@1")
    answer = await collect(engine, asked)
    check(plain, replace(asked, adapter=ref("other@5")), answer)
    async for delta in deltas:
        ids += delta.ids
    assert len(ids) == 30


# Exclusive work


async def test_exclusive_work_waits_for_what_runs_and_holds_what_comes(
    engine: EmbeddedEngine,
) -> None:
    """The answer before reaches its caller while the work goes on; the one after does not."""

    def work(model: LoraModel) -> tuple[int, bool, bool]:
        running = engine.running
        deadline = time.monotonic() + 20
        while not before.done() and time.monotonic() < deadline:
            time.sleep(0.005)
        return running, before.done(), after.done()

    before = asyncio.ensure_future(collect(engine, request(max_tokens=50, min_tokens=50)))
    await until(lambda: engine.running == 1)
    working = asyncio.ensure_future(engine.exclusive(work))
    await asyncio.sleep(0)  # let it be asked
    after = asyncio.ensure_future(collect(engine, request(max_tokens=1)))
    assert await working == (0, True, False)
    assert len((await before)[0]) == 50
    assert len((await after)[0]) == 1


async def test_what_comes_after_exclusive_work_is_answered_by_what_it_left(
    engine: EmbeddedEngine, plain: Plain, adapters: dict[str, Path]
) -> None:
    """The same name in the module, first with the weights of step 0, then with those of step 1;
    a prompt cached under the old weights must not be read under the new ones."""

    def serve(step: int) -> Callable[[LoraModel], None]:
        def work(model: LoraModel) -> None:
            model.load_adapter("live", adapters[f"agent@{step}"])
            engine.adopt(AdapterRef("agent", step), "live")

        return work

    await engine.exclusive(serve(0))
    first = request(adapter="agent@0")
    check(plain, first, await collect(engine, first))
    working = asyncio.ensure_future(engine.exclusive(serve(1)))
    await asyncio.sleep(0)
    old, new = request(adapter="agent@0"), request(adapter="agent@1")
    answers = await asyncio.gather(collect(engine, old), collect(engine, new))
    await working
    check(plain, old, answers[0])  # from disk by now
    check(plain, new, answers[1])
    assert answers[0][0] != answers[1][0]


async def test_a_call_cancelled_while_work_waits_is_never_run(engine: EmbeddedEngine) -> None:
    """The order in the inbox is: a running call, work, a call, the call's cancellation."""
    deltas, _ = await begin(engine, endless())
    release = threading.Event()
    working = asyncio.ensure_future(engine.exclusive(lambda model: release.wait(20)))
    await asyncio.sleep(0.02)
    calls = [asyncio.ensure_future(collect(engine, endless())) for _ in range(30)]
    await asyncio.sleep(0.02)
    for call in calls:
        call.cancel()
    await asyncio.sleep(0)
    await deltas.aclose()
    release.set()
    assert await working is True
    assert len((await collect(engine, request()))[0]) == 6
    assert engine.running == 0


async def test_work_that_raises_says_so_and_the_engine_goes_on(engine: EmbeddedEngine) -> None:
    def fails(model: LoraModel) -> None:
        raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        await engine.exclusive(fails)
    assert len((await collect(engine, request()))[0]) == 6


async def test_cancelled_work_is_not_begun_or_goes_on_to_its_end(engine: EmbeddedEngine) -> None:
    """As after Ctrl-C or a timeout around `model.train`."""
    deltas, _ = await begin(engine, endless())
    done: list[str] = []
    waiting = asyncio.ensure_future(engine.exclusive(lambda model: done.append("never")))
    await asyncio.sleep(0.02)
    waiting.cancel()
    await asyncio.sleep(0)
    await deltas.aclose()

    begun, release = threading.Event(), threading.Event()

    def work(model: LoraModel) -> None:
        begun.set()
        release.wait(20)
        done.append("ended")

    running = asyncio.ensure_future(engine.exclusive(work))
    await asyncio.to_thread(begun.wait, 20)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    release.set()
    assert len((await collect(engine, request()))[0]) == 6
    assert done == ["ended"]


# Memory


async def test_all_lanes_share_one_limit_of_cached_prompts(tiny_llama: Path, adapters: Any) -> None:
    """30 positions in all: each call leaves 24, so the one before loses its own."""
    engine = await start(tiny_llama, cache_tokens=30)
    for name in NAMES:
        await engine.load_adapter(ref(name), adapters[name])
    everyone: list[str | None] = [None, *NAMES]
    for model in everyone:
        await collect(engine, request(list(range(19)), model, min_tokens=6))
    lanes = [policy.lane for policy in engine._policies.values()]
    assert sum(lane.cached for lane in lanes) <= 30
    deltas = [d async for d in engine.generate(request(list(range(19)), NAMES[-1]))]
    assert deltas[-1].cached_tokens == 18  # the last one asked still has its prompt
    await engine.close()


async def test_a_lane_that_rests_gives_its_slots_back(engine: EmbeddedEngine) -> None:
    await asyncio.gather(*(collect(engine, request([i])) for i in range(8)))
    await collect(engine, request(adapter="agent@0"))
    base = engine._policies[None].lane
    assert base._k.numel() == 0


# The end


async def test_closing_ends_running_and_waiting_calls_and_work(tiny_llama: Path) -> None:
    engine = await start(tiny_llama, max_batch=1)
    deltas, _ = await begin(engine, endless())
    waits = asyncio.ensure_future(collect(engine, request()))
    work = asyncio.ensure_future(engine.exclusive(lambda model: None))
    await asyncio.sleep(0.02)
    await asyncio.gather(engine.close(), engine.close())
    await engine.close()
    with pytest.raises(EngineError, match="closed"):
        async for _ in deltas:
            pass
    for waiting in (waits, work):
        with pytest.raises(EngineError, match="closed"):
            await waiting
    for late in (collect(engine, request()), engine.exclusive(lambda model: None)):
        with pytest.raises(EngineError, match="closed"):
            await late
    await deltas.aclose()


async def test_calls_that_come_while_it_closes_are_all_told(tiny_llama: Path) -> None:
    """From four threads, until each is told that the engine is closed; none may hang."""
    engine = await start(tiny_llama)
    told: list[str] = []

    def work() -> None:
        while True:
            try:
                asyncio.run(asyncio.wait_for(collect(engine, request(max_tokens=2)), 20))
            except EngineError as error:
                told.append(str(error))
                return

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    await asyncio.sleep(0.1)
    await engine.close()
    for thread in threads:
        await asyncio.to_thread(thread.join, 20)
    assert len(told) == 4
    assert all("closed" in text for text in told)
