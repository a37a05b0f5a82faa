"""Supervised training whole: `LocalBackend`, real files, real kills, on the tiny model."""

from __future__ import annotations

import asyncio
import json
import logging
import shutil
import signal
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

import art_core as art
from art_core import checkpoints
from art_core.errors import ConfigError, DataFileError, GroupError, NoTrainableTokens, TrainingError
from art_core.metrics import MetricsLog
from art_core.rundir import RunDir
from tests.core.sft_run import PASSES, ROWS, WatchedBackend, passes, write_rows
from tests.core.small_run import CONFIG, play, run_folder, say, small_model, trained_bytes

LAST = 15


@dataclass(frozen=True)
class Undisturbed:
    """All passes, in one go."""

    runs: Path
    file: Path
    seen: list[list[int]]


@pytest.fixture(scope="module")
def undisturbed(tiny_llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Undisturbed:
    folder = tmp_path_factory.mktemp("undisturbed")
    file = write_rows(folder / "rows.jsonl")
    result, seen = asyncio.run(passes(tiny_llama, folder / "runs", file))
    assert (result.step, result.updates, result.finished) == (LAST, LAST, True)
    return Undisturbed(folder / "runs", file, seen)


def losses(runs: Path) -> dict[int, float]:
    """Logged loss by the step that it was of."""
    history = MetricsLog(run_folder(runs) / "history.jsonl").read()
    return {m.step: float(m.values["loss"] or 0) for m in history if m.split == "sft"}


# --- the whole run


def test_every_row_once_an_epoch_and_the_loss_falls(undisturbed: Undisturbed) -> None:
    """Case 086, whole_run."""
    flat = [row for step in undisturbed.seen for row in step]
    epochs = [flat[:10], flat[10:20], flat[20:]]
    assert all(sorted(epoch) == list(range(ROWS)) for epoch in epochs)
    assert epochs[0] != epochs[1] != epochs[2]
    told = losses(undisturbed.runs)
    assert list(told) == list(range(LAST))
    assert sum(list(told.values())[10:]) < 0.8 * sum(list(told.values())[:5])


@pytest.mark.parametrize("stops", [(7,), (5,), (7, 9)], ids=["after_7", "after_5", "twice"])
async def test_a_run_that_was_stopped_goes_on_with_the_next_row(
    tiny_llama: Path, tmp_path: Path, undisturbed: Undisturbed, stops: tuple[int, ...]
) -> None:
    """Case 086: the same rows, and the same bits at the end."""
    seen: list[list[int]] = []
    for stop in (*stops, LAST):
        result, more = await passes(tiny_llama, tmp_path, undisturbed.file, final_step=stop)
        assert (result.step, result.finished) == (stop, stop == LAST)
        seen += more
    assert seen == undisturbed.seen
    assert trained_bytes(tmp_path, LAST) == trained_bytes(undisturbed.runs, LAST)


async def test_a_finished_run_does_nothing_more(
    tiny_llama: Path, tmp_path: Path, undisturbed: Undisturbed
) -> None:
    """Case 086, after_15."""
    shutil.copytree(undisturbed.runs, tmp_path / "runs")
    result, seen = await passes(tiny_llama, tmp_path / "runs", undisturbed.file)
    assert (result.finished, result.step, result.loss, seen) == (True, LAST, None, [])
    more, seen = await passes(tiny_llama, tmp_path / "runs", undisturbed.file, epochs=4)
    assert (more.step, len(seen)) == (20, 5)


def test_killed_between_update_and_checkpoint(
    tiny_llama: Path, tmp_path: Path, undisturbed: Undisturbed
) -> None:
    """Case 086, after_update_8: a real kill; the update is made again, bit for bit."""
    step = 8
    done = subprocess.run(
        [sys.executable, "-m", "tests.core.sft_run",
         str(tiny_llama), str(tmp_path), str(undisturbed.file), str(step)],
        capture_output=True, text=True, timeout=300, check=False,
        cwd=Path(__file__).parents[2],
    )  # fmt: skip
    assert done.returncode == -signal.SIGKILL, done.stderr
    assert checkpoints.steps(RunDir(run_folder(tmp_path)))[-1] == step - 1
    result, seen = asyncio.run(passes(tiny_llama, tmp_path, undisturbed.file))
    assert result.finished
    assert seen == undisturbed.seen[step - 1 :]
    assert trained_bytes(tmp_path, LAST) == trained_bytes(undisturbed.runs, LAST)
    assert losses(tmp_path) == losses(undisturbed.runs)
    lines = (run_folder(tmp_path) / "history.jsonl").read_text().splitlines()
    assert sum('"step": 7,' in line and "sft/loss" in line for line in lines) == 1


async def test_another_batch_size_goes_on_at_the_same_row(
    tiny_llama: Path, tmp_path: Path, undisturbed: Undisturbed
) -> None:
    """Case 086, batch_4: after step 7 come the four rows after the fourteenth."""
    flat = [row for step in undisturbed.seen for row in step]
    await passes(tiny_llama, tmp_path, undisturbed.file, final_step=7)
    _, seen = await passes(tiny_llama, tmp_path, undisturbed.file, batch_size=4)
    assert seen[0] == flat[14:18]
    assert [row for step in seen for row in step] == flat[14:]
    assert [len(step) for step in seen] == [4, 2, 4, 4, 2], "no batch spans two epochs"


async def test_checkpoints_may_be_further_apart(
    tiny_llama: Path, tmp_path: Path, undisturbed: Undisturbed
) -> None:
    result, seen = await passes(
        tiny_llama, tmp_path, undisturbed.file, steps_per_checkpoint=3, epochs=2
    )
    flat = [row for step in undisturbed.seen for row in step]
    assert [len(step) for step in seen] == [6, 4, 6, 4]
    assert [row for step in seen for row in step] == flat[:20]
    assert (result.step, result.updates) == (4, 10)


async def test_another_file_or_order_is_refused(
    tiny_llama: Path, tmp_path: Path, undisturbed: Undisturbed
) -> None:
    """Case 086, row_added and other_seed; a name of its own begins anew."""
    runs = tmp_path / "runs"
    await passes(tiny_llama, runs, undisturbed.file, final_step=1)
    longer = write_rows(tmp_path / "rows.jsonl", ROWS + 1)
    with pytest.raises(ConfigError, match="'fingerprint'"):
        await passes(tiny_llama, runs, longer)
    with pytest.raises(ConfigError, match="'seed'"):
        await passes(tiny_llama, runs, undisturbed.file, seed=7)
    result, seen = await passes(tiny_llama, runs, longer, name="longer", epochs=1)
    assert (len(seen), result.step) == (6, 7)


async def test_initial_step_leaves_out_the_beginning_of_a_new_run(
    tiny_llama: Path, tmp_path: Path, undisturbed: Undisturbed
) -> None:
    _, seen = await passes(tiny_llama, tmp_path, undisturbed.file, initial_step=13)
    assert seen == undisturbed.seen[13:]


# --- held-out loss


async def test_the_held_out_loss_is_logged_and_stops_a_run_that_gets_worse(
    tiny_llama: Path, tmp_path: Path, undisturbed: Undisturbed
) -> None:
    """What is held out contradicts what is learned, so its loss rises as soon as that is felt."""
    held_out = tmp_path / "held_out.jsonl"
    turns = [{"role": "user", "content": "q1"}, {"role": "assistant", "content": "zzz"}]
    held_out.write_text(json.dumps({"messages": turns}) + "\n")
    options: dict[str, Any] = {"eval_file": held_out, "patience": 2, "peak_lr": 5e-2}
    result, seen = await passes(tiny_llama, tmp_path / "runs", undisturbed.file, **options)
    assert result.finished
    assert len(seen) < LAST
    assert len(result.eval_losses) == len(seen) + 1
    lowest = min(range(len(result.eval_losses)), key=result.eval_losses.__getitem__)
    assert len(result.eval_losses) - 1 - lowest == 2
    assert result.best_step == lowest
    history = MetricsLog(run_folder(tmp_path / "runs") / "history.jsonl").read()
    logged = {m.step: m.values["sft_loss"] for m in history if m.split == "val"}
    assert list(logged.values()) == result.eval_losses
    again, more = await passes(tiny_llama, tmp_path / "runs", undisturbed.file, **options)
    assert (again.finished, more, again.eval_losses) == (True, [], result.eval_losses)
    model = small_model(tiny_llama, tmp_path / "runs")
    async with art.LocalBackend(show_progress=False) as backend:
        await model.register(backend)
        await art.train_sft_from_file(model, undisturbed.file, **{**PASSES, **options})
        await model.train_sft(conversation(), art.TrainSFTConfig(learning_rate=0.1))
    again, more = await passes(tiny_llama, tmp_path / "runs", undisturbed.file, **options)
    assert (again.finished, more, again.step) == (True, [], result.step + 1), "it stays stopped"


async def test_losses_of_another_held_out_file_stop_nothing(
    tiny_llama: Path, tmp_path: Path, undisturbed: Undisturbed
) -> None:
    """A file that was stopped early by what contradicts it goes on when the held-out file is
    mended in its place; what the new one says is compared with itself alone.
    """
    held_out, runs = tmp_path / "held_out.jsonl", tmp_path / "runs"
    turns = [{"role": "user", "content": "q1"}, {"role": "assistant", "content": "zzz"}]
    held_out.write_text(json.dumps({"messages": turns}) + "\n")
    options: dict[str, Any] = {"eval_file": held_out, "patience": 2, "peak_lr": 5e-2}
    stopped, seen = await passes(tiny_llama, runs, undisturbed.file, **options)
    assert (stopped.finished, len(seen) < LAST - 1) == (True, True)
    held_out.write_text(undisturbed.file.read_text())
    options["final_step"] = len(seen) + 2
    result, more = await passes(tiny_llama, runs, undisturbed.file, **options)
    assert seen + more == undisturbed.seen[: len(seen) + 2]
    assert len(result.eval_losses) == len(more) + 1, "none of the old file's"
    assert not set(result.eval_losses) & set(stopped.eval_losses)


class OnceWild(WatchedBackend):
    """Its second call has a learning rate that makes weights infinite."""

    async def train_sft(self, *args: Any, **named: Any) -> art.TrainResult:
        model, rows, config = args
        if len(self.seen) == 1:
            config = config.model_copy(update={"learning_rate": 1e308})
        return await super().train_sft(model, rows, config, **named)


async def test_steps_that_are_not_finite_are_left_out(
    tiny_llama: Path, tmp_path: Path, undisturbed: Undisturbed
) -> None:
    """Case 090 for supervised steps: no checkpoint, a reason, and the file goes on behind them,
    also after a restart.
    """
    model = small_model(tiny_llama, tmp_path)
    async with OnceWild() as backend:
        await model.register(backend)
        options = {**PASSES, "epochs": 1}
        result = await art.train_sft_from_file(model, undisturbed.file, **options)
        assert (result.step, result.finished, result.left_out) == (4, True, 2)
        assert "weights that are not finite" in (result.left_out_why or "")
        assert backend.seen == undisturbed.seen[:5]
    lines = map(json.loads, (run_folder(tmp_path) / "history.jsonl").read_text().splitlines())
    (line,) = [line for line in lines if "sft/reason" in line]
    assert (line["step"], line["sft/trained"], line["sft/nonfinite_steps"]) == (1, 0, 1)
    again, seen = await passes(tiny_llama, tmp_path, undisturbed.file, epochs=1)
    assert (again.finished, seen) == (True, [])


async def test_too_many_supervised_steps_that_are_not_finite_are_an_error(
    tiny_llama: Path, tmp_path: Path
) -> None:
    model = small_model(tiny_llama, tmp_path)
    wild = art.TrainSFTConfig(learning_rate=1e308, max_nonfinite_steps=2)
    async with art.LocalBackend(show_progress=False) as backend:
        await model.register(backend)
        result = await model.train_sft(conversation(), wild)
        assert (result.step, result.trained) == (0, False)
        with pytest.raises(TrainingError, match=r"2 steps in a row were not.* Step 0 goes on serv"):
            await model.train_sft(conversation(), wild)
        assert await model.get_step() == 0


async def test_patience_needs_a_file_to_look_at(tiny_llama: Path, tmp_path: Path) -> None:
    file = write_rows(tmp_path / "rows.jsonl")
    with pytest.raises(ConfigError, match="patience"):
        await passes(tiny_llama, tmp_path / "runs", file, patience=1)


@pytest.mark.parametrize(
    ("name", "value"),
    [("initial_step", 16), ("warmup_ratio", 1.5), ("warmup_ratio", float("nan"))],
)
async def test_numbers_that_can_not_be_meant_are_refused_by_their_name(
    name: str, value: float, tiny_llama: Path, tmp_path: Path
) -> None:
    """Steps beyond the last of 15 would mark the file as done, with nothing learned."""
    file = write_rows(tmp_path / "rows.jsonl")
    with pytest.raises(ConfigError, match=name):
        await passes(tiny_llama, tmp_path / "runs", file, **{name: value})


def conversation() -> art.Trajectory:
    turns: list[Any] = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "ok"}]
    return art.Trajectory(messages_and_choices=turns)


