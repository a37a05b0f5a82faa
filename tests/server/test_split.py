"""The split, whole: a client here, `art-langgraph serve` in its own process, the tiny model."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import httpx2
import openai
import pytest

import art_core as art
from art_core.errors import (
    CheckpointError,
    ConfigError,
    JobCancelled,
    ModelNotRegistered,
    RewardError,
    ServerUnreachable,
    StaleCall,
    UnknownRecords,
    WrongKey,
)
from art_core.trajectory_files import read_trajectories
from tests.core.small_run import CONFIG, NAME, PROJECT, play, run_folder, say, trained_bytes
from tests.server.server_process import KEY, ServerProcess

pytest.importorskip("fastapi", reason="art-langgraph[server] is not installed")


@pytest.fixture(scope="module")
def server(tiny_llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    with ServerProcess(tmp_path_factory.mktemp("server"), tiny_llama) as process:
        yield process


@pytest.fixture
async def backend(server: ServerProcess) -> AsyncIterator[art.HttpBackend]:
    async with server.backend() as found:
        yield found


async def test_a_step_over_the_wire_is_the_step_made_here(
    server: ServerProcess, backend: art.HttpBackend, tiny_llama: Path, tmp_path: Path
) -> None:
    """Bit for bit, from the same groups; with whole calls and with record ids alone."""
    model = server.model(tiny_llama, name="one")
    await model.register(backend)
    assert await model.get_step() == 0
    groups = await play(model, (0.0, 1.0), (1.0, 0.5))
    result = await model.train(groups, CONFIG)
    assert (result.step, result.trained) == (1, True)
    assert result.metrics["tokens_trained"] > 0

    here = server.model(tiny_llama, name="one", base_path=str(tmp_path))
    async with art.LocalBackend(show_progress=False) as local:
        await here.register(local)
        expected = await here.train(groups, CONFIG)
    assert trained_bytes(server.path, 1, "one") == trained_bytes(tmp_path, 1, "one")
    assert result.metrics["loss"] == expected.metrics["loss"]

    by_record = server.model(tiny_llama, name="two")
    async with server.backend(send="records") as light:
        await by_record.register(light)
        played = await play(by_record, (0.0, 1.0), (1.0, 0.5))
        await by_record.train(played, CONFIG)
    kept = run_folder(server.path, "two") / "trajectories" / "train" / "0000.parquet"
    for group, other in zip(played, read_trajectories(kept), strict=True):
        for one, two in zip(group, other, strict=True):
            assert [c.sampled_ids.tolist() for c in one.calls if c.sampled_ids is not None] == [
                c.sampled_ids.tolist() for c in two.calls if c.sampled_ids is not None
            ]


async def test_the_new_step_answers_and_the_old_one_is_pinned(
    server: ServerProcess, backend: art.HttpBackend, tiny_llama: Path
) -> None:
    model = server.model(tiny_llama, name="steps")
    await model.register(backend)
    await model.train(await play(model, (0.0, 1.0)), CONFIG)
    latest = await say(model)
    pinned = await say(model, name="steps@0")
    assert (latest.art_policy, pinned.art_policy) == ("steps@1", "steps@0")  # type: ignore[attr-defined]  # an extra
    found = await backend.checkpoints(model)
    assert [c.step for c in found] == [0, 1]
    assert "train/reward" in found[0].metrics
    here, there = (run_folder(path, "steps") for path in (server.path / "client", server.path))
    for place in (here, there):
        assert '"train/reward"' in (place / "history.jsonl").read_text()
    [group] = read_trajectories(here / "trajectories" / "train" / "0000.parquet")
    assert [t.reward for t in group] == [0.0, 1.0]


async def test_errors_are_of_the_class_that_a_local_backend_raises(
    server: ServerProcess, backend: art.HttpBackend, tiny_llama: Path
) -> None:
    model = server.model(tiny_llama, name="errors")
    stranger = server.model(tiny_llama, name="stranger")
    with pytest.raises(ModelNotRegistered, match="not registered with this server"):
        await backend.get_step(stranger)
    await model.register(backend)
    groups = await play(model, (0.0, None))
    with pytest.raises(RewardError, match="reward"):
        await model.train(groups, CONFIG)
    played = await play(model, (0.0, 1.0), key="again")
    await model.train(played, CONFIG)
    with pytest.raises(StaleCall):
        await model.train(played, CONFIG.model_copy(update={"max_staleness": 0}))
    with pytest.raises(CheckpointError, match="can't be used"):
        await backend.download_checkpoint(model, 7, server.path / "down")
    other = art.ModelConfig(engine=art.EngineConfig(threads=1))
    with pytest.raises(ConfigError, match="engine is the server's"):
        await server.model(tiny_llama, name="x", art_config=other).register(backend)
    with pytest.raises(ConfigError, match="does not serve the base model"):
        await server.model(tiny_llama.parent, name="x").register(backend)


async def test_records_that_are_gone_are_named(
    server: ServerProcess, tiny_llama: Path, backend: art.HttpBackend
) -> None:
    model = server.model(tiny_llama, name="gone")
    async with server.backend(send="records") as light:
        await model.register(light)
        groups = await play(model, (0.0, 1.0))
        call = groups[0].trajectories[0].calls[0]
        object.__setattr__(call, "record_id", "nobody")
        with pytest.raises(UnknownRecords, match="nobody") as caught:
            await model.train(groups, CONFIG)
    assert caught.value.ids == ("nobody",)


async def test_supervised_steps_bookmarks_losses_and_logs(
    server: ServerProcess, backend: art.HttpBackend, tiny_llama: Path
) -> None:
    model = server.model(tiny_llama, name="sft")
    await model.register(backend)
    rows = [
        art.Trajectory(
            messages_and_choices=[
                {"role": "user", "content": "Hi"},
                {"role": "assistant", "content": "Hello"},
            ]
        )
    ]
    before = await model.sft_loss(rows)
    config = art.TrainSFTConfig(learning_rate=1e-2)
    result = await model.train_sft(rows, config, bookmark=art.Bookmark("file", {"row": 3}))
    assert result.step == 1
    assert await model.sft_loss(rows) < before
    assert await model.bookmarks() == {"file": {"row": 3}}
    await model.log(rows, split="val", metrics={"accuracy": float("nan"), "n": 2})
    history = (run_folder(server.path, "sft") / "history.jsonl").read_text()
    assert '"val/n": 2' in history
    assert await model.delete_checkpoints("val/n") == [0]


async def test_a_plain_openai_client_through_a_rollouts_url_gives_a_trajectory_that_trains(
    server: ServerProcess, backend: art.HttpBackend, tiny_llama: Path
) -> None:
    model = server.model(tiny_llama, name="urls")
    await model.register(backend)
    trajectories = []
    ask: Any = [{"role": "user", "content": "Hi"}]
    urls = [await backend.rollout_url(model) for _ in range(2)]
    for url, reward in zip(urls, (0.0, 1.0), strict=True):
        async with openai.AsyncOpenAI(base_url=url.base_url, api_key=KEY) as client:
            await client.chat.completions.create(model="urls", messages=ask)
            async with client.chat.completions.stream(model="urls", messages=ask) as stream:
                async for _ in stream:
                    pass
        trajectory = await backend.trajectory(url.rollout_id)
        assert [call.trainable for call in trajectory.calls] == [True, True]
        trajectory.reward = reward
        trajectories.append(trajectory)
    result = await model.train([art.TrajectoryGroup(trajectories)], CONFIG)
    assert result.trained
    url = urls[0]
    forged = url.base_url.replace(url.rollout_id, "other")
    async with openai.AsyncOpenAI(base_url=forged, api_key=KEY) as client:
        with pytest.raises(openai.NotFoundError):
            await client.chat.completions.create(model="urls", messages=ask)
    async with openai.AsyncOpenAI(base_url=url.base_url, api_key="guess") as client:
        with pytest.raises(openai.AuthenticationError):
            await client.chat.completions.create(model="urls", messages=ask)


async def test_what_was_only_recorded_there_is_joined(
    server: ServerProcess, backend: art.HttpBackend, tiny_llama: Path
) -> None:
    model = server.model(tiny_llama, name="join")
    await model.register(backend)
    [group] = await play(model, (0.0, 1.0))
    whole = [call.sampled_ids for call in group.trajectories[0].calls]
    for trajectory in group:
        for call in trajectory.calls:
            for name in ("prompt_ids", "sampled_ids", "logprobs"):
                object.__setattr__(call, name, None)
    await model.join(group)
    for call, ids in zip(group.trajectories[0].calls, whole, strict=True):
        assert call.sampled_ids is not None
        assert ids is not None
        assert call.sampled_ids.tolist() == ids.tolist()


async def test_a_cancelled_step_is_no_step(
    server: ServerProcess, backend: art.HttpBackend, tiny_llama: Path
) -> None:
    model = server.model(tiny_llama, name="cancel")
    await model.register(backend)
    groups = await play(model, *([(0.0, 1.0)] * 12))
    slow = CONFIG.model_copy(update={"minibatches": 200})
    training = asyncio.create_task(model.train(groups * 20, slow))
    while "running" not in {j.state for j in await backend.jobs(model) if j.kind == "train"}:  # noqa: ASYNC110 - it is another process
        await asyncio.sleep(0.02)
    training.cancel()
    with pytest.raises(asyncio.CancelledError):
        await training
    [job] = [j for j in await backend.jobs(model) if j.kind == "train"]
    assert job.state == "cancelled"
    assert await model.get_step() == 0
    assert (await model.train(groups, CONFIG)).step == 1
    assert issubclass(JobCancelled, art.ARTError)


async def test_the_key_is_asked_for_on_every_route_but_health(server: ServerProcess) -> None:
    paths = ("/v1/models", "/api/models", "/api/version", "/metrics", "/nothing", "/api/jobs/x")
    async with httpx2.AsyncClient(base_url=server.url) as client:
        assert (await client.get("/health")).json() == {"status": "ok"}
        for path in paths:
            for headers in ({}, {"authorization": "Bearer guess"}, {"authorization": KEY}):
                assert (await client.get(path, headers=headers)).status_code == 401, path
        right = {"authorization": f"Bearer {KEY}"}
        page = {**right, "origin": "http://evil.example"}
        assert (await client.get("/v1/models", headers=page)).status_code == 403
        named = {**right, "host": "evil.example"}
        assert (await client.get("/v1/models", headers=named)).status_code == 403
        form = {**right, "content-type": "text/plain"}
        for path in ("/v1/chat/completions", f"/api/models/{PROJECT}/{NAME}/train"):
            status = (await client.post(path, headers=form, content=b"{}")).status_code
            assert status in (404, 415), path
    with pytest.raises(WrongKey):
        async with art.HttpBackend(server.url, api_key="guess") as backend:
            await backend.register(server.model(Path("x")))


async def test_nobody_there_is_told(tmp_path: Path) -> None:
    backend = art.HttpBackend("http://127.0.0.1:9", api_key=None)
    backend._http.ask = _once(backend._http.ask)  # type: ignore[method-assign]  # no waits
    with pytest.raises(ServerUnreachable, match="art-langgraph serve"):
        await backend.get_step(art.TrainableModel(name="a", project="p", base_model="b"))
    with pytest.raises(ConfigError, match="URL of a server"):
        art.HttpBackend("gpu-box:7999")


def _once(ask: Any) -> Any:
    async def asked(*args: Any, **options: Any) -> Any:
        return await ask(*args, **{**options, "repeats": False})

    return asked


def test_a_second_server_on_the_same_folder_is_told(server: ServerProcess) -> None:
    with pytest.raises(RuntimeError, match="another server has this folder"):
        ServerProcess(server.path).start()


def test_an_open_address_needs_a_key(tmp_path: Path) -> None:
    from art_langgraph.cli import main

    assert main(["serve", "--host", "0.0.0.0", "--path", str(tmp_path)]) == 1
