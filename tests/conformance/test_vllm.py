"""vLLM behind our endpoint: it conforms as the embedded engine does, learns, and is proved to."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import openai
import pytest
import torch

import art_core as art
from art_core.batch.probe import Float, Probe
from art_core.calls import Ids
from art_core.engine.adapter_files import CONFIG
from art_core.engine.base import AdapterRef
from art_core.engine.swap_proof import prove_swap
from art_core.engine.vllm_server import MODULE
from art_core.errors import CheckpointError, EngineError, TrainerDied
from tests.conformance.conftest import NOISE, VllmHouse
from tests.engine.conformance import (
    JSON_FORMAT,
    Conformance,
    Served,
    ids_of,
    logprobs_of,
    prompt_of,
    text_of,
)
from tests.engine.house import Plain

pytestmark = [pytest.mark.vllm, pytest.mark.model]


class TestVllm(Conformance):
    """On SmolLM2, a CPU build of vLLM in float32."""

    @pytest.fixture
    def served(self, house: VllmHouse, plain: Plain) -> Served:
        return house.served(plain)


async def until(condition: Callable[[], bool]) -> None:
    """Wait at most 60 s."""
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline, "waited 60 s in vain"
        await asyncio.sleep(0.02)


async def test_records_hold_what_was_sampled_and_by_which_step(
    house: VllmHouse, plain: Plain
) -> None:
    done = await house.served(plain).chat("agent@1", n=2, max_tokens=6, temperature=0.8)
    record_id = done.system_fingerprint or ""
    for i in range(2):
        record = house.records.get([record_id])[record_id, i]
        assert record.prompt_ids.tolist() == prompt_of(done)
        assert record.sampled_ids.tolist() == ids_of(done, i)
        assert record.logprobs.tolist() == np.array(logprobs_of(done, i), np.float32).tolist()
        assert (record.model, record.step, record.complete) == ("agent", 1, True)
        assert record.sampling.temperature == 0.8
        assert not record.sampling.distorted


async def test_an_answer_under_a_grammar_is_recorded_as_distorted(
    house: VllmHouse, plain: Plain
) -> None:
    done = await house.served(plain).chat(response_format=JSON_FORMAT, max_tokens=60)
    record_id = done.system_fingerprint or ""
    assert house.records.get([record_id])[record_id, 0].sampling.grammar == "json_schema"


async def test_a_bias_shapes_what_is_sampled_and_its_logprobs(
    house: VllmHouse, plain: Plain
) -> None:
    """5 more on one token's logit, at every place; the record says so."""
    served = house.served(plain)
    [token] = served_ids(house, " the")
    bias: Any = {str(token): 5}
    done = await served.chat(logit_bias=bias, max_tokens=8, seed=2)
    wanted = plain.logits(served.policies[0], prompt_of(done), ids_of(done)).double()
    wanted[:, token] += 5
    expected = wanted.log_softmax(-1)[torch.arange(len(ids_of(done))), ids_of(done)]
    np.testing.assert_allclose(logprobs_of(done), expected, rtol=0, atol=NOISE)
    record_id = done.system_fingerprint or ""
    assert house.records.get([record_id])[record_id, 0].sampling.logit_bias == ((token, 5.0),)


async def test_a_presence_penalty_is_off_what_was_sampled_before(
    house: VllmHouse, plain: Plain
) -> None:
    served = house.served(plain)
    done = await served.chat(presence_penalty=2, max_tokens=16, seed=2)
    ids = ids_of(done)
    wanted = plain.logits(served.policies[0], prompt_of(done), ids).double()
    for place in range(len(ids)):
        wanted[place, sorted(set(ids[:place]))] -= 2
    expected = wanted.log_softmax(-1)[torch.arange(len(ids)), ids]
    np.testing.assert_allclose(logprobs_of(done), expected, rtol=0, atol=NOISE)


def served_ids(house: VllmHouse, text: str) -> list[int]:
    return house.engine.tokenizer.encode(text)


