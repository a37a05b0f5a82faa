"""`LocalBackend`: trains and serves on this machine, through the embedded engine or vLLM.

In: registered models, groups to train. Out: an OpenAI-compatible endpoint on loopback, and after
each train call a checkpoint that serves the next rollout. What is here is who is registered, where
it is kept, and that it ends; a step is made in live_run.py.
"""

from __future__ import annotations

import asyncio
import atexit
import logging
from collections.abc import Iterable, Sequence
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any, Self

from art_core import checkpoints
from art_core.backend import Inference, TrainResult
from art_core.bookmarks import Bookmark
from art_core.config import TrainConfig, TrainSFTConfig
from art_core.engine.chat_service import ChatService
from art_core.errors import CheckpointError, ConfigError, ModelNotRegistered
from art_core.local.live_run import LiveRun, OnStepProgress
from art_core.local.served_base import ServedBase
from art_core.model import TrainableModel
from art_core.nn.base_model import resolve_base_model
from art_core.readiness.before_loading import check_before_loading
from art_core.records import RecordStore
from art_core.rundir import RunDir
from art_core.runlog import log_step
from art_core.trajectories import Trajectory, TrajectoryGroup

_log = logging.getLogger(__name__)


class LocalBackend:
    """Serves and trains on this machine.

    Args:
        path: where run folders are kept; None means each model's `base_path`.
        show_progress: a bar (or plain lines) while a step is trained; else silent.
        endpoint: where this process answers for all models by itself, out of `services`; ends in
            "/v1". None opens an endpoint on loopback for each base model.
        on_progress: is told how far a step is, from the thread that computes it.
    """

    def __init__(
        self,
        path: str | Path | None = None,
        *,
        show_progress: bool = True,
        endpoint: str | None = None,
        on_progress: OnStepProgress | None = None,
    ) -> None:
        self._path = None if path is None else str(path)
        self._show_progress = show_progress
        self._endpoint, self._on_progress = endpoint, on_progress
        self._bases: dict[str, ServedBase] = {}
        self._runs: dict[tuple[str, str], LiveRun] = {}
        self._registering = asyncio.Lock()
        self._adapters = count()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def register(self, model: TrainableModel) -> Inference:
        """As `Backend.register`.

        Raises:
            BaseModelError: the base model is unknown, damaged or of a kind that can't be used.
            RunLocked: another process holds the run folder.
            CheckpointError: the latest checkpoint does not fit `art_config.lora`.
            ConfigError: the name is taken, or the model was registered with other settings.
            RuntimeMissing, EngineStartFailed: vLLM is asked for, and is not there or did not start.
            TrainerDied: the trainer's process ended while it loaded the base model.
        """
        if self._path is not None:
            model.base_path = self._path
        async with self._registering:
            known = self._runs.get(_key(model))
            if known is None:
                known = self._runs[_key(model)] = await self._open(model)
            _check_same(known.model, model)
            base_url = self._endpoint or known.base.base_url
            return Inference(base_url=base_url, api_key="local", model_name=model.name)

    async def adopt(self, model: TrainableModel, adapter: str | Path) -> TrainResult:
        """Let the model go on from an adapter in peft's format, as its next step.

        Args:
            adapter: its folder; of a checkpoint of ours, its optimizer is taken too.

        Raises:
            CheckpointError: it is no adapter for this base model and these `art_config.lora`;
                nothing has changed.
        """
        run = self._run(model)
        async with run.training:
            self._run(model)
            return await run.adopt(Path(adapter))

    async def fork(
        self,
        model: TrainableModel,
        from_name: str,
        *,
        from_project: str | None = None,
        step: int | None = None,
    ) -> TrainResult:
        """Let the model go on from where another one is, as its next step.

        Args:
            from_name: of a model whose run folder is kept in the same place; it need not be
                registered.
            from_project: None: the same.
            step: None: its latest.

        Raises:
            CheckpointError: there is no such step, or it does not fit; nothing has changed.
        """
        run = self._run(model)
        source = RunDir.at(run.model.base_path, from_project or model.project, from_name)
        found = await asyncio.to_thread(
            partial(checkpoints.find, source, step)
            if step is not None
            else partial(_latest, source)
        )
        return await self.adopt(model, found.path)

    def services(self) -> list[ChatService]:
        """What answers chat completions: one for each base model that is loaded."""
        return [base.service for base in self._bases.values()]

    def folder(self, model: TrainableModel) -> RunDir:
        """The model's run folder, which this process owns.

        Raises:
            ModelNotRegistered: it is not registered here.
        """
        return self._run(model).folder

    def records(self, model: TrainableModel) -> RecordStore:
        """What was sampled of the model and of those that share its base.

        Raises:
            ModelNotRegistered: it is not registered here.
        """
        return self._run(model).base.service.records

    async def forget(self, model: TrainableModel, steps: Iterable[int]) -> None:
        """Serve these steps no more; their checkpoints stay."""
        run = self._run(model)
        for step in steps:
            await run.forget(step)

    async def train(
        self,
        model: TrainableModel,
        groups: Sequence[TrajectoryGroup],
        config: TrainConfig,
        *,
        bookmark: Bookmark | None = None,
    ) -> TrainResult:
        """As `Backend.train`; writes metrics and trajectories of the split "train".

        Cancelled, it stops the step at the next row and ends when the old step is whole again.

        Raises:
            GroupError: a kind of it names what can't be trained; nothing has changed.
            NotEnoughMemory: by the estimate the step can't fit; nothing was computed.
            TrainingError: the step failed, or was not finite for the
                `config.max_nonfinite_steps`-th time in a row; the last whole step goes on serving.
                Its kind `TrainerDied` says that the trainer's process ended, and how.
            CheckpointError: the step could not be saved, or the reference can't be used; as above.
            RunFolderError: the trajectories can't be written, and nothing was trained; or they
                are there and the step was learned, but its metrics can't be written.
        """
        run = self._run(model)
        async with run.training:
            self._run(model)  # it may have been closed while this call waited
            return await run.train(groups, config, bookmark)

    async def train_sft(
        self,
        model: TrainableModel,
        trajectories: Sequence[Trajectory],
        config: TrainSFTConfig,
        *,
        bookmark: Bookmark | None = None,
    ) -> TrainResult:
        """As `Backend.train_sft`; writes metrics of the split "sft". Cancelled, as `train`.

        Raises:
            NoTrainableTokens: every trajectory is left out.
            ConfigError: there are more or fewer learning rates than optimizer steps.
            NotEnoughMemory, TrainingError, CheckpointError, RunFolderError: as `train`.
        """
        run = self._run(model)
        async with run.training:
            self._run(model)
            return await run.train_sft(trajectories, config, bookmark)

    async def sft_loss(
        self, model: TrainableModel, trajectories: Sequence[Trajectory], config: TrainSFTConfig
    ) -> float:
        """As `Backend.sft_loss`.

        Raises:
            NoTrainableTokens: every trajectory is left out.
        """
        return await self._run(model).sft_loss(trajectories, config)

    async def bookmarks(self, model: TrainableModel) -> dict[str, dict[str, Any]]:
        """As `Backend.bookmarks`."""
        return dict(self._run(model).bookmarks)

    async def set_bookmark(self, model: TrainableModel, bookmark: Bookmark) -> None:
        """As `Backend.set_bookmark`."""
        run = self._run(model)
        async with run.training:
            run.mark(bookmark)

    async def join(self, model: TrainableModel, trajectories: Sequence[Trajectory]) -> None:
        """As `Backend.join`; prompts that a server sent no ids of are rendered."""
        await self._run(model).join(trajectories)

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
        await asyncio.to_thread(log_step, run.folder, split, at, groups, metrics)

    async def delete_checkpoints(self, model: TrainableModel, *, best_metric: str) -> list[int]:
        """As `Backend.delete_checkpoints`."""
        run = self._run(model)
        gone = await asyncio.to_thread(
            checkpoints.delete_all_but_best, run.folder, best_metric, in_use=[run.step]
        )
        await self.forget(model, gone)
        return gone

    async def close(self) -> None:
        """As `Backend.close`; a step under way is stopped."""
        runs, self._runs = list(self._runs.values()), {}
        bases, self._bases = list(self._bases.values()), {}
        for run in runs:
            run.stop()
        try:
            for base in bases:
                await base.close()
        finally:
            for run in runs:
                _close(run.folder)

    def _run(self, model: TrainableModel) -> LiveRun:
        run = self._runs.get(_key(model))
        if run is None:
            raise ModelNotRegistered(
                f"model {model.name!r} is not registered with this backend",
                fix="First: await model.register(backend).",
            )
        return run

    async def _open(self, model: TrainableModel) -> LiveRun:
        path = await asyncio.to_thread(resolve_base_model, model.base_model, progress=_log.info)
        known = self._bases.get(str(path))
        self._check_name(model, known)
        _check_module(model, known)
        if known is None:
            await asyncio.to_thread(check_before_loading, path)
        folder = await asyncio.to_thread(
            RunDir.open,
            model.base_path,
            model.project,
            model.name,
            base_model=model.base_model,
            config=model.art_config.model_dump(mode="json"),
        )
        atexit.register(folder.close)  # a script's end is no crash
        base = known
        try:
            if base is None:
                base = await asyncio.to_thread(
                    ServedBase.open,
                    model.base_model,
                    path,
                    folder.path,
                    model.art_config,
                    listens=self._endpoint is None,
                )
            run = await LiveRun.load(
                model,
                folder,
                base,
                adapter=f"live{next(self._adapters)}",
                show_progress=self._show_progress,
                on_progress=self._on_progress,
            )
        except BaseException:
            if base is not None and known is None:
                await base.close()
            _close(folder)
            raise
        self._bases[str(path)] = base
        return run

    def _check_name(self, model: TrainableModel, base: ServedBase | None) -> None:
        """A name stands for one policy at an endpoint."""
        if model.name in (model.base_model, base and base.base_model):
            raise ConfigError(
                "a model has the name of its base model",
                got=model.name,
                expected="a name of its own",
                fix="Rename the model.",
            )
        for other in self._runs.values():
            if other.base is base and other.model.name == model.name:
                raise ConfigError(
                    "two projects serve a model under one name",
                    got=f"{model.name!r} of {model.project!r} and {other.model.project!r}",
                    expected="a name of its own for each model on a base model",
                    fix="Rename one, or use a LocalBackend for each.",
                )


