"""`LocalBackend`: serves and trains in this process, through the embedded engine.

In: registered models, groups to train. Out: an OpenAI-compatible endpoint on loopback, and after
each train call a checkpoint that serves the next rollout. The order of a step is its safety:
hold calls, train, save the checkpoint, and only then serve it; a fault on the way leaves the
last whole step in the module, on disk and behind the endpoint.
"""

from __future__ import annotations

import asyncio
import atexit
import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import count
from pathlib import Path
from typing import Any, Self, TypeVar

import torch

from art_core import checkpoints
from art_core.backend import Inference, Skipped, TrainResult
from art_core.batch.rendered import render_missing_prompts
from art_core.batch.select import Selection, select
from art_core.batch.supervised import Written, written_samples
from art_core.bookmarks import Bookmark, read_bookmarks, write_bookmarks
from art_core.config import EngineConfig, TrainConfig, TrainSFTConfig
from art_core.drift import drifts
from art_core.engine.base import AdapterRef, Tokenizer
from art_core.engine.chat_service import ChatService
from art_core.engine.embedded import EmbeddedEngine
from art_core.engine.model_registry import ModelRegistry
from art_core.engine.openai_routes import create_app
from art_core.engine.serving import LoopbackServer
from art_core.engine.tokenizer import HFTokenizer
from art_core.errors import ConfigError, ModelNotRegistered, NonFiniteStep, TrainingError
from art_core.join import join_records
from art_core.model import TrainableModel
from art_core.nn.base_model import resolve_base_model
from art_core.nn.lora import LoraModel
from art_core.nn.memory import keep_freed_memory
from art_core.progress import progress
from art_core.records import RecordStore
from art_core.rundir import RunDir
from art_core.runlog import log_step, summarize
from art_core.training.sft import supervised_loss, train_supervised
from art_core.training.trainer import OnProgress, Trainer
from art_core.trajectories import Trajectory, TrajectoryGroup
from art_core.trajectory_files import write_trajectories