# --- with reinforcement learning


async def test_reinforcement_learning_goes_on_from_the_warm_up(
    tiny_llama: Path, tmp_path: Path
) -> None:
    """One adapter, one count of steps; the place in the file stays with the steps that follow."""
    file = write_rows(tmp_path / "rows.jsonl")
    runs = tmp_path / "runs"
    model = small_model(tiny_llama, runs)
    async with art.LocalBackend(show_progress=False) as backend:
        await model.register(backend)
        await art.train_sft_from_file(model, file, **{**PASSES, "steps_per_checkpoint": 10})
        assert await model.get_step() == 3
        groups = await play(model, (1, 0, 0, 1))
        assert {call.step for group in groups for t in group for call in t.calls} == {3}
        result = await model.train(groups, CONFIG)
        assert (result.step, result.trained) == (4, True)
    again = small_model(tiny_llama, runs)
    async with art.LocalBackend(show_progress=False) as backend:
        await again.register(backend)
        warm_up = await art.train_sft_from_file(
            again, file, **{**PASSES, "steps_per_checkpoint": 10}
        )
        assert (warm_up.finished, warm_up.step) == (True, 4)
        assert (await say(again)).choices[0].message.content is not None


async def test_what_another_model_said_is_learned(tiny_llama: Path, tmp_path: Path) -> None:
    """`train_sft` on conversations in memory; the loss on them falls, the new step answers."""
    model = small_model(tiny_llama, tmp_path)
    async with art.LocalBackend(show_progress=False) as backend:
        await model.register(backend)
        before = await model.sft_loss(conversation())
        config = art.TrainSFTConfig(learning_rate=2e-2, batch_size=1)
        result = await model.train_sft([conversation()] * 60, config)
        assert (result.step, result.metrics["updates"]) == (1, 60)
        assert result.metrics["tokens_trained"] == 60 * 3, "o, k and the end of the turn"
        assert result.metrics["max_length"] == 512, "what the base model can read"
        assert await model.sft_loss(conversation()) < 0.1 * before
        answer = (await say(model, temperature=0)).choices[0]
        assert (answer.message.content, answer.finish_reason) == ("ok", "stop")