async def test_a_temperature_that_vllm_would_change_is_refused(
    house: VllmHouse, plain: Plain
) -> None:
    """It raises whatever is below 0.01 to 0.01; the record would not say so."""
    with pytest.raises(openai.BadRequestError, match=r"0\.001, expected 0, or at least 0\.01"):
        await house.served(plain).chat(temperature=0.001, max_tokens=2)


async def test_the_next_prompt_begins_with_the_ids_that_were_sampled(
    house: VllmHouse, plain: Plain
) -> None:
    """Token-in: at T=1.5 text is often not written as the tokenizer would; drift is 0."""
    served = house.served(plain)
    headers = {"x-art-rollout": "token-in"}
    messages: list[Any] = [{"role": "user", "content": "Tell me a story."}]
    before: list[int] = []
    for seed in range(3):
        done = await served.chat(
            messages=messages, max_tokens=16, seed=seed, temperature=1.5, extra_headers=headers
        )
        assert prompt_of(done)[: len(before)] == before
        before = prompt_of(done) + ids_of(done)
        messages += [{"role": "assistant", "content": text_of(done)}]
        messages += [{"role": "user", "content": "Go on."}]
    assert not house.base.service.drifts


async def test_a_client_that_leaves_frees_its_place_in_vllm(house: VllmHouse, plain: Plain) -> None:
    """Both ways of asking; the record says that the call broke off."""
    messages: Any = [{"role": "user", "content": "hi"}]
    body: Any = {"model": "agent", "messages": messages, "extra_body": {"min_tokens": 900}}
    rollout = {"x-art-rollout": "leaves"}
    async with house.served(plain).client() as client:
        stream = await client.chat.completions.create(stream=True, extra_headers=rollout, **body)
        async for _ in stream:
            break
        await stream.close()
        await until(lambda: house.engine.running == 0 == running_in_vllm(house))
        asking = asyncio.ensure_future(
            client.chat.completions.create(extra_headers=rollout, **body)
        )
        await until(lambda: house.engine.running == 1 == running_in_vllm(house))
        asking.cancel()
    await until(lambda: house.engine.running == 0 == running_in_vllm(house))
    await until(lambda: len(house.records.of_rollout("leaves")) == 2)
    for record in house.records.of_rollout("leaves"):
        assert not record.complete
        assert len(record.sampled_ids) < 900


def running_in_vllm(house: VllmHouse) -> int:
    """What vLLM itself says."""
    server = house.engine.server
    text = httpx.get(server.base_url + "/metrics", headers=server.headers).text
    [line] = [line for line in text.splitlines() if line.startswith("vllm:num_requests_running{")]
    return int(float(line.rpartition(" ")[2]))


# Adapters


async def test_a_checkpoint_that_is_deleted_goes_on_answering(
    house: VllmHouse, plain: Plain, adapters: dict[str, Path], tmp_path: Path
) -> None:
    """Also when vLLM has to read it again, because others took its place in memory."""
    copy = shutil.copytree(adapters["agent@1"], tmp_path / "copy")
    house.base.service.models.publish("copied", 0)
    ref = AdapterRef("copied", 0)
    await house.engine.load_adapter(ref, copy)
    served = house.served(plain)
    done = await served.chat("copied", max_tokens=6, seed=5)
    held = house.engine.shelf.loaded(ref)
    assert held is not None
    async with house.engine.shelf.use(ref):  # a call that lasts
        shutil.rmtree(copy)
        for name in served.policies:
            await served.chat(name, max_tokens=1)
        again = await served.chat("copied", max_tokens=6, seed=5)
        assert ids_of(again) == ids_of(done)
        assert held.folder.exists()
    await house.engine.unload_adapter(ref)
    house.base.service.models.retire("copied")
    assert not held.folder.exists()


async def test_a_step_loaded_again_has_another_name_and_folder(
    house: VllmHouse, plain: Plain
) -> None:
    """vLLM's prefix cache is keyed by them."""
    served, ref = house.served(plain), AdapterRef("agent", 1)
    await served.chat("agent@1", max_tokens=1)
    first = house.engine.shelf.loaded(ref)
    house.engine.shelf.renew(ref)
    await served.chat("agent@1", max_tokens=1)
    second = house.engine.shelf.loaded(ref)
    assert first is not None
    assert second is not None
    assert (first.sha256, first.ref) == (second.sha256, second.ref)
    assert first.name != second.name
    assert first.folder != second.folder


