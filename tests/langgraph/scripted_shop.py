"""The quickstart's shop without a model: a backend over the scripted engine, whose policy is told.

In: a clientele, and how skilled each step is. Out: what `LocalBackend` gives, over real HTTP, with
checkpoints, metrics and trajectories in a real run folder; only weights are missing. No torch.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import art_core as art
from art_core import checkpoints
from art_core.config import TrainConfig
from art_core.engine.base import AdapterRef, GenerateRequest
from art_core.engine.chat_service import ChatService
from art_core.engine.model_registry import ModelRegistry
from art_core.engine.openai_routes import create_app
from art_core.engine.scripted import ScriptedEngine
from art_core.engine.serving import LoopbackServer
from art_core.join import join_records
from art_core.records import RecordStore
from art_core.rundir import RunDir
from art_core.runlog import log_step
from art_core.trajectories import Trajectory, TrajectoryGroup
from art_langgraph.quickstart.clientele import Clientele
from art_langgraph.quickstart.customers import TOOLS, Customer
from art_langgraph.quickstart.score import Score
from tests.unsupervised import Unsupervised

ENTROPY = 1.5
"""What every step of the backend says its entropy was."""


def written(tool: str, arguments: Mapping[str, str]) -> str:
    """A tool call as a model writes it."""
    call = json.dumps({"name": tool, "arguments": dict(arguments)})
    return f"<tool_call>\n{call}\n</tool_call>"


class Policy:
    """A policy that is right for the tools it knows, and else says nothing useful.

    Args:
        clientele: whom it may meet.
        known: by step, the tools it serves right; steps after the last are like the last.
    """

    def __init__(self, clientele: Clientele, known: Sequence[Sequence[str]]) -> None:
        self._customers = [*clientele.training, *clientele.checks, *clientele.held_out]
        self._known = known
        self.answered = 0
        """Calls."""

    def __call__(self, prompt: str, request: GenerateRequest) -> str:
        self.answered += 1
        step = request.adapter.step if request.adapter else 0
        customer = max(self._customers, key=lambda c: prompt.rfind(c.message))
        after = prompt[prompt.rfind(customer.message) + len(customer.message) :]
        if "tool_call" in after:  # it is called; the tool's answer is the last turn but ours
            return f"It is so: {customer.fact}."
        if customer.tool in self._known[min(step, len(self._known) - 1)]:
            return written(customer.tool, customer.arguments)
        return "I don't know."


class ScriptedBackend(Unsupervised):
    """Implements `Backend` over a scripted engine. A step is learned whatever was played.

    idle: steps, counted from 1, in which nothing is learned.
    """

    def __init__(
        self, script: Callable[[str, GenerateRequest], str], idle: Sequence[int] = ()
    ) -> None:
        self._idle, self._trained = idle, 0
        self.engine = ScriptedEngine(script)
        self.records = RecordStore(None)
        self.registry = ModelRegistry("scripted")
        service = ChatService(self.engine, self.records, self.registry)
        self.server = LoopbackServer(create_app(service)).start()
        self.run: RunDir | None = None
        self.step = 0
        self.lessons: list[Trajectory] = []
        """What was given to learn from."""

    async def __aenter__(self) -> ScriptedBackend:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def register(self, model: art.TrainableModel) -> art.Inference:
        self.run = RunDir.open(model.base_path, model.project, model.name)
        found = checkpoints.latest(self.run)
        self.step = found.step if found else 0
        await self._publish(model, self.step)
        return art.Inference(self.server.base_url, "key", model.name)

    async def train(
        self,
        model: art.TrainableModel,
        groups: Sequence[TrajectoryGroup],
        config: TrainConfig,
        *,
        bookmark: art.Bookmark | None = None,
    ) -> art.TrainResult:
        assert self.run is not None
        self._trained += 1
        if self._trained in self._idle:
            log_step(self.run, "train", self.step, groups, {})
            return art.TrainResult(self.step, trained=False, reason="all rewards are equal")
        self.step += 1
        checkpoints.save(self.run, self.step, _write)
        await self._publish(model, self.step)
        metrics = {"entropy": ENTROPY, "step_seconds": 0.25}
        log_step(self.run, "train", self.step - 1, groups, metrics)
        return art.TrainResult(self.step, trained=True, metrics=metrics)

    async def train_sft(
        self,
        model: art.TrainableModel,
        trajectories: Sequence[Trajectory],
        config: art.TrainSFTConfig,
        *,
        bookmark: art.Bookmark | None = None,
    ) -> art.TrainResult:
        assert self.run is not None
        self.lessons += trajectories
        self.step += 1
        checkpoints.save(self.run, self.step, _write)
        await self._publish(model, self.step)
        return art.TrainResult(self.step, trained=True, metrics={"loss": 0.5})

    async def join(self, model: art.TrainableModel, trajectories: Sequence[Trajectory]) -> None:
        join_records(trajectories, self.records)

    async def get_step(self, model: art.TrainableModel) -> int:
        return self.step

    async def log(
        self,
        model: art.TrainableModel,
        groups: Sequence[TrajectoryGroup],
        *,
        split: str,
        metrics: dict[str, Any] | None = None,
        step: int | None = None,
    ) -> None:
        assert self.run is not None
        log_step(self.run, split, self.step if step is None else step, groups, metrics)

    async def delete_checkpoints(self, model: art.TrainableModel, *, best_metric: str) -> list[int]:
        return []

    async def close(self) -> None:
        self.server.stop()
        self.records.close()
        if self.run is not None:
            self.run.close()

    async def _publish(self, model: art.TrainableModel, step: int) -> None:
        await self.engine.load_adapter(AdapterRef(model.name, step), Path())
        self.registry.publish(model.name, step)


class Notes:
    """A watcher that keeps what it is told."""

    bars = False

    def __init__(self, on_step: Callable[[int], None] | None = None) -> None:
        self.told: list[str] = []
        self.steps: list[int] = []
        self._on_step = on_step

    def warmed_up(self, result: art.TrainResult, seconds: float) -> None:
        self.told.append("warm-up")

    def first(self, group: TrajectoryGroup) -> None:
        self.told.append("first")

    def examined(self, when: str, score: Score, groups: Sequence[TrajectoryGroup]) -> None:
        self.told.append(when)

    def step(self, number: int, figures: Mapping[str, float], result: art.TrainResult) -> None:
        self.told.append(f"step {number}")
        self.steps.append(result.step)
        if self._on_step is not None:
            self._on_step(number)

    def checked(self, score: Score) -> None:
        self.told.append("check")


def of_tool(customers: Sequence[Customer], tool: str) -> Customer:
    """The first customer who needs `tool`."""
    return next(customer for customer in customers if customer.tool == tool)


ALL, NONE = tuple(TOOLS), ()


def _write(folder: Path) -> None:
    (folder / "adapter_config.json").write_text("{}")