async def test_rows_that_are_left_out_are_told(
    tiny_llama: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    turns: Any = conversation().messages_and_choices
    long = [{"role": "user", "content": "x" * 600}, {**turns[1], "weight": 1, "odd": 1}]
    model = small_model(tiny_llama, tmp_path)
    async with art.LocalBackend(show_progress=False) as backend:
        await model.register(backend)
        rows = [art.Trajectory(messages_and_choices=m) for m in (long, turns)]
        result = await model.train_sft(rows)
        assert [(s.group, s.trajectories) for s in result.skipped] == [(0, 1)]
        assert "too long: 6" in result.skipped[0].reason
        assert result.metrics["left_out"] == 1
        with pytest.raises(NoTrainableTokens, match="none of 1 trajectories"):
            await model.train_sft(rows[:1])
        with pytest.raises(GroupError, match="item 0 of what is trained is a dict"):
            await model.train_sft(turns)
        assert await model.get_step() == 1
    assert "trajectory 0 is not trained: too long" in caplog.text
    assert 'unknown key "odd" in a message' in caplog.text


async def test_a_file_that_can_not_be_trained_changes_nothing(
    tiny_llama: Path, tmp_path: Path
) -> None:
    file = write_rows(tmp_path / "rows.jsonl")
    model = small_model(tiny_llama, tmp_path / "runs")
    async with art.LocalBackend(show_progress=False) as backend:
        await model.register(backend)
        with pytest.raises(NoTrainableTokens, match="too long"):
            await art.train_sft_from_file(model, file, config=art.TrainSFTConfig(max_length=3))
        file.write_text(file.read_text() + "{}\n")
        with pytest.raises(DataFileError, match="line 11 of"):
            await art.train_sft_from_file(model, file)
        assert await model.get_step() == 0
        result = await art.train_sft_from_file(model, file, skip_refused=True, epochs=1)
        assert result.finished


@pytest.mark.model
@pytest.mark.slow
async def test_smollm2_learns_to_call_a_tool(smollm2: Path, tmp_path: Path) -> None:
    """Twenty written conversations, four times: orders that it never saw are looked up."""
    tool: Any = {"type": "function", "function": {"name": "order_status", "parameters": ORDER}}

    def rows(orders: range) -> str:
        return "".join(json.dumps({"messages": asking(n), "tools": [tool]}) + "\n" for n in orders)

    file, held_out = tmp_path / "rows.jsonl", tmp_path / "held_out.jsonl"
    file.write_text(rows(range(10_400, 10_420)))
    held_out.write_text(rows(range(20_731, 20_735)))
    model = art.TrainableModel(
        name="agent", project="sft", base_model=str(smollm2), base_path=str(tmp_path)
    )
    async with art.LocalBackend(show_progress=False) as backend:
        await model.register(backend)
        result = await art.train_sft_from_file(
            model, file, epochs=4, batch_size=4, peak_lr=1e-3, eval_file=held_out
        )
        assert (result.step, result.updates) == (4, 20)
        assert result.eval_losses[-1] < 0.2 * result.eval_losses[0]
        completion = await model.openai_client().chat.completions.create(
            model=model.name,
            messages=asking(31_207)[:1],
            tools=[tool],
            temperature=0,
            max_tokens=64,
        )
    calls: Any = completion.choices[0].message.tool_calls
    assert [json.loads(call.function.arguments) for call in calls] == [{"order": "31207"}]


ORDER = {"type": "object", "properties": {"order": {"type": "string"}}, "required": ["order"]}


def asking(order: int) -> list[Any]:
    arguments = json.dumps({"order": str(order)})
    call = {"id": "c", "type": "function"}
    return [
        {"role": "user", "content": f"Where is my order {order}?"},
        {
            "role": "assistant",
            "content": "",
            "tool_calls": [{**call, "function": {"name": "order_status", "arguments": arguments}}],
        },
        {"role": "tool", "tool_call_id": "c", "content": "on its way"},
        {"role": "assistant", "content": f"Your order {order} is on its way."},
    ]
