"""`LocalBackend`: serves and trains in this process, through the embedded engine.

In: registered models, groups to train. Out: an OpenAI-compatible endpoint on loopback, and after
each train call a checkpoint that serves the next rollout. The order of a step is its safety:
hold calls, train, save the checkpoint, and only then serve it; a fault on the way leaves the
last whole step in the module, on disk and behind the endpoint.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from art_core import checkpoints
from art_core.backend import Inference, TrainResult
from art_core.batch.select import Selection, select
from art_core.calls import ModelCall
from art_core.config import EngineConfig, TrainConfig
from art_core.engine.base import AdapterRef
from art_core.engine.chat_service import ChatService
from art_core.engine.embedded import EmbeddedEngine
from art_core.engine.model_registry import ModelRegistry
from art_core.engine.openai_routes import create_app
from art_core.engine.serving import LoopbackServer
from art_core.engine.tokenizer import HFTokenizer
from art_core.errors import ConfigError, ModelNotRegistered
from art_core.model import TrainableModel
from art_core.nn.base_model import resolve_base_model
from art_core.nn.lora import LoraModel
from art_core.nn.memory import keep_freed_memory
from art_core.progress import progress
from art_core.records import RecordStore
from art_core.rundir import RunDir
from art_core.runlog import log_step
from art_core.training.trainer import Trainer
from art_core.trajectories import TrajectoryGroup

_log = logging.getLogger(__name__)


@dataclass
class _Serving:
    """One base model in memory, with its endpoint."""

    base_model: str
    model: LoraModel
    engine: EmbeddedEngine
    service: ChatService
    server: LoopbackServer


@dataclass
class _Run:
    """A registered model."""

    model: TrainableModel
    run: RunDir
    serving: _Serving
    trainer: Trainer
    step: int
    training: asyncio.Lock

    @property
    def adapter(self) -> str:
        """Name of its adapter in the module."""
        return adapter_name(self.model)


def adapter_name(model: TrainableModel) -> str:
    """The module's name for the live adapter of `model`; module names take no dots."""
    return f"live_{model.project}_{model.name}".replace(".", "_")


