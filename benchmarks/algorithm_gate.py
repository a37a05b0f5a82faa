"""The gate of the comparison of algorithms: what must hold before any figure counts.

In: nothing but a tiny model of noise, made here. Out: figures, or an error. The tool task's judge
pays what it says; a step of each contender makes the answers likelier that earned more than their
group's mean, beside those that earned less.
"""

from __future__ import annotations

import asyncio
import json
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from openai.types.chat import ChatCompletionMessage

import art_core as art
from art_core.config import ModelConfig, SamplingConfig, TrainConfig
from art_core.nn.tiny_model import write_tiny_model
from art_langgraph.quickstart.recipe import Recipe
from benchmarks import tool_task
from benchmarks.contenders import contenders
from benchmarks.tool_task import Wish

RATE = 3e-3
"""A learning rate that the tiny model's answers feel."""
_WISH = Wish("Lamp of the hall at 30.", "lamp", {"room": "hall", "percent": "30"})
_RIGHT = {"room": "hall", "percent": 30}
PAID: Sequence[tuple[float, list[tuple[str, dict[str, Any]]]]] = (
    (1.0, [("lamp", _RIGHT)]),
    (0.45, [("lamp", {**_RIGHT, "percent": 31})]),  # 0.3 + 0.3 / 2
    (0.3, [("lamp", {})]),
    (0.5, [("lamp", {**_RIGHT, "degrees": 30})]),  # 0.3 + 0.3 * 2 / 3
    (0.6, [("lamp", {"place": "hall", "share": "30"})]),  # 0.3 + 0.3
    (0.3, [("heater", _RIGHT)]),
    (0.0, [("lamp", _RIGHT)] * 2),
    (0.0, []),
)
"""What calls in answer to `_WISH` earn."""


def tiny_base(folder: Path) -> Path:
    """A model of noise in `folder`."""
    texts = [str(message["content"]) for message in tool_task.EXAMPLES]
    return write_tiny_model(folder / "tiny", texts)


def gate() -> dict[str, float]:
    """How much each contender's step parted the better answers from the worse, in nats a token.

    Raises:
        RuntimeError: something does not hold.
    """
    for wanted, calls in PAID:
        paid = tool_task.total(tool_task.judge(_WISH, _said(calls)))
        if abs(paid - wanted) > 1e-9:
            raise RuntimeError(f"{calls} earn {paid}, not {wanted}")
    with tempfile.TemporaryDirectory() as folder:
        parted = asyncio.run(_all(Path(folder)))
    wrong = {name: gain for name, gain in parted.items() if gain <= 0.0}
    if wrong:
        raise RuntimeError(f"steps that made the worse answers likelier: {wrong}")
    return parted


def _said(calls: Sequence[tuple[str, dict[str, Any]]]) -> ChatCompletionMessage:

    return ChatCompletionMessage.model_validate(
        {
            "role": "assistant",
            "tool_calls": [
                {
                    "id": str(i),
                    "type": "function",
                    "function": {"name": name, "arguments": json.dumps(arguments)},
                }
                for i, (name, arguments) in enumerate(calls)
            ],
        }
    )


async def _all(folder: Path) -> dict[str, float]:
    base = tiny_base(folder)
    async with art.LocalBackend(folder / "runs", show_progress=False) as backend:
        return {
            name: await _parted(name, config, base, backend)
            for name, config in contenders(Recipe().train).items()
        }


async def _parted(name: str, config: TrainConfig, base: Path, backend: art.Backend) -> float:
    """By how much one step of `config` changed the distance of better and worse answers."""
    model: art.TrainableModel[Any] = art.TrainableModel(
        name=name.replace("_", "-"),
        project="gate",
        base_model=str(base),
        art_config=ModelConfig(sampling=SamplingConfig(max_tokens=12)),
    )
    await model.register(backend)
    groups = await art.gather_trajectory_groups(
        [
            art.TrajectoryGroup(_play(model, wish) for _ in range(8))
            for wish in tool_task.make_wishes(0, "train", 4)
        ],
        progress=False,
        key="step-0",
    )
    before = await _distance(model, groups)
    await model.train(groups, config.model_copy(update={"learning_rate": RATE}))
    return await _distance(model, groups) - before


async def _play(model: art.TrainableModel[Any], wish: Wish) -> art.Trajectory:
    """The longer the answer, the more it earns: equal answers earn the same."""
    trajectory = await tool_task.fulfil(model, wish)
    choice: Any = trajectory.messages_and_choices[-1]
    trajectory.reward = len(choice.message.content or "") / 100
    return trajectory


async def _distance(model: art.TrainableModel[Any], groups: Sequence[art.TrajectoryGroup]) -> float:
    """Loss of the worse answers less that of the better ones, in nats a token."""
    better: list[art.Trajectory] = []
    worse: list[art.Trajectory] = []
    for group in groups:
        rewards = [float(t.reward or 0.0) for t in group]
        mean = sum(rewards) / len(rewards)
        for trajectory, reward in zip(group, rewards, strict=True):
            (better if reward > mean else worse).append(trajectory)
    return await model.sft_loss(worse) - await model.sft_loss(better)
