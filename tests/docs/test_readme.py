"""The README's Python runs as it stands: its agents on the scripted engine, and its loop, only
smaller, on the real one with SmolLM2.
"""

import asyncio
import gc
import re
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx2
import pytest
from typer.testing import CliRunner

import art_core as art
from art_core.engine.base import GenerateRequest
from art_langgraph.cli import app
from tests.core.sft_run import write_rows
from tests.langgraph.scripted_shop import ScriptedBackend, written
from tests.stub_endpoint import completion, endpoint

README = Path(__file__).parents[2] / "README.md"
BLOCKS = re.findall(r"```python\n(.*?)```", README.read_text("utf-8"), re.DOTALL)


@pytest.fixture
def names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What the README's blocks define, one after the other, in an empty folder."""
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {}
    for block in BLOCKS:
        smaller = block.replace("GROUP_SIZE, NUM_STEPS = 8, 2", "GROUP_SIZE, NUM_STEPS = 2, 1")
        smaller = smaller.replace("max_tokens=64", "max_tokens=128")  # scripted tokens are bytes
        exec(compile(smaller, str(README), "exec"), names)  # noqa: S102 - our own text
    assert (names["GROUP_SIZE"], names["NUM_STEPS"]) == (2, 1)
    return names


@pytest.fixture
def namespace(smollm2: Path, names: dict[str, Any]) -> dict[str, Any]:
    """As `names`, with SmolLM2 on this machine."""
    return names


@pytest.fixture
async def model(tmp_path: Path) -> AsyncIterator[art.TrainableModel[Any]]:
    """A model behind the scripted engine: it asks the tool, if there is one, then says its answer.

    A call without tools is answered by "a plan".
    """

    def script(prompt: str, request: GenerateRequest) -> str:
        if "order_status" not in prompt:
            return "a plan"
        return "It is on its way." if "tool_call>\n{" in prompt.rpartition("user\n")[2] else CALL

    model: art.TrainableModel[Any] = art.TrainableModel(
        name="agent-001", project="readme", base_model="scripted", base_path=str(tmp_path)
    )
    async with ScriptedBackend(script) as backend:
        await model.register(backend)
        yield model


CALL = written("order_status", {"order": "10437"})


async def test_the_agent_is_played_and_rewarded(
    names: dict[str, Any], model: art.TrainableModel[Any]
) -> None:
    trajectory = await names["play"](model, names["SCENARIOS"][0])
    assert trajectory.reward == 1.0
    assert [call.origin.node for call in trajectory.calls] == ["model", "model"]
    assert all(call.trainable for call in trajectory.calls)


async def test_any_other_graph_is_played_the_same_way(
    names: dict[str, Any], model: art.TrainableModel[Any]
) -> None:
    state = {"messages": [("user", "Hi")]}
    trajectory = await names["rollout"](names["graph"], state, model=model)
    assert trajectory.state["messages"][-1].text == "a plan"
    assert [call.trainable for call in trajectory.calls] == [True]


async def test_a_part_that_a_hosted_model_plays_is_context(
    names: dict[str, Any], model: art.TrainableModel[Any]
) -> None:
    with endpoint([completion("first this, then that", None, prompt_ids=None)]) as stub:
        planner: art.Model[Any] = art.Model(
            name="big", project="readme", inference_base_url=stub.base_url
        )
        trajectory = await names["play_team"](model, planner, "Hi")
    assert [m.text for m in trajectory.state["messages"]] == [
        "Hi", "first this, then that", "a plan",
    ]  # fmt: skip
    assert {c.origin.node: c.trainable for c in trajectory.calls} == {"plan": False, "answer": True}


async def test_a_stock_client_is_trained_token_for_token(
    names: dict[str, Any], model: art.TrainableModel[Any]
) -> None:
    trajectory = await names["play_stock"](model, "Where is my order 10437?")
    await model.join(trajectory)
    assert len(trajectory.calls) == 2
    assert all(call.trainable for call in trajectory.calls)
    await close_clients(str(model.inference_base_url))


async def close_clients(base_url: str) -> None:
    """Close what ChatOpenAI keeps open for ever, so that no later test is blamed for it."""
    for found in gc.get_objects():
        # Not isinstance: it asks every object for its __class__, and some of torch's then warn.
        if issubclass(type(found), httpx2.AsyncClient) and str(found.base_url).startswith(base_url):
            await found.aclose()


