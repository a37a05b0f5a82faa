"""`LocalBackend` whole: the tiny model, real HTTP on loopback, real files, real kills."""

import asyncio
import gc
import json
import logging
import math
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import openai
import pytest
from openai.types.chat import ChatCompletion

import art_core as art
from art_core import checkpoints
from art_core.earlier import extends_ids
from art_core.errors import (
    BaseModelError,
    CheckpointError,
    ConfigError,
    EngineError,
    GroupError,
    ModelNotRegistered,
    NoTrainableTokens,
    RewardError,
    RunLocked,
    StaleCall,
    TrainingError,
    WrongModel,
)
from art_core.nn.lora import LoraModel
from art_core.records import RecordStore
from art_core.rundir import RunDir
from art_core.trajectory_files import read_trajectories
from tests.core.small_run import (
    CONFIG,
    NAME,
    PROJECT,
    SETTINGS,
    figures,
    play,
    run_folder,
    say,
    small_model,
    trained_bytes,
)

NOISE = 2e-4
"""Largest difference that batching may make in a float32 logprob (DESIGN section 8)."""
LONG = CONFIG.model_copy(update={"minibatches": 50})
"""With ten times the groups, half a second: time to do something meanwhile."""


@asynccontextmanager
async def registered(
    base: Path, runs: Path, **changes: Any
) -> AsyncIterator[art.TrainableModel[Any]]:
    """The model, registered with a backend of its own."""
    model = small_model(base, runs, **changes)
    async with art.LocalBackend(show_progress=False) as backend:
        await model.register(backend)
        yield model


@dataclass(frozen=True)
class Played:
    """Two steps of a run that nothing disturbed."""

    runs: Path
    groups: tuple[list[art.TrajectoryGroup], list[art.TrajectoryGroup]]
    """What steps 0 and 1 played."""

    @property
    def files(self) -> tuple[Path, Path]:
        folder = run_folder(self.runs) / "trajectories" / "train"
        return folder / "0000.parquet", folder / "0001.parquet"