async def test_an_adapter_that_vllm_cant_carry_is_refused_and_the_rest_goes_on(
    house: VllmHouse, plain: Plain, adapters: dict[str, Path], tmp_path: Path
) -> None:
    wrong = shutil.copytree(adapters["agent@1"], tmp_path / "wrong")
    text = (wrong / CONFIG).read_text()
    (wrong / CONFIG).write_text(text.replace('"r": 4', '"r": 64'))
    with pytest.raises(CheckpointError, match=r"smaller rank.*got 64, expected at most 8"):
        await house.engine.load_adapter(AdapterRef("agent", 7), wrong)
    assert AdapterRef("agent", 7) not in house.engine.adapters()
    await house.served(plain).chat("agent@1", max_tokens=1)


# The swap


async def scored(house: VllmHouse, plain: Plain, old: str, new: str) -> Probe:
    """An answer of `old`, and what plain forward passes say of it under both."""
    done = await house.served(plain).chat(old, "Tell me a story.", max_tokens=80, seed=1)
    prompt, sampled = prompt_of(done), ids_of(done)

    def logprobs(name: str) -> Float:
        wanted = plain.logits(name, prompt, sampled).double().log_softmax(-1)
        values: Float = wanted[torch.arange(len(sampled)), sampled].numpy()
        return values

    ids: Ids = np.array([*prompt, *sampled], np.int32)
    places = len(prompt) + np.arange(len(sampled))
    return Probe((ids,), (places,), logprobs(old), logprobs(new))


async def test_the_canary_tells_the_right_step_from_the_one_before(
    house: VllmHouse, plain: Plain, adapters: dict[str, Path]
) -> None:
    """The right one has a slope of 1; N-1 under the name of N must fail."""
    probe = await scored(house, plain, "agent@1", "agent@2")
    old, new, wrong = (AdapterRef("agent", step) for step in (1, 2, 9))
    verdict = await prove_swap(house.engine, old, new, probe)
    assert verdict.outcome == "proved"
    assert verdict.slope == pytest.approx(1.0, abs=0.05)
    assert verdict.noise < NOISE
    await house.engine.load_adapter(wrong, adapters["agent@1"])
    with pytest.raises(EngineError, match="agent@9 is not answered by its own weights"):
        await prove_swap(house.engine, old, wrong, probe)
    await house.engine.unload_adapter(wrong)


async def test_a_canary_beside_running_calls_harms_neither(
    house: VllmHouse, plain: Plain, adapters: dict[str, Path]
) -> None:
    """The CPU build of vLLM dies of a scoring in one batch with other calls; they take turns."""
    probe = await scored(house, plain, "agent@1", "agent@2")
    old, new = (AdapterRef("agent", step) for step in (1, 2))
    served, starts = house.served(plain), house.engine.server.starts
    calls = [
        asyncio.ensure_future(served.chat("agent@1", max_tokens=40, extra={"min_tokens": 40}))
        for _ in range(4)
    ]
    await until(lambda: house.engine.running == 4)
    verdict = await prove_swap(house.engine, old, new, probe)
    assert verdict.outcome == "proved"
    for done in await asyncio.gather(*calls):
        assert len(ids_of(done)) == 40
    assert house.engine.server.starts == starts


async def test_a_step_is_learned_proved_and_served(house: VllmHouse) -> None:
    """GRPO on answers of vLLM: the trainer reads them as it sampled them, and the new step answers
    otherwise, as the canary measured."""
    model = house.model
    groups = await play(model)
    result = await model.train(groups, art.TrainConfig(learning_rate=3e-3))
    assert (result.step, result.trained) == (1, True)
    assert result.metrics["drift"] == 0
    assert result.metrics["swap/proved"] == 1.0, result.metrics
    assert result.metrics["swap/slope"] == pytest.approx(1.0, abs=0.1)
    for trajectory in await one_more(model):
        assert {call.step for call in trajectory.calls} == {1}
    before, after = [await greedy(model, f"learner@{step}") for step in (0, 1)]
    assert max(abs(a - b) for a, b in zip(before, after, strict=True)) > 10 * NOISE