_log = logging.getLogger(__name__)
T = TypeVar("T")


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
    adapter: str
    """Name of its live adapter in the module."""
    step: int
    bookmarks: dict[str, dict[str, Any]]
    """As that step has them, or the next one will."""
    training: asyncio.Lock = field(default_factory=asyncio.Lock)
    """Held by the train call under way."""
    bookmark: Bookmark | None = None
    """Of the train call under way."""
    stop: threading.Event = field(default_factory=threading.Event)
    """Asks the step under way to end before its end."""
    nonfinite: int = 0
    """Steps in a row that were left out because they were not finite."""


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
        """
        if self._path is not None:
            model.base_path = self._path
        async with self._registering:
            known = self._runs.get(_key(model))
            if known is None:
                known = self._runs[_key(model)] = await self._open(model)
            _check_same(known.model, model)
            return Inference(
                base_url=known.serving.server.base_url, api_key="local", model_name=model.name
            )

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
            TrainingError: the step failed, or was not finite for the
                `config.max_nonfinite_steps`-th time in a row; the last whole step goes on serving.
            CheckpointError: the step could not be saved, or the reference can't be used; as above.
            RunFolderError: the trajectories can't be written, and nothing was trained; or they
                are there and the step was learned, but its metrics can't be written.
        """
        run = self._run(model)
        async with run.training:
            self._run(model)  # it may have been closed while this call waited
            await self.join(model, [trajectory for group in groups for trajectory in group])
            selection = select(
                groups,
                model=model.name,
                step=run.step,
                config=config,
                vocab_size=run.serving.model.vocab_size,
                context_length=run.serving.model.context_length,
                running=run.trainer.running,
            )
            reference = await asyncio.to_thread(_reference, run.run, config)
            run.stop, run.bookmark = threading.Event(), bookmark
            step = asyncio.create_task(self._step(run, groups, selection, config, reference))
            return await _to_its_end(step, run.stop)

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
            TrainingError, CheckpointError, RunFolderError: as `train`.
        """
        run = self._run(model)
        async with run.training:
            self._run(model)
            written = await self._written(run, trajectories, config)
            run.stop, run.bookmark = threading.Event(), bookmark
            step = asyncio.create_task(self._step_sft(run, written, config))
            return await _to_its_end(step, run.stop)

    async def sft_loss(
        self, model: TrainableModel, trajectories: Sequence[Trajectory], config: TrainSFTConfig
    ) -> float:
        """As `Backend.sft_loss`.

        Raises:
            NoTrainableTokens: every trajectory is left out.
        """
        run = self._run(model)
        written = await self._written(run, trajectories, config)
        return await run.serving.engine.exclusive(
            lambda module: supervised_loss(module, run.adapter, written.samples, config)
        )

    async def bookmarks(self, model: TrainableModel) -> dict[str, dict[str, Any]]:
        """As `Backend.bookmarks`."""
        return dict(self._run(model).bookmarks)

    async def set_bookmark(self, model: TrainableModel, bookmark: Bookmark) -> None:
        """As `Backend.set_bookmark`."""
        run = self._run(model)
        async with run.training:
            run.bookmarks = _marked(run.bookmarks, bookmark)

    async def join(self, model: TrainableModel, trajectories: Sequence[Trajectory]) -> None:
        """As `Backend.join`; prompts that a server sent no ids of are rendered."""
        serving = self._run(model).serving
        await asyncio.to_thread(join_records, trajectories, serving.service.records)
        await asyncio.to_thread(
            render_missing_prompts, trajectories, serving.engine.tokenizer, model=model.name
        )

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
        """As `Backend.close`; a step under way is stopped."""
        runs, self._runs = list(self._runs.values()), {}
        servings, self._servings = list(self._servings.values()), {}
        for run in runs:
            run.stop.set()
        try:
            for serving in servings:
                await _shut(serving)
        finally:
            for run in runs:
                _close(run.run)

    def _run(self, model: TrainableModel) -> _Run:
        run = self._runs.get(_key(model))
        if run is None:
            raise ModelNotRegistered(
                f"model {model.name!r} is not registered with this backend",
                fix="First: await model.register(backend).",
            )
        return run

    async def _open(self, model: TrainableModel) -> _Run:
        path = await asyncio.to_thread(resolve_base_model, model.base_model, progress=_log.info)
        known = self._servings.get(str(path))
        self._check_name(model, known)
        folder = await asyncio.to_thread(
            RunDir.open,
            model.base_path,
            model.project,
            model.name,
            base_model=model.base_model,
            config=model.art_config.model_dump(mode="json"),
        )
        atexit.register(folder.close)  # a script's end is no crash
        serving = known
        try:
            if serving is None:
                serving = await asyncio.to_thread(
                    _serve, model.base_model, path, folder.records, model.art_config.engine
                )
            run = await self._load(model, folder, serving)
        except BaseException:
            if serving is not None and known is None:
                await _shut(serving)
            _close(folder)
            raise
        self._servings[str(path)] = serving
        return run

    def _check_name(self, model: TrainableModel, serving: _Serving | None) -> None:
        """A name stands for one policy at an endpoint."""
        if model.name in (model.base_model, serving and serving.base_model):
            raise ConfigError(
                "a model has the name of its base model",
                got=model.name,
                expected="a name of its own",
                fix="Rename the model.",
            )
        for other in self._runs.values():
            if other.serving is serving and other.model.name == model.name:
                raise ConfigError(
                    "two projects serve a model under one name",
                    got=f"{model.name!r} of {model.project!r} and {other.model.project!r}",
                    expected="a name of its own for each model on a base model",
                    fix="Rename one, or use a LocalBackend for each.",
                )

    async def _load(self, model: TrainableModel, folder: RunDir, serving: _Serving) -> _Run:
        """The latest whole checkpoint in the module and behind the endpoint; step 0 if none."""
        settings, name = model.art_config, f"live{next(self._adapters)}"
        found = await asyncio.to_thread(checkpoints.latest, folder)

        places = await asyncio.to_thread(read_bookmarks, found.path) if found else {}

        def load(module: LoraModel) -> tuple[Trainer, int]:
            module.create_adapter(name, settings.lora, seed=settings.seed)
            try:
                trainer = Trainer(module, name, seed=settings.seed)
                step = 0
                if found is None:
                    checkpoints.save(folder, 0, trainer.save)
                else:
                    trainer.load(found.path)
                    step = found.step
            except BaseException:
                module.drop_adapter(name)
                raise
            serving.engine.adopt(AdapterRef(model.name, step), name)
            return trainer, step

        trainer, step = await serving.engine.exclusive(load)
        run = _Run(model, folder, serving, trainer, name, step, places)
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

    async def _step(
        self,
        run: _Run,
        groups: Sequence[TrajectoryGroup],
        selection: Selection,
        config: TrainConfig,
        reference: Path | None,
    ) -> TrainResult:
        """Keep what was played, learn from it, keep the figures."""
        played = run.step
        means = summarize(groups) if groups else {}
        counted = await asyncio.to_thread(_drift, groups, run.serving.engine.tokenizer)
        counted |= {f"misfit/{cause}": number for cause, number in selection.misfits.items()}
        if groups:
            await asyncio.to_thread(write_trajectories, run.run, "train", played, groups)
        result = TrainResult(played, trained=False, skipped=tuple(selection.skipped))
        if selection.samples:
            result = await self._learn_or_skip(run, selection, config, reference)
        for skip in result.skipped:
            _log.info("group %d is not trained: %s", skip.group, skip.reason)
        result = replace(result, metrics=counted | result.metrics)
        figures = {
            **means,
            **result.metrics,
            "trained": result.trained,
            "skipped": len(result.skipped),
            **({"reason": result.reason} if result.reason else {}),
        }
        await asyncio.to_thread(log_step, run.run, "train", played, (), figures)
        run.bookmarks = _marked(run.bookmarks, run.bookmark)  # also where nothing was learned
        return result

    async def _learn_or_skip(
        self, run: _Run, selection: Selection, config: TrainConfig, reference: Path | None
    ) -> TrainResult:
        """A step that was not finite is left out, unless too many in a row were."""
        try:
            result = await self._learn_groups(run, selection, config, reference)
        except NonFiniteStep as error:
            run.nonfinite += 1
            if run.nonfinite >= config.max_nonfinite_steps:
                raise TrainingError(
                    f"{run.nonfinite} steps in a row were not finite; the last: {error}",
                    fix=f"Step {run.step} goes on serving.",
                ) from error
            _log.warning("the step is left out, first at %s: %s", error.tensor, error)
            return TrainResult(
                run.step,
                trained=False,
                metrics={"nonfinite_steps": run.nonfinite},
                skipped=tuple(selection.skipped),
                reason=f"{error.tensor}: {error}",
            )
        run.nonfinite = 0
        return result

    async def _learn_groups(
        self, run: _Run, selection: Selection, config: TrainConfig, reference: Path | None
    ) -> TrainResult:
        rate = config.learning_rate * selection.share**config.trained_share_power
        config = config.model_copy(update={"learning_rate": rate})

        def train(tell: OnProgress) -> dict[str, float]:
            metrics = run.trainer.step(
                selection.samples, config, reference=reference, on_progress=tell
            )
            run.trainer.running = selection.running
            return {**metrics, "groups_trained": selection.groups, "learning_rate": rate}

        return await self._learn(run, train, skipped=tuple(selection.skipped))

    async def _step_sft(self, run: _Run, written: Written, config: TrainSFTConfig) -> TrainResult:
        """Learn from what was written, keep the figures."""
        before = run.step
        batches = written.batches(config.rows_per_step)
        for row, why in written.left_out.items():
            _log.info("trajectory %d is not trained: %s", row, why)
        for text, number in written.warnings.items():
            _log.warning("ignored: %s (%d times)", text, number)

        def train(tell: OnProgress) -> dict[str, float]:
            metrics = train_supervised(run.trainer, batches, config, on_progress=tell)
            return {**metrics, **written.figures}

        skipped = tuple(Skipped(row, why, 1) for row, why in written.left_out.items())
        result = await self._learn(run, train, skipped=skipped)
        await asyncio.to_thread(log_step, run.run, "sft", before, (), result.metrics)
        return result

    async def _written(
        self, run: _Run, trajectories: Sequence[Trajectory], config: TrainSFTConfig
    ) -> Written:
        """The answers of `trajectories` as samples."""
        if any(trajectory.calls for trajectory in trajectories):
            await self.join(run.model, trajectories)
        longest = run.serving.engine.context_length
        return await asyncio.to_thread(
            written_samples,
            trajectories,
            run.serving.engine.tokenizer,
            model=run.model.name,
            max_length=min(config.max_length or longest, longest),
            too_long=config.too_long,
        )

    async def _learn(
        self,
        run: _Run,
        train: Callable[[OnProgress], dict[str, float]],
        *,
        skipped: tuple[Skipped, ...],
    ) -> TrainResult:
        """Train, save, serve.

        Args:
            train: runs on the engine's owner thread; what it changes is undone if it raises.
        """
        step = run.step + 1
        begun = time.perf_counter()
        stop = run.stop
        places = _marked(run.bookmarks, run.bookmark)

        def save(folder: Path) -> None:
            run.trainer.save(folder)
            write_bookmarks(folder, places)

        def learn(module: LoraModel) -> tuple[dict[str, float], Path]:
            with run.trainer.undone_on_error(), progress("train", shown=self._show_progress) as bar:

                def tell(done: int, total: int) -> None:
                    if stop.is_set():
                        raise TrainingError(
                            "the step was stopped before its end",
                            fix="Nothing has changed; the same groups can be trained again.",
                        )
                    bar.show(done, total, "positions")

                metrics = train(tell)
                path = checkpoints.save(run.run, step, save)
            run.serving.engine.adopt(AdapterRef(run.model.name, step), run.adapter)
            run.step, run.bookmarks = step, places
            return metrics, path

        run.serving.service.gate.hold()
        try:
            metrics, path = await run.serving.engine.exclusive(learn)
            await self._serve_step(run, step)
        finally:
            run.serving.service.gate.release()
        return TrainResult(
            step=step,
            trained=True,
            metrics={**metrics, "step_seconds": time.perf_counter() - begun},
            skipped=skipped,
            checkpoint_path=str(path),
        )


def _drift(groups: Sequence[TrajectoryGroup], tokenizer: Tokenizer) -> dict[str, float]:
    """Calls that drifted, in all and by cause; of each cause the first is shown."""
    found = [d for group in groups for t in group for d in drifts(t.calls, tokenizer.decode)]
    causes = Counter(drift.cause for drift in found)
    for cause, number in causes.items():
        first = next(drift for drift in found if drift.cause == cause)
        _log.warning("%d calls drifted from the history they appended to: %s", number, first)
    return {"drift": len(found), **{f"drift/{cause}": n for cause, n in causes.items()}}


async def _to_its_end(task: asyncio.Task[T], stop: threading.Event) -> T:
    """Await `task`. A cancellation asks it to stop, and is raised when it has ended."""
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        stop.set()
        await asyncio.wait({task})
        if not task.cancelled() and task.exception() is not None:
            _log.info("a cancelled step ended: %s", task.exception())
        raise


def _serve(name: str, path: Path, records: Path, config: EngineConfig) -> _Serving:
    """Load the base model and open its endpoint."""
    keep_freed_memory()
    torch.set_flush_denormal(True)
    model = LoraModel.load(path)
    tokenizer = HFTokenizer(path)
    store = RecordStore(records)
    engine = EmbeddedEngine(model, tokenizer, base_model=name, config=config)
    service = ChatService(engine, store, ModelRegistry(name))
    try:
        server = LoopbackServer(create_app(service)).start()
    except BaseException:
        asyncio.run(engine.close())
        store.close()
        raise
    return _Serving(name, model, engine, service, server)


async def _shut(serving: _Serving) -> None:
    """Stop answering: first the endpoint, then what stands behind it."""
    try:
        await asyncio.to_thread(serving.server.stop)
    finally:
        await serving.engine.close()
        serving.service.records.close()


def _reference(run: RunDir, config: TrainConfig) -> Path | None:
    """Folder of the policy that the KL holds to; None: the base model, or there is no KL."""
    if not config.kl_penalty_coef:
        return None
    if config.kl_ref_adapter_path is not None:
        return Path(config.kl_ref_adapter_path)
    if config.kl_penalty_reference_step is not None:
        return checkpoints.find(run, config.kl_penalty_reference_step).path
    return None


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


def _marked(
    places: dict[str, dict[str, Any]], bookmark: Bookmark | None
) -> dict[str, dict[str, Any]]:
    return places if bookmark is None else {**places, bookmark.name: bookmark.place}


def _key(model: TrainableModel) -> tuple[str, str]:
    return (model.project, model.name)