class LocalBackend:
    """Serves and trains in this process.

    Args:
        path: where run folders are kept; None means each model's `base_path`.
        show_progress: a bar (or plain lines) while a step is trained; else silent.
    """

    def __init__(self, path: str | Path | None = None, *, show_progress: bool = True) -> None:
        self._path = None if path is None else str(path)
        self._show_progress = show_progress
        self._servings: dict[str, _Serving] = {}
        self._runs: dict[tuple[str, str], _Run] = {}
        self._registering = asyncio.Lock()

    async def __aenter__(self) -> LocalBackend:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def register(self, model: TrainableModel) -> Inference:
        """As `Backend.register`.

        Raises:
            BaseModelError: the base model is unknown, damaged or of a kind that can't be used.
            RunLocked: another process holds the run folder.
            ConfigError: another model of this backend has this name on the same base model.
        """
        if self._path is not None:
            model.base_path = self._path
        async with self._registering:
            known = self._runs.get(_key(model))
            if known is None:
                known = self._runs[_key(model)] = await self._open(model)
            return Inference(
                base_url=known.serving.server.base_url, api_key="local", model_name=model.name
            )

    async def train(
        self, model: TrainableModel, groups: Sequence[TrajectoryGroup], config: TrainConfig
    ) -> TrainResult:
        """As `Backend.train`; writes metrics and trajectories of the split "train".

        Raises:
            GroupError: a kind of it names what can't be trained; nothing has changed.
            TrainingError: the step failed; the last whole step goes on serving.
            CheckpointError: the step could not be saved; as above.
        """
        run = self._run(model)
        async with run.training:
            selection = select(
                groups,
                model=model.name,
                step=run.step,
                config=config,
                join=lambda calls: join_records(calls, run.serving.service.records),
            )
            result = (
                await self._learn(run, selection, config)
                if selection.samples
                else TrainResult(run.step, trained=False, skipped=tuple(selection.skipped))
            )
            for skip in result.skipped:
                _log.info("group %d is not trained: %s", skip.group, skip.reason)
            played = run.step - 1 if result.trained else run.step
            metrics = {**result.metrics, "trained": result.trained, "skipped": len(result.skipped)}
            await asyncio.to_thread(log_step, run.run, "train", played, groups, metrics)
            return result

    async def get_step(self, model: TrainableModel) -> int:
        """As `Backend.get_step`."""
        return self._run(model).step

    async def log(
        self,
        model: TrainableModel,
        groups: Sequence[TrajectoryGroup],
        *,
        split: str,
        metrics: dict[str, Any] | None = None,
        step: int | None = None,
    ) -> None:
        """As `Backend.log`."""
        run = self._run(model)
        at = run.step if step is None else step
        await asyncio.to_thread(log_step, run.run, split, at, groups, metrics)

    async def delete_checkpoints(self, model: TrainableModel, *, best_metric: str) -> list[int]:
        """As `Backend.delete_checkpoints`."""
        run = self._run(model)
        gone = await asyncio.to_thread(
            checkpoints.delete_all_but_best, run.run, best_metric, in_use=[run.step]
        )
        for step in gone:
            run.serving.service.models.retire(model.name, step)
            await run.serving.engine.unload_adapter(AdapterRef(model.name, step))
        return gone

    async def close(self) -> None:
        """As `Backend.close`."""
        runs, self._runs = list(self._runs.values()), {}
        servings, self._servings = list(self._servings.values()), {}
        for serving in servings:
            await asyncio.to_thread(serving.server.stop)
            await serving.engine.close()
            serving.service.records.close()
        for run in runs:
            run.run.close()

    def _run(self, model: TrainableModel) -> _Run:
        run = self._runs.get(_key(model))
        if run is None:
            raise ModelNotRegistered(
                f"model {model.name!r} is not registered with this backend",
                fix="First: await model.register(backend).",
            )
        return run

    async def _open(self, model: TrainableModel) -> _Run:
        for other in self._runs.values():
            if other.model.name == model.name and other.model.base_model == model.base_model:
                raise ConfigError(
                    "two projects serve a model under one name",
                    got=model.name,
                    expected="a name of its own for each model on a base model",
                    fix="Rename one, or use a LocalBackend for each.",
                )
        path = await asyncio.to_thread(resolve_base_model, model.base_model, progress=_log.info)
        folder = await asyncio.to_thread(
            RunDir.open,
            model.base_path,
            model.project,
            model.name,
            base_model=model.base_model,
            config=model.art_config.model_dump(mode="json"),
        )
        try:
            serving = self._servings.get(str(path))
            if serving is None:
                serving = await asyncio.to_thread(
                    _serve, model.base_model, path, folder.records, model.art_config.engine
                )
                self._servings[str(path)] = serving
            return await self._load(model, folder, serving)
        except BaseException:
            folder.close()
            raise

    async def _load(self, model: TrainableModel, folder: RunDir, serving: _Serving) -> _Run:
        """The latest whole checkpoint in the module and behind the endpoint; step 0 if none."""
        settings, name = model.art_config, adapter_name(model)
        found = await asyncio.to_thread(checkpoints.latest, folder)

        def load(module: LoraModel) -> tuple[Trainer, int]:
            module.create_adapter(name, settings.lora, seed=settings.seed)
            trainer = Trainer(module, name, seed=settings.seed)
            step = 0
            if found is None:
                checkpoints.save(folder, 0, trainer.save)
            else:
                trainer.load(found.path)
                step = found.step
            serving.engine.adopt(AdapterRef(model.name, step), name)
            return trainer, step

        trainer, step = await serving.engine.exclusive(load)
        run = _Run(model, folder, serving, trainer, step, asyncio.Lock())
        for saved in checkpoints.steps(folder):
            if saved <= step:
                await self._serve_step(run, saved)
        return run

    async def _serve_step(self, run: _Run, step: int) -> None:
        """Make a saved step answer; the latest one answers from the module itself."""
        adapter = AdapterRef(run.model.name, step)
        settings = run.model.art_config
        await run.serving.engine.load_adapter(
            adapter, run.run.checkpoints / checkpoints.folder_name(step)
        )
        run.serving.service.models.publish(
            run.model.name, step, seed=settings.seed, sampling=settings.sampling
        )

    async def _learn(self, run: _Run, selection: Selection, config: TrainConfig) -> TrainResult:
        """Train, save, serve."""
        step = run.step + 1
        begun = time.perf_counter()
        saved: list[Path] = []
        rate = config.learning_rate * selection.share**config.trained_share_power
        config = config.model_copy(update={"learning_rate": rate})

        def learn(module: LoraModel) -> dict[str, float]:
            with run.trainer.undone_on_error(), progress("train", shown=self._show_progress) as bar:
                metrics = run.trainer.step(
                    selection.samples, config, on_progress=lambda a, b: bar.show(a, b, "positions")
                )
                saved.append(checkpoints.save(run.run, step, run.trainer.save))
            run.serving.engine.adopt(AdapterRef(run.model.name, step), run.adapter)
            return metrics

        run.serving.service.gate.hold()
        try:
            metrics = await run.serving.engine.exclusive(learn)
            run.step = step
            await self._serve_step(run, step)
        finally:
            run.serving.service.gate.release()
        return TrainResult(
            step=step,
            trained=True,
            metrics={
                **metrics,
                "groups_trained": selection.groups,
                "learning_rate": rate,
                "step_seconds": time.perf_counter() - begun,
            },
            skipped=tuple(selection.skipped),
            checkpoint_path=str(saved[0]),
        )


def join_records(calls: Sequence[ModelCall], records: RecordStore) -> list[ModelCall]:
    """Give calls that came without token ids those that the endpoint recorded for them."""
    missing = [call.record_id for call in calls if not call.trainable and call.error is None]
    found = records.get(missing) if missing else {}
    joined = []
    for call in calls:
        record = found.get(call.key)
        if record is not None and not call.trainable and record.complete:
            call = call.with_tokens(
                prompt_ids=record.prompt_ids,
                sampled_ids=record.sampled_ids,
                logprobs=record.logprobs,
                sampling=record.sampling,
                step=record.step,
            )
        joined.append(call)
    return joined


def _serve(name: str, path: Path, records: Path, config: EngineConfig) -> _Serving:
    """Load the base model and open its endpoint."""
    keep_freed_memory()
    torch.set_flush_denormal(True)
    model = LoraModel.load(path)
    tokenizer = HFTokenizer(path)
    engine = EmbeddedEngine(model, tokenizer, base_model=name, config=config)
    service = ChatService(engine, RecordStore(records), ModelRegistry(name))
    server = LoopbackServer(create_app(service)).start()
    return _Serving(name, model, engine, service, server)


def _key(model: TrainableModel) -> tuple[str, str]:
    return (model.project, model.name)