def _latest(run: RunDir) -> checkpoints.Checkpoint:
    found = checkpoints.latest(run)
    if found is None:
        raise CheckpointError(
            f"model {run.name!r} of project {run.project!r} has no checkpoint",
            fix="Check both names.",
        )
    return found


def _close(folder: RunDir) -> None:
    folder.close()
    atexit.unregister(folder.close)


def _check_same(known: TrainableModel, model: TrainableModel) -> None:
    """A model registered again is the one that is served."""
    for name in ("base_model", "art_config"):
        old, new = getattr(known, name), getattr(model, name)
        if old != new:
            raise ConfigError(
                f"model {model.name!r} is registered with another {name}",
                got=new,
                expected=repr(old),
                fix="Close the backend first, or give the model another name.",
            )


def _check_module(model: TrainableModel, base: ServedBase | None) -> None:
    """Models on one base model are trained in one module."""
    if base is None:
        return
    for name in ("load_in_4bit", "layers"):
        new, old = getattr(model.art_config.trainer, name), getattr(base.trainer, name)
        if new != old:
            raise ConfigError(
                f"a base model is loaded once, with one TrainerConfig.{name}",
                got=new,
                expected=f"{old!r}, as its other models have it",
                fix="Use a LocalBackend for each.",
            )


def _key(model: TrainableModel) -> tuple[str, str]:
    return (model.project, model.name)