async def test_the_same_line_is_the_deployment(
    names: dict[str, Any], model: art.TrainableModel[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ART_BASE_URL", str(model.inference_base_url))
    monkeypatch.setenv("ART_MODEL", "agent-001@0")
    monkeypatch.setenv("ART_API_KEY", "key")
    assert await names["serve"]("Where is my order 10437?") == "It is on its way."


async def test_the_warm_up_learns_from_a_file_and_from_another_model(
    names: dict[str, Any],
    model: art.TrainableModel[Any],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The teacher is the scripted model; the pupil learns for real, in a blink."""
    pytest.importorskip("torch", reason="art-langgraph[train] is not installed")
    from art_core.nn.tiny_model import write_tiny_model

    base = write_tiny_model(tmp_path / "tiny", ["Where is my order 10437? It is on its way."])
    pupil: art.TrainableModel[Any] = art.TrainableModel(
        name="pupil", project="readme", base_model=str(base), base_path=str(tmp_path)
    )
    teacher: art.Model[Any] = art.Model(
        name="teacher",
        project="readme",
        inference_base_url=model.inference_base_url,
        inference_model_name="agent-001",
    )
    write_rows(tmp_path / "conversations.jsonl")
    async with art.LocalBackend(show_progress=False) as backend:
        await pupil.register(backend)
        await names["warm_up"](pupil)
        assert capsys.readouterr().out.startswith("3 ")
        result = await names["imitate"](pupil, teacher)
    assert (result.step, result.skipped) == (4, ())
    assert result.metrics["rows"] == 1, "the other customer's answer was wrong"
    assert result.metrics["updates"] == 1


def test_the_sft_command_is_shown_as_it_is_called() -> None:
    text = README.read_text("utf-8")
    shown = re.findall(r"art-langgraph sft (\w+) conversations.jsonl((?: .*\\\n)?.*)", text)
    assert [command for command, _ in shown] == ["validate", "train"]
    for command, options in shown:
        help_text = CliRunner().invoke(app, ["sft", command, "--help"], env={"COLUMNS": "200"})
        assert set(re.findall(r"--[a-z-]+", options)) <= set(
            re.findall(r"--[a-z-]+", help_text.output)
        )


def test_the_loop_goes_on_from_what_the_sft_command_trains() -> None:
    """Both name one run folder, and one base model as the folder has it."""
    text = README.read_text("utf-8")
    (train,) = re.findall(r"sft train conversations.jsonl((?: .*\\\n)?.*)", text)
    loop = text.partition("## The loop")[2]
    for option in ("name", "project", "base-model"):
        (given,) = re.findall(rf"--{option} (\S+)", train)
        assert f'{option.replace("-", "_")}="{given}"' in loop


def test_the_rehearsal_is_shown_as_it_is_called() -> None:
    """Every option of `rehearse` that the README names is one."""
    text = README.read_text("utf-8")
    section = text.partition("## First command")[2].partition("\n## ")[0]
    options = set(re.findall(r"--[a-z]+", section))
    assert options == {"--reward", "--scenarios", "--model"}
    shown = CliRunner().invoke(app, ["rehearse", "--help"], env={"COLUMNS": "200"}).output
    assert options <= set(re.findall(r"--[a-z]+", shown))


def test_the_doctor_is_shown_as_it_is_called() -> None:
    text = README.read_text("utf-8")
    section = text.partition("## What this machine and a model can do")[2].partition("\n## ")[0]
    options = set(re.findall(r"--[a-z][a-z-]*", section))
    assert options == {"--base-model", "--max-length", "--json"}
    shown = CliRunner().invoke(app, ["doctor", "--help"], env={"COLUMNS": "200"}).output
    assert options <= set(re.findall(r"--[a-z][a-z-]*", shown))


@pytest.mark.model
def test_the_loop_trains_or_says_why_not(
    namespace: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    asyncio.run(namespace["main"]())
    line = capsys.readouterr().out.strip().splitlines()[-1]
    # Either something was learned, or every group has its reason; never silence.
    assert line.startswith("1 {") or (line.startswith("0 {") and "nothing to learn from" in line)
    assert Path(".art/my-agent/models/agent-001/model.json").is_file()


@pytest.mark.model
def test_the_rollout_by_hand_is_trained_from_its_kept_choices(namespace: dict[str, Any]) -> None:
    async def run() -> art.TrainResult:
        model = art.TrainableModel(
            name="by-hand", project="readme", base_model="SmolLM2-135M-Instruct"
        )
        play = namespace["rollout_by_hand"]
        async with art.LocalBackend(show_progress=False) as backend:
            await model.register(backend)
            (group,) = await art.gather_trajectory_groups(
                [art.TrajectoryGroup(play(model, "Say a word.") for _ in range(3))], progress=False
            )
            for i, trajectory in enumerate(group):
                assert trajectory.reward in (0.0, 1.0)  # whatever it said
                trajectory.reward = float(i)  # so that there is something to compare
                assert trajectory.chosen_records() == {trajectory.calls[0].key}
            return await model.train(group, config=art.TrainConfig(learning_rate=1e-4))

    result = asyncio.run(run())
    assert result.trained
    assert result.step == 1
