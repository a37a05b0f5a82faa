"""kill -9 of the server at any moment, then a start: no step is lost or made twice, no record lost.

The client waits on: it is never told of the kill.
"""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

import art_core as art
from art_core import checkpoints
from art_core.rundir import RunDir
from tests.core.small_run import CONFIG, NAME, PROJECT, play, say, trained_bytes
from tests.server.server_process import ServerProcess

pytest.importorskip("fastapi", reason="art-langgraph[server] is not installed")

SLOW = CONFIG.model_copy(update={"minibatches": 100})


async def until_job(backend: art.HttpBackend, model: art.TrainableModel[Any], state: str) -> None:
    """Wait for a train job of that state."""
    while True:
        jobs = [j for j in await backend.jobs(model) if j.kind == "train"]
        if jobs and jobs[-1].state == state:
            return
        await asyncio.sleep(0.02)


async def test_killed_while_idle_it_serves_again_and_knows_its_records(
    tiny_llama: Path, tmp_path: Path
) -> None:
    with ServerProcess(tmp_path, tiny_llama) as server:
        async with server.backend(send="records") as backend:
            model = server.model(tiny_llama)
            await model.register(backend)
            groups = await play(model, (0.0, 1.0))
            server.kill()
            await asyncio.to_thread(server.start)
            assert (await say(model)).choices[0].message.role == "assistant"
            result = await model.train(groups, CONFIG)  # by record ids alone
            assert result.step == 1


async def test_killed_while_training_the_step_is_made_by_the_next_process(
    tiny_llama: Path, tmp_path: Path
) -> None:
    """The same bits as without a kill; the client's `await` ends as if nothing had happened."""
    with ServerProcess(tmp_path / "a", tiny_llama) as server:
        async with server.backend() as backend:
            model = server.model(tiny_llama)
            await model.register(backend)
            groups = await play(model, *([(0.0, 1.0)] * 8))
            training = asyncio.create_task(model.train(groups, SLOW))
            await until_job(backend, model, "running")
            await asyncio.sleep(0.1)
            server.kill()
            assert checkpoints.steps(RunDir.at(server.path, PROJECT, NAME)) == [0]
            await asyncio.to_thread(server.start)
            result = await training
            assert (result.step, result.trained) == (1, True)
            jobs = [j for j in await backend.jobs(model) if j.kind == "train"]
            assert [j.state for j in jobs] == ["done"]
    here = server.model(tiny_llama, base_path=str(tmp_path / "b"))
    async with art.LocalBackend(show_progress=False) as local:
        await here.register(local)
        await here.train(groups, SLOW)
    assert trained_bytes(server.path, 1) == trained_bytes(tmp_path / "b", 1)


async def test_killed_once_the_step_is_saved_it_is_not_made_twice(
    tiny_llama: Path, tmp_path: Path
) -> None:
    """Between the checkpoint and the ledger's word of it: a process that dies there is made by an
    audit hook, which kills it when the step's metrics are about to be written.
    """
    with DyingServer(tmp_path, tiny_llama) as server:
        async with server.backend() as backend:
            model = server.model(tiny_llama)
            await model.register(backend)
            groups = await play(model, (0.0, 1.0))
            training = asyncio.create_task(model.train(groups, CONFIG))
            await asyncio.to_thread(server.wait)
            assert checkpoints.steps(RunDir.at(server.path, PROJECT, NAME)) == [0, 1]
            server.dies = False
            await asyncio.to_thread(server.start)
            result = await training
            assert (result.step, result.trained) == (1, True)
            assert await model.get_step() == 1
            assert checkpoints.steps(RunDir.at(server.path, PROJECT, NAME)) == [0, 1]


async def test_ended_in_good_order_it_leaves_the_job_to_the_next_process(
    tiny_llama: Path, tmp_path: Path
) -> None:
    with ServerProcess(tmp_path, tiny_llama) as server:
        async with server.backend() as backend:
            model = server.model(tiny_llama)
            await model.register(backend)
            groups = await play(model, *([(0.0, 1.0)] * 8))
            training = asyncio.create_task(model.train(groups, SLOW))
            await until_job(backend, model, "running")
            await asyncio.to_thread(server.end)
            await asyncio.to_thread(server.start)
            assert (await training).step == 1


class DyingServer(ServerProcess):
    """Dies when it is about to write a step's metrics, as long as `dies`."""

    dies = True
    main = (
        "import os, signal, sys\n"
        "def watch(event, args):\n"
        "    if event != 'open' or not str(args[0]).endswith('history.jsonl'): return\n"
        "    step = os.path.join(os.path.dirname(str(args[0])), 'checkpoints', '0001')\n"
        "    if args[2] & os.O_APPEND and os.path.isdir(step):\n"
        "        os.kill(os.getpid(), signal.SIGKILL)\n"
        "sys.addaudithook(watch)\n"
        "from art_langgraph.cli import main\n"
        "sys.exit(main())\n"
    )

    def program(self) -> str:
        return self.main if self.dies else super().program()

    def wait(self) -> None:
        assert self._process is not None
        self._process.wait(60)