@pytest.fixture(scope="module")
def undisturbed(tiny_llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Played:
    runs = tmp_path_factory.mktemp("undisturbed")

    async def two_steps() -> Played:
        async with registered(tiny_llama, runs) as model:
            first = await play(model, (1, 0, 0, 1), (0, 1, 1, 1))
            await model.train(first, CONFIG)
            second = await play(model, (0, 1, 0, 0), (1, 0, 1, 0))
            await model.train(second, CONFIG)
            return Played(runs, (first, second))

    return asyncio.run(two_steps())


def same_policy(a: list[float], b: list[float]) -> bool:
    return len(a) == len(b) and max(abs(x - y) for x, y in zip(a, b, strict=True)) <= NOISE


def steps_on_disk(runs: Path, name: str = NAME) -> list[str]:
    return names_in(run_folder(runs, name) / "checkpoints")


def names_in(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


async def until_kept(runs: Path, step: int) -> None:
    """Return when the trajectories of `step` are written, which is when its training begins."""
    path = run_folder(runs) / "trajectories" / "train" / f"{step:04d}.parquet"

    def wait() -> None:
        while not path.exists():
            time.sleep(0.001)

    async with asyncio.timeout(60):
        await asyncio.to_thread(wait)


# --- the loop ------------------------------------------------------------------------------------


async def test_a_step_is_learned_and_serves_the_next_call(tiny_llama: Path, tmp_path: Path) -> None:
    async with registered(tiny_llama, tmp_path) as model:
        assert await model.get_step() == 0
        base, first = await figures(model, str(tiny_llama)), await figures(model, "agent")
        assert same_policy(base, first), "a fresh adapter changes nothing"

        groups = await play(model, (1, 0, 0, 1), (0, 1, 1, 1))
        result = await model.train(groups, CONFIG)
        assert (result.step, result.trained, result.skipped) == (1, True, ())
        assert await model.get_step() == 1
        assert result.checkpoint_path == str(run_folder(tmp_path) / "checkpoints" / "0001")
        assert result.metrics["groups_trained"] == 2
        assert result.metrics["tokens_trained"] == sum(
            t.completion_tokens for group in groups for t in group
        )
        assert all(math.isfinite(value) for value in result.metrics.values())

        after = await figures(model, "agent")
        assert not same_policy(after, first)
        assert same_policy(await figures(model, "agent@1"), after)
        assert same_policy(await figures(model, "agent@0"), first)
        assert same_policy(await figures(model, str(tiny_llama)), first)
        for name, policy in (("agent", "agent@1"), ("agent@0", "agent@0")):
            extra = (await say(model, name=name)).model_extra
            assert extra is not None
            assert extra["art_policy"] == policy
        with pytest.raises(openai.NotFoundError, match=r"agent@2.*agent, agent@0, agent@1"):
            await say(model, name="agent@2")


async def test_the_trajectory_holds_what_the_endpoint_sampled(undisturbed: Played) -> None:
    """Ids and logprobs of every call are those of the server's records; drift is 0."""
    store = RecordStore(run_folder(undisturbed.runs) / "records.sqlite")
    for step, groups in enumerate(undisturbed.groups):
        for trajectory in (t for group in groups for t in group):
            records = store.get([call.record_id for call in trajectory.calls])
            for call in trajectory.calls:
                record = records[call.key]
                assert call.prompt_ids is not None
                assert call.sampled_ids is not None
                assert call.logprobs is not None
                assert np.array_equal(call.prompt_ids, record.prompt_ids)
                assert np.array_equal(call.sampled_ids, record.sampled_ids)
                assert np.array_equal(call.logprobs, record.logprobs)
                assert (call.step, call.model, record.step) == (step, NAME, step)
            first, second = trajectory.calls
            assert first.prompt_ids is not None
            assert first.sampled_ids is not None
            assert second.prompt_ids is not None
            head = [*first.prompt_ids, *first.sampled_ids]
            assert second.prompt_ids[: len(head)].tolist() == head
    store.close()


def test_the_run_folder_tells_what_happened(undisturbed: Played) -> None:
    folder = run_folder(undisturbed.runs)
    lines = [json.loads(line) for line in (folder / "history.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [0, 1]
    assert [line["train/reward"] for line in lines] == [5 / 8, 3 / 8]
    assert all(line["train/trained"] and line["train/trajectories_skipped"] == 0 for line in lines)
    assert {"train/loss", "train/grad_norm", "train/entropy"} <= lines[0].keys()
    assert steps_on_disk(undisturbed.runs) == ["0000", "0001", "0002"]
    assert all(path.is_file() for path in undisturbed.files)
    assert not (folder / "holder.json").exists(), "it was closed"


async def test_several_models_share_an_endpoint_and_nothing_else(
    tiny_llama: Path, tmp_path: Path
) -> None:
    """Names that a module's naming could confuse; training one leaves the other as it was."""
    dotted = small_model(tiny_llama, tmp_path, name="agent.1")
    under = small_model(tiny_llama, tmp_path, name="agent_1")
    async with art.LocalBackend(show_progress=False) as backend:
        await dotted.register(backend)
        await under.register(backend)
        assert dotted.inference_base_url == under.inference_base_url
        before = await figures(under, "agent_1")
        groups = await play(dotted, (1, 0, 0))
        await dotted.train(groups, CONFIG)
        assert (await dotted.get_step(), await under.get_step()) == (1, 0)
        ours, theirs = await asyncio.gather(figures(dotted, "agent.1"), figures(under, "agent_1"))
        assert same_policy(theirs, before)
        assert not same_policy(ours, before)
        with pytest.raises(WrongModel, match=r"got \['agent.1'\], expected calls of 'agent_1'"):
            await under.train(groups, CONFIG)
        both = [await play(model, (1, 0), key=model.name) for model in (dotted, under)]
        await asyncio.gather(dotted.train(both[0], CONFIG), under.train(both[1], CONFIG))
        assert (await dotted.get_step(), await under.get_step()) == (2, 1)


async def test_calls_without_ids_are_joined_with_the_records(
    tiny_llama: Path, tmp_path: Path
) -> None:
    """As calls of a client that we did not make: they know their record and nothing more."""
    bare, whole = tmp_path / "bare", tmp_path / "whole"
    async with registered(tiny_llama, bare) as model:
        groups = await play(model, (1, 0, 0, 1), (0, 1, 1, 1))
        stripped = [
            art.TrajectoryGroup(
                t.model_copy(update={"calls": [_without_ids(call) for call in t.calls]})
                for t in group
            )
            for group in groups
        ]
        await model.train(stripped, CONFIG)
    async with registered(tiny_llama, whole) as model:
        await model.train(groups, CONFIG)
    assert trained_bytes(bare, 1) == trained_bytes(whole, 1)


def _without_ids(call: art.ModelCall) -> art.ModelCall:
    return replace(call, prompt_ids=None, sampled_ids=None, logprobs=None)


# --- repeatable, resumable -----------------------------------------------------------------------


async def test_a_restart_goes_on_bitwise(
    tiny_llama: Path, tmp_path: Path, undisturbed: Played
) -> None:
    async with registered(tiny_llama, tmp_path) as model:
        await model.train(undisturbed.groups[0], CONFIG)
        answers = [await figures(model, name) for name in ("agent@0", "agent")]
    async with registered(tiny_llama, tmp_path) as model:
        assert await model.get_step() == 1
        again = [await figures(model, name) for name in ("agent@0", "agent")]
        assert all(same_policy(a, b) for a, b in zip(again, answers, strict=True))
        await model.train(undisturbed.groups[1], CONFIG)
    for step in (0, 1, 2):
        assert trained_bytes(tmp_path, step) == trained_bytes(undisturbed.runs, step)


async def test_groups_read_back_from_parquet_train_the_same(
    tiny_llama: Path, tmp_path: Path, undisturbed: Played
) -> None:
    async with registered(tiny_llama, tmp_path) as model:
        for file in undisturbed.files:
            await model.train(read_trajectories(file), CONFIG)
    for step in (1, 2):
        assert trained_bytes(tmp_path, step) == trained_bytes(undisturbed.runs, step)


@contextmanager
def child(*args: object) -> Iterator[subprocess.Popen[str]]:
    """`small_run` as a program, ready for its first step; killed if it is still there."""
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.core.small_run", *map(str, args)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready at step 0\n"
        yield process
    finally:
        process.kill()
        process.communicate()


def tell(process: subprocess.Popen[str], line: str) -> None:
    assert process.stdin is not None
    process.stdin.write(line + "\n")
    process.stdin.flush()


@pytest.mark.skipif(os.name == "nt", reason="not on this platform: Windows has no SIGKILL")
@pytest.mark.parametrize("moment", ["saving", "training"])
async def test_a_kill_at_any_moment_and_a_restart_go_on(
    tiny_llama: Path, tmp_path: Path, undisturbed: Played, moment: str,
    caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    """The second step is cut by kill -9; what goes on from step 1 equals what was never cut."""
    first, second = undisturbed.files
    with child(tiny_llama, tmp_path, first, second) as process:
        assert process.stdout is not None
        tell(process, "train")
        assert process.stdout.readline() == "ready at step 1\n"
        backend = art.LocalBackend(show_progress=False)
        with pytest.raises(RunLocked, match=f"in use by process {process.pid} "):
            await small_model(tiny_llama, tmp_path).register(backend)
        await backend.close()
        if moment == "saving":
            tell(process, "die")
        else:
            tell(process, "train")
            await until_kept(tmp_path, 1)
            process.kill()
        assert process.wait(60) == -signal.SIGKILL
    left = steps_on_disk(tmp_path)
    if moment == "saving":
        assert left[0].startswith(".tmp-0002-")
        assert left[1:] == ["0000", "0001"]

    async with registered(tiny_llama, tmp_path) as model:
        assert f"taken over from process {process.pid}" in caplog.text
        step = await model.get_step()
        assert step == 1 or (moment == "training" and step == 2)
        assert not any(name.startswith(".tmp") for name in steps_on_disk(tmp_path))
        if step == 1:
            played = read_trajectories(run_folder(tmp_path) / "trajectories/train/0001.parquet")
            await model.train(played, CONFIG)
    assert trained_bytes(tmp_path, 2) == trained_bytes(undisturbed.runs, 2)


async def test_a_half_written_checkpoint_is_skipped_and_said(
    tiny_llama: Path, tmp_path: Path, undisturbed: Played, caplog: pytest.LogCaptureFixture
) -> None:
    shutil.copytree(run_folder(undisturbed.runs), run_folder(tmp_path))
    weights = run_folder(tmp_path) / "checkpoints" / "0002" / "adapter_model.safetensors"
    weights.write_bytes(weights.read_bytes()[:1000])
    async with registered(tiny_llama, tmp_path) as model:
        assert f"checkpoint {weights.parent} is skipped: adapter_model.saf" in caplog.text
        assert await model.get_step() == 1
        with pytest.raises(openai.NotFoundError, match="agent@2"):
            await say(model, name="agent@2")
        assert (await model.train(undisturbed.groups[1], CONFIG)).step == 2
    assert trained_bytes(tmp_path, 2) == trained_bytes(undisturbed.runs, 2)


@contextmanager
def disk_of(folder: Path, size: str) -> Iterator[None]:
    """A small file system in memory."""
    command = ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(folder)]
    if not shutil.which("mount") or subprocess.run(command, capture_output=True).returncode:
        pytest.skip("not on this platform: only root may mount a file system")
    try:
        yield
    finally:
        subprocess.run(["umount", str(folder)], check=True)


async def test_no_space_while_saving_keeps_the_old_step(tiny_llama: Path, tmp_path: Path) -> None:
    """Step 0 takes half a MiB, step 1 with Adam's moments three times that."""
    wide = SETTINGS.model_copy(update={"lora": art.LoraSettings(rank=128)})
    with disk_of(tmp_path, "1600k"):
        async with registered(tiny_llama, tmp_path, art_config=wide) as model:
            groups = await play(model, (1, 0, 0))
            before = await figures(model, "agent")
            with pytest.raises(CheckpointError, match=r"step 1 can't be saved.*bytes free"):
                await model.train(groups, CONFIG)
            assert await model.get_step() == 0
            assert steps_on_disk(tmp_path) == ["0000"]
            assert same_policy(await figures(model, "agent"), before)
            remount = ["mount", "-o", "remount,size=16m", str(tmp_path)]
            await asyncio.to_thread(subprocess.run, remount, check=True)
            assert (await model.train(groups, CONFIG)).step == 1
            assert not same_policy(await figures(model, "agent"), before)


# --- calls and training at once ------------------------------------------------------------------


async def test_calls_made_during_training_wait_and_are_answered_by_the_new_step(
    tiny_llama: Path, tmp_path: Path
) -> None:
    async with registered(tiny_llama, tmp_path) as model:
        groups = await play(model, (1, 0, 0, 1), (0, 1, 1, 1))
        training = asyncio.create_task(model.train(groups * 10, LONG))
        answers: list[ChatCompletion] = []
        while not training.done():
            answers.append(await say(model, f"call {len(answers)}"))
        await training
        policies = [(answer.model_extra or {})["art_policy"] for answer in answers]
        assert policies == sorted(policies)
        assert policies[-1] == "agent@1", "the last call began while the step was trained"
        ids = [answer.system_fingerprint or "" for answer in answers]
        store = RecordStore(run_folder(tmp_path) / "records.sqlite")
        records = store.get(ids)
        assert [f"agent@{records[key, 0].step}" for key in ids] == policies
        assert all(record.complete for record in records.values())
        store.close()


async def test_a_cancelled_step_changes_nothing(
    tiny_llama: Path, tmp_path: Path, undisturbed: Played, caplog: pytest.LogCaptureFixture
) -> None:
    """As Ctrl-C does. Calls go on, and the same step can be trained afterwards."""
    caplog.set_level(logging.INFO)
    async with registered(tiny_llama, tmp_path) as model:
        before = await figures(model, "agent")
        training = asyncio.create_task(model.train(undisturbed.groups[0] * 10, LONG))
        await until_kept(tmp_path, 0)
        training.cancel()
        with pytest.raises(asyncio.CancelledError):
            await training
        assert "a cancelled step ended: the step was stopped before its end" in caplog.text
        assert await model.get_step() == 0
        assert steps_on_disk(tmp_path) == ["0000"]
        assert same_policy(await figures(model, "agent"), before)
        await model.train(undisturbed.groups[0], CONFIG)
    assert trained_bytes(tmp_path, 1) == trained_bytes(undisturbed.runs, 1)


WILD = CONFIG.model_copy(update={"learning_rate": 1e308})
"""Its update makes weights that are infinite."""


def last_line(runs: Path) -> dict[str, Any]:
    line: dict[str, Any] = json.loads(
        (run_folder(runs) / "history.jsonl").read_text().split("\n")[-2]
    )
    return line


async def test_a_step_that_is_not_finite_is_left_out(
    tiny_llama: Path, tmp_path: Path, undisturbed: Played
) -> None:
    """Case 090, nan_once: no checkpoint, a metric, the first bad tensor named; the old step serves,
    and the next one is as if nothing had been.
    """
    async with registered(tiny_llama, tmp_path) as model:
        before = await figures(model, "agent")
        result = await model.train(undisturbed.groups[0], WILD)
        assert (result.step, result.trained, result.checkpoint_path) == (0, False, None)
        assert result.metrics["nonfinite_steps"] == 1
        assert result.reason is not None
        assert result.reason.startswith("base_model.model.model.layers.0.mlp.down_proj.lora_A.weig")
        assert "weights that are not finite" in result.reason
        line = last_line(tmp_path)
        assert (line["train/trained"], line["train/nonfinite_steps"]) == (0, 1)
        assert line["train/reason"] == result.reason
        assert await model.get_step() == 0
        assert same_policy(await figures(model, "agent"), before)
        assert steps_on_disk(tmp_path) == ["0000"]
        await model.train(undisturbed.groups[0], CONFIG)
    assert trained_bytes(tmp_path, 1) == trained_bytes(undisturbed.runs, 1)


async def test_too_many_steps_that_are_not_finite_are_an_error(
    tiny_llama: Path, tmp_path: Path, undisturbed: Played
) -> None:
    """Case 090, nan_3_times: in a row; a whole one in between begins the count anew."""
    groups, wild = undisturbed.groups[0], WILD.model_copy(update={"max_nonfinite_steps": 2})
    async with registered(tiny_llama, tmp_path) as model:
        assert not (await model.train(groups, wild)).trained
        assert (await model.train(groups, CONFIG)).step == 1
        assert (await model.train(groups, wild)).metrics["nonfinite_steps"] == 1
        with pytest.raises(TrainingError, match=r"2 steps in a row were not.* Step 1 goes on serv"):
            await model.train(groups, wild)
        assert steps_on_disk(tmp_path) == ["0000", "0001"]
        await say(model)


async def test_a_sampler_gone_wild_costs_its_own_tokens(
    tiny_llama: Path, tmp_path: Path, undisturbed: Played
) -> None:
    """A ratio of exp(900) with a negative advantage has no finite loss; the rest trains."""
    odd = undisturbed.groups[0][0].trajectories[1]
    calls = [replace(c, logprobs=np.full_like(c.logprobs, -900.0)) for c in odd.calls]
    group = art.TrajectoryGroup(
        t.model_copy(update={"calls": calls}) if t is odd else t for t in undisturbed.groups[0][0]
    )
    async with registered(tiny_llama, tmp_path) as model:
        result = await model.train([group], CONFIG)
        assert (result.trained, await model.get_step()) == (True, 1)
        lost = sum(len(c.sampled_ids) for c in calls if c.sampled_ids is not None)
        assert result.metrics["tokens_beyond"] == lost > 0
        assert math.isfinite(result.metrics["kl"])


async def test_the_reference_may_be_a_step_or_a_folder(
    tiny_llama: Path, tmp_path: Path, undisturbed: Played
) -> None:
    """Case 047: step 0 changes nothing yet, so that it is the base model too; a step further the
    policy is at a distance from it, and at none from itself.
    """
    first, second = undisturbed.groups
    held = CONFIG.model_copy(update={"kl_penalty_coef": 0.1, "minibatches": 1})
    async with registered(tiny_llama, tmp_path) as model:
        for step in (None, 0):
            config = held.model_copy(update={"kl_penalty_reference_step": step})
            result = await model.train(first if step is None else second, config)
            distance = result.metrics["kl_reference"]
            assert distance == pytest.approx(0, abs=1e-9) if step is None else distance > 1e-4
        folder = run_folder(tmp_path) / "checkpoints" / "0002"
        config = held.model_copy(update={"kl_ref_adapter_path": str(folder)})
        result = await model.train(second, config)
        assert result.metrics["kl_reference"] == pytest.approx(0, abs=1e-9)
        with pytest.raises(CheckpointError, match=r"0009.*Whole steps there: \[0, 1, 2, 3\]"):
            await model.train(second, held.model_copy(update={"kl_penalty_reference_step": 9}))
        lost = held.model_copy(update={"kl_ref_adapter_path": str(tmp_path / "nowhere")})
        with pytest.raises(CheckpointError, match="adapter can't be read"):
            await model.train(second, lost)
        assert await model.get_step() == 3
        await say(model)


async def test_the_running_baseline_survives_a_restart(
    tiny_llama: Path, tmp_path: Path, undisturbed: Played
) -> None:
    """Rewards 1 0 0 1, 0 1 1 1 and 0 1 0 0, 1 0 1 0: kept as .95 b + .05 r from step to step."""
    config = CONFIG.model_copy(update={"baseline": "running"})
    baseline = 0.0
    for groups in undisturbed.groups:
        async with registered(tiny_llama, tmp_path) as model:
            result = await model.train(groups, config)
        for reward in (t.reward for group in groups for t in group):
            assert reward is not None
            baseline = 0.95 * baseline + 0.05 * reward
        assert result.checkpoint_path is not None
        state = json.loads((Path(result.checkpoint_path) / "trainer.json").read_text())
        assert state["running"] == pytest.approx(baseline, rel=1e-12)


# --- bad input -----------------------------------------------------------------------------------


async def test_groups_that_teach_nothing_make_no_step(
    tiny_llama: Path, tmp_path: Path, undisturbed: Played
) -> None:
    equal = art.TrajectoryGroup(
        t.model_copy(update={"reward": 0.5}) for t in undisturbed.groups[0][0]
    )
    async with registered(tiny_llama, tmp_path) as model:
        result = await model.train([equal, art.TrajectoryGroup()], CONFIG)
        assert (result.step, result.trained, result.checkpoint_path) == (0, False, None)
        assert [(s.group, s.reason) for s in result.skipped] == [
            (0, "all 4 rewards are equal (0.5): nothing to learn from"),
            (1, "the group is empty"),
        ]
        assert steps_on_disk(tmp_path) == ["0000"]
        mixed = await model.train([equal, *undisturbed.groups[0]], CONFIG)
        assert (mixed.step, [s.group for s in mixed.skipped]) == (1, [0])
        one, *others = undisturbed.groups[1][0]
        failed = one.model_copy(update={"reward": math.nan})
        partly = await model.train([art.TrajectoryGroup([failed, *others]), equal], CONFIG)
        assert [(s.group, s.trajectory) for s in partly.skipped] == [(0, 0), (1, None)]
    history = (run_folder(tmp_path) / "history.jsonl").read_text()
    lines = [json.loads(x) for x in history.splitlines()]
    told = [(x["train/groups_skipped"], x["train/trajectories_skipped"]) for x in lines]
    assert told == [(2, 4), (1, 4), (1, 5)], "a group whole, and one trajectory by itself"
    assert [x["train/trained"] for x in lines] == [0, 1, 1]
    assert trained_bytes(tmp_path, 1) == trained_bytes(undisturbed.runs, 1)


async def test_the_rate_follows_the_share_that_is_trained(
    tiny_llama: Path, tmp_path: Path, undisturbed: Played
) -> None:
    """8 of 12 trajectories are trained: with power 1 the step is one of 2/3 the learning rate."""
    groups = undisturbed.groups[0]
    equal = art.TrajectoryGroup(t.model_copy(update={"reward": 0.5}) for t in groups[0])
    in_proportion = CONFIG.model_copy(update={"trained_share_power": 1.0})
    lower = CONFIG.model_copy(update={"learning_rate": CONFIG.learning_rate * (8 / 12)})
    for runs, given, config in (("a", [equal, *groups], in_proportion), ("b", groups, lower)):
        async with registered(tiny_llama, tmp_path / runs) as model:
            result = await model.train(given, config)
            assert result.metrics["learning_rate"] == CONFIG.learning_rate * (8 / 12)
    assert trained_bytes(tmp_path / "a", 1) == trained_bytes(tmp_path / "b", 1)


async def test_what_cannot_be_trained_is_refused_and_changes_nothing(
    tiny_llama: Path, tmp_path: Path, undisturbed: Played
) -> None:
    good = undisturbed.groups[0]
    unset = art.TrajectoryGroup(t.model_copy(update={"reward": None}) for t in good[0])
    silent = art.TrajectoryGroup([*good[0], art.Trajectory(reward=0.0)])
    async with registered(tiny_llama, tmp_path) as model:
        with pytest.raises(RewardError, match="trajectory 0 of group 1"):
            await model.train([good[0], unset], CONFIG)
        with pytest.raises(NoTrainableTokens, match="trajectory 4 of group 0 made no call"):
            await model.train([silent], CONFIG)
        assert await model.get_step() == 0
        assert [path.name for path in run_folder(tmp_path).glob("trajectories/*")] == []
        await model.train(good, CONFIG)
        with pytest.raises(StaleCall, match=r"answered by step 0, 1 steps ago"):
            await model.train(good, CONFIG.model_copy(update={"max_staleness": 0}))
        assert await model.get_step() == 1
    assert trained_bytes(tmp_path, 1) == trained_bytes(undisturbed.runs, 1)


async def test_bad_tokens_are_counted_and_the_rest_trains_as_if_alone(
    tiny_llama: Path, tmp_path: Path, undisturbed: Played
) -> None:
    """The weights are those of a step without them; nothing is computed before they are known."""
    good = undisturbed.groups[0]
    call = good[0].trajectories[0].calls[0]
    assert call.logprobs is not None
    bad: dict[str, dict[str, Any]] = {
        "nan": {"logprobs": call.logprobs * np.nan},
        "positive": {"logprobs": -call.logprobs + 1},
        "fewer": {"logprobs": call.logprobs[1:]},
        "negative": {"prompt_ids": [-1, 2]},
        "empty": {"prompt_ids": []},
        "outside": {"prompt_ids": [1, 10**6]},
        "long": {"prompt_ids": np.ones(1_000_000, np.int32)},
    }
    spoilt = [replace(call, record_id=name, **fields) for name, fields in bad.items()]
    first = good[0].trajectories[0]
    groups = [
        art.TrajectoryGroup(
            [first.model_copy(update={"calls": [*first.calls, *spoilt]}), *good[0].trajectories[1:]]
        ),
        *good[1:],
    ]
    async with registered(tiny_llama, tmp_path) as model:
        with pytest.raises(
            GroupError, match=r"trajectory 0 of group 0, .* too long for the model: got"
        ):
            await model.train(groups, CONFIG)
        result = await model.train(groups, CONFIG.model_copy(update={"too_long": "drop"}))
    assert (result.trained, result.skipped) == (True, ())
    assert result.metrics["misfit/too long"] == result.metrics["misfit/outside the vocabulary"] == 1
    assert result.metrics["drift"] == 0
    line = json.loads((run_folder(tmp_path) / "history.jsonl").read_text().splitlines()[-1])
    told = {name: n for name, n in line.items() if "misfit" in name or "left_out" in name}
    assert told == {
        "train/misfit/too long": 1,
        "train/misfit/outside the vocabulary": 1,
        "train/calls/left_out/bad logprobs": 2 / 8,  # a trajectory
        "train/calls/left_out/mismatch": 1 / 8,
        "train/calls/left_out/bad ids": 1 / 8,
        "train/calls/left_out/empty prompt": 1 / 8,
    }
    assert trained_bytes(tmp_path, 1) == trained_bytes(undisturbed.runs, 1)


async def test_prompts_that_came_without_ids_are_rendered_and_drift_is_told(
    tiny_llama: Path, tmp_path: Path, undisturbed: Played, caplog: pytest.LogCaptureFixture
) -> None:
    """The second call of each rollout then reads the first answer's text, encoded again."""
    groups = [
        art.TrajectoryGroup(
            t.model_copy(update={"calls": [replace(c, prompt_ids=None) for c in t.calls]})
            for t in group
        )
        for group in undisturbed.groups[0]
    ]
    async with registered(tiny_llama, tmp_path) as model:
        result = await model.train(groups, CONFIG)
    assert result.trained
    line = json.loads((run_folder(tmp_path) / "history.jsonl").read_text())
    assert (line["train/calls/rendered"], line["train/calls/kept"]) == (2, 2)
    drifted = sum(
        not extends_ids(second, first)
        for first, second in (t.calls for group in groups for t in group)
    )
    assert line["train/drift"] == drifted > 0
    assert "calls drifted from the history they appended to: " in caplog.text


async def test_a_model_that_is_not_registered_is_told_so(tiny_llama: Path, tmp_path: Path) -> None:
    model = small_model(tiny_llama, tmp_path)
    async with art.LocalBackend(show_progress=False) as backend:
        with pytest.raises(ModelNotRegistered, match=r"'agent'.*register\(backend\)"):
            await model.train([], CONFIG)
        with pytest.raises(ModelNotRegistered, match=r"'agent'.*register\(backend\)"):
            await backend.train(model, [], CONFIG)
        with pytest.raises(ModelNotRegistered, match=r"'agent'.*register\(backend\)"):
            await backend.get_step(model)


async def test_an_unknown_base_model_leaves_nothing_behind(tmp_path: Path) -> None:
    async with art.LocalBackend(show_progress=False) as backend:
        with pytest.raises(BaseModelError, match="no base model there"):
            await small_model(Path("/nowhere/at/all"), tmp_path).register(backend)
    assert names_in(tmp_path) == []


async def test_a_name_stands_for_one_model(tiny_llama: Path, tmp_path: Path) -> None:
    async with art.LocalBackend(show_progress=False) as backend:
        model = small_model(tiny_llama, tmp_path)
        await model.register(backend)
        again = small_model(tiny_llama, tmp_path)
        await again.register(backend)
        assert again.inference_base_url == model.inference_base_url
        other = SETTINGS.model_copy(update={"seed": 1})
        with pytest.raises(ConfigError, match="'agent' is registered with another art_config"):
            await small_model(tiny_llama, tmp_path, art_config=other).register(backend)
        with pytest.raises(ConfigError, match="two projects serve a model under one name"):
            await small_model(tiny_llama, tmp_path, project="second").register(backend)
        linked = tmp_path / "linked"
        linked.symlink_to(tiny_llama)
        with pytest.raises(ConfigError, match="two projects serve a model under one name"):
            await small_model(linked, tmp_path, project="second").register(backend)
        await say(model)
    with RunDir.open(tmp_path, PROJECT, NAME):
        pass


async def test_a_model_named_like_its_base_is_refused(
    tiny_llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tiny_llama.parent)
    model = small_model(Path(tiny_llama.name), tmp_path, name=tiny_llama.name)
    async with art.LocalBackend(show_progress=False) as backend:
        with pytest.raises(ConfigError, match="name of its base model"):
            await model.register(backend)


async def test_other_lora_settings_than_the_checkpoints_are_refused(
    tiny_llama: Path, tmp_path: Path, undisturbed: Played
) -> None:
    shutil.copytree(run_folder(undisturbed.runs), run_folder(tmp_path))
    wider = SETTINGS.model_copy(update={"lora": art.LoraSettings(rank=8, alpha=8.0)})
    async with art.LocalBackend(show_progress=False) as backend:
        with pytest.raises(CheckpointError, match=r"other LoRA settings: got {'r': 4}"):
            await small_model(tiny_llama, tmp_path, art_config=wider).register(backend)
        model = small_model(tiny_llama, tmp_path)
        await model.register(backend)  # the folder is free again, and nothing is left of the other
        assert await model.get_step() == 2
        await say(model)


async def test_deleted_checkpoints_are_no_longer_served(
    tiny_llama: Path, tmp_path: Path, undisturbed: Played
) -> None:
    shutil.copytree(run_folder(undisturbed.runs), run_folder(tmp_path))
    async with registered(tiny_llama, tmp_path) as model:
        for step, reward in ((0, 0.9), (1, 0.1), (2, 0.5)):
            await model.log(split="val", metrics={"reward": reward}, step=step)
        assert await model.delete_checkpoints() == [1]
        with pytest.raises(openai.NotFoundError, match="agent@1"):
            await say(model, name="agent@1")
        await say(model, name="agent@0")
        await say(model)


# --- the end -------------------------------------------------------------------------------------


def leftovers() -> tuple[list[str], int]:
    """Threads of ours, and base models in memory."""
    gc.collect()
    threads = [t.name for t in threading.enumerate() if t.name.startswith("art-")]
    return threads, sum(type(thing) is LoraModel for thing in gc.get_objects())


async def test_closing_leaves_nothing_running(tiny_llama: Path, tmp_path: Path) -> None:
    before = leftovers()
    backend = art.LocalBackend(show_progress=False)
    model = small_model(tiny_llama, tmp_path)
    await model.register(backend)
    groups = await play(model, (1, 0))
    await backend.close()
    await backend.close()
    assert leftovers() == before
    with RunDir.open(tmp_path, PROJECT, NAME):
        pass
    with pytest.raises(ModelNotRegistered):
        await model.train(groups, CONFIG)
    with pytest.raises(openai.APIConnectionError):
        await model.openai_client().with_options(max_retries=0).models.list()
    await model.register(backend)
    assert (await model.train(groups, CONFIG)).step == 1
    await backend.close()


async def test_closing_stops_a_step(tiny_llama: Path, tmp_path: Path, undisturbed: Played) -> None:
    backend = art.LocalBackend(show_progress=False)
    model = small_model(tiny_llama, tmp_path)
    await model.register(backend)
    training = asyncio.create_task(model.train(undisturbed.groups[0] * 10, LONG))
    await until_kept(tmp_path, 0)
    held = asyncio.create_task(say(model))
    await asyncio.sleep(0.05)
    await backend.close()
    with pytest.raises((TrainingError, EngineError), match=r"stopped|closed"):
        await training
    outcome = (await asyncio.gather(held, return_exceptions=True))[0]
    assert isinstance(outcome, openai.APIError | ChatCompletion)
    with RunDir.open(tmp_path, PROJECT, NAME) as run:
        assert checkpoints.steps(run) == [0]


async def test_a_failed_registration_leaves_nothing_running(
    tiny_llama: Path, tmp_path: Path
) -> None:
    before = leftovers()
    run_folder(tmp_path).mkdir(parents=True)
    (run_folder(tmp_path) / "records.sqlite").write_bytes(b"no database" * 100)
    backend = art.LocalBackend(show_progress=False)
    with pytest.raises(art.ARTError, match="record store"):
        await small_model(tiny_llama, tmp_path).register(backend)
    with RunDir.open(tmp_path, PROJECT, NAME):
        pass
    none = SETTINGS.model_copy(update={"lora": art.LoraSettings(target_modules=("nothing",))})
    with pytest.raises(ConfigError, match=r"LoRA can't be added.*'nothing'"):
        await small_model(tiny_llama, tmp_path, name="b", art_config=none).register(backend)
    assert leftovers() == before
    await backend.close()


def test_a_script_that_forgets_to_close_is_no_crash(
    tiny_llama: Path, tmp_path: Path, undisturbed: Played
) -> None:
    """The next start does not say that it took over from it. A script ends as this child does."""
    script = (
        "import asyncio, sys; from pathlib import Path; import art_core as art\n"
        "from tests.core.small_run import small_model\n"
        "model = small_model(Path(sys.argv[1]), Path(sys.argv[2]))\n"
        "asyncio.run(model.register(art.LocalBackend(show_progress=False)))\n"
    )
    subprocess.run([sys.executable, "-c", script, tiny_llama, tmp_path], check=True, timeout=120)
    assert not (run_folder(tmp_path) / "holder.json").exists()
