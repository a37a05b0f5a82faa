"""The README's Python runs as it stands, on the real engine with SmolLM2, only smaller."""

import asyncio
import re
from pathlib import Path
from typing import Any

import pytest

import art_core as art

README = Path(__file__).parents[2] / "README.md"
BLOCKS = re.findall(r"```python\n(.*?)```", README.read_text("utf-8"), re.DOTALL)


@pytest.fixture
def namespace(smollm2: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What the README's blocks define, one after the other, in an empty folder."""
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {}
    for block in BLOCKS:
        smaller = block.replace("GROUP_SIZE, NUM_STEPS = 8, 2", "GROUP_SIZE, NUM_STEPS = 2, 1")
        exec(compile(smaller, str(README), "exec"), names)  # noqa: S102 - our own text
    assert (names["GROUP_SIZE"], names["NUM_STEPS"]) == (2, 1)
    return names


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
                assert trajectory.reward == 0.0
                trajectory.reward = float(i)  # so that there is something to compare
                assert trajectory.chosen_records() == {trajectory.calls[0].key}
            return await model.train(group, config=art.TrainConfig(learning_rate=1e-4))

    result = asyncio.run(run())
    assert result.trained
    assert result.step == 1