async def play(model: art.TrainableModel[Any]) -> list[art.TrajectoryGroup]:
    """Two groups of four answers; half of each is good."""

    async def rollout(text: str, reward: float) -> art.Trajectory:
        await model.openai_client().chat.completions.create(
            model=model.name, messages=[{"role": "user", "content": text}]
        )
        return art.Trajectory(reward=reward)

    groups = [
        art.TrajectoryGroup(rollout(f"Say {word}.", i % 2) for i in range(4))
        for word in ("yes", "no")
    ]
    return await art.gather_trajectory_groups(groups, progress=False)


async def one_more(model: art.TrainableModel[Any]) -> list[art.Trajectory]:
    return [trajectory for group in await play(model) for trajectory in group]


async def greedy(model: art.TrainableModel[Any], name: str) -> list[float]:
    """Logprobs of what `name` says to a prompt, token by token."""
    done = await model.openai_client().chat.completions.create(
        model=name,
        messages=[{"role": "user", "content": "Say yes."}],
        temperature=0,
        max_tokens=6,
        logprobs=True,
        extra_body={"min_tokens": 6},
    )
    return logprobs_of(done)


async def test_a_trainer_that_is_killed_leaves_vllm_answering(house: VllmHouse) -> None:
    """kill -9 in a step: the error comes, calls go on, and the next step is learned and proved."""
    model, groups = house.model, await play(house.model)
    step, starts = await model.get_step(), house.engine.server.starts
    config = art.TrainConfig(learning_rate=1e-3, minibatches=8)
    record = house.run_folder / "trainer" / "process.json"
    house.begun.clear()
    training = asyncio.create_task(model.train(groups, config))
    assert await asyncio.to_thread(house.begun.wait, 60)
    os.kill(int(json.loads(record.read_text())["main"][0]), signal.SIGKILL)
    with pytest.raises(TrainerDied, match="as the system does when memory runs out"):
        await training
    assert await model.get_step() == step
    for trajectory in await one_more(model):
        assert {call.step for call in trajectory.calls} == {step}
    result = await model.train(groups, art.TrainConfig(learning_rate=3e-3))
    assert (result.step, result.metrics["swap/proved"]) == (step + 1, 1.0)
    assert house.engine.server.starts == starts


# The last: it costs a start


@pytest.mark.skipif(not Path("/proc").is_dir(), reason="not on this platform: no /proc")
async def test_a_vllm_that_is_killed_comes_back_with_its_adapters(
    house: VllmHouse, plain: Plain
) -> None:
    """kill -9 in the midst of calls: those end with an error, the next ones wait and are answered
    by the right weights."""
    served = house.served(plain)
    before, starts = await served.chat("agent@1", max_tokens=6, seed=3), house.engine.server.starts
    async with served.client() as client:
        messages: Any = [{"role": "user", "content": "hi"}]
        stream = await client.chat.completions.create(
            model="agent@2", messages=messages, stream=True, extra_body={"min_tokens": 900}
        )
        async for _ in stream:
            break
        [pid] = pids_of(house.engine.server.base_url)
        os.kill(pid, signal.SIGKILL)
        with pytest.raises(openai.APIError, match="broke off"):
            async for _ in stream:
                pass
    async with asyncio.timeout(300):
        after = await served.chat("agent@1", max_tokens=6, seed=3, timeout=300)
    assert house.engine.server.starts == starts + 1
    assert ids_of(after) == ids_of(before)


def pids_of(url: str) -> list[int]:
    """The processes that were told to listen there."""
    port = url.rpartition(":")[2]
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with suppress(OSError):  # it ended meanwhile
            words = path.read_text(errors="replace").split("\0")
            if words[1:3] == ["-m", MODULE] and port in words:
                found.append(int(path.parent.name))
    return found
