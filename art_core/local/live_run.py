"""A registered model whose steps are made here: its adapter on the bench, its folder, its steps.

In: groups or conversations to learn from. Out: a step learned, saved, and only then served; and
what was played, kept. The order of a step is its safety: hold calls, train, save the checkpoint,
serve it; a fault on the way leaves the last whole step in the module, on disk and behind the
endpoint.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Self, TypeAlias, TypeVar

from art_core import checkpoints
from art_core.backend import Skipped, TrainResult
from art_core.batch.probe import Probe
from art_core.batch.rendered import render_missing_prompts
from art_core.batch.sample import Sample
from art_core.batch.select import Selection, select
from art_core.batch.supervised import Written, written_samples
from art_core.bookmarks import Bookmark, read_bookmarks
from art_core.config import TrainConfig, TrainSFTConfig
from art_core.drift import drifts
from art_core.engine.base import AdapterRef, Tokenizer
from art_core.errors import NonFiniteStep, TrainingError
from art_core.join import join_records
from art_core.local.served_base import ServedBase
from art_core.model import TrainableModel
from art_core.progress import progress
from art_core.rundir import RunDir
from art_core.runlog import log_step, summarize
from art_core.step_times import gather_seconds, told
from art_core.training.phases import Phases
from art_core.training.requests import Learned, Lesson, Opening, Question
from art_core.trajectories import Trajectory, TrajectoryGroup
from art_core.trajectory_files import write_trajectories

_log = logging.getLogger(__name__)
T = TypeVar("T")
OnStepProgress: TypeAlias = "Callable[[TrainableModel, int, int], None]"
"""Is told of a model's step: positions that are done, and all of them."""


@dataclass
class LiveRun:
    """Made by `load`. One train call at a time: the caller holds `training`."""

    model: TrainableModel
    folder: RunDir
    base: ServedBase
    adapter: str
    """Name of its live adapter in the module."""
    step: int
    running: float
    """The running baseline of that step; see `TrainConfig.baseline`."""
    bookmarks: dict[str, dict[str, Any]]
    """As that step has them, or the next one will."""
    show_progress: bool
    on_progress: OnStepProgress | None = None
    training: asyncio.Lock = field(default_factory=asyncio.Lock)
    """Held by the train call under way."""
    _bookmark: Bookmark | None = None
    """Of the train call under way."""
    _stop: threading.Event = field(default_factory=threading.Event)
    """Asks the step under way to end before its end."""
    _nonfinite: int = 0
    """Steps in a row that were left out because they were not finite."""

    @classmethod
    async def load(
        cls,
        model: TrainableModel,
        folder: RunDir,
        base: ServedBase,
        *,
        adapter: str,
        show_progress: bool,
        on_progress: OnStepProgress | None = None,
    ) -> Self:
        """The latest whole checkpoint in the module, and all of them behind the endpoint; step 0
        if there is none.

        Raises:
            CheckpointError: the latest one does not fit `art_config.lora`.
        """
        settings = model.art_config
        found = await asyncio.to_thread(checkpoints.latest, folder)
        places = await asyncio.to_thread(read_bookmarks, found.path) if found else {}
        step = found.step if found else 0
        opening = Opening(
            adapter=adapter,
            lora=settings.lora,
            seed=settings.seed,
            optimizer=settings.trainer.optimizer,
            checkpoints=folder.checkpoints,
            checkpoint=found.path if found else None,
            gives_way=base.bench.gives_way,
        )
        opened = await base.bench.open(opening, AdapterRef(model.name, step))
        run = cls(
            model, folder, base, adapter, step, opened.running, places, show_progress, on_progress
        )
        for saved in checkpoints.steps(folder):
            if saved <= step:
                await run._serve(saved)
        return run

    # What a backend is asked for

    async def train(
        self, groups: Sequence[TrajectoryGroup], config: TrainConfig, bookmark: Bookmark | None
    ) -> TrainResult:
        """As `Backend.train`."""
        phases = Phases()
        with phases.of("select"):
            selection = await self._selected(groups, config)
        reference = await asyncio.to_thread(_reference, self.folder, config)
        self._stop, self._bookmark = threading.Event(), bookmark
        step = asyncio.create_task(self._step(groups, selection, config, reference, phases))
        return await _to_its_end(step, self._stop)

    async def _selected(self, groups: Sequence[TrajectoryGroup], config: TrainConfig) -> Selection:
        """What of the groups is trained."""
        await self.join([trajectory for group in groups for trajectory in group])
        return select(
            groups,
            model=self.model.name,
            step=self.step,
            config=config,
            vocab_size=self.base.bench.loaded.vocab_size,
            context_length=self.base.bench.loaded.context_length,
            running=self.running,
        )

    async def train_sft(
        self,
        trajectories: Sequence[Trajectory],
        config: TrainSFTConfig,
        bookmark: Bookmark | None,
    ) -> TrainResult:
        """As `Backend.train_sft`."""
        written = await self._written(trajectories, config)
        self._stop, self._bookmark = threading.Event(), bookmark
        step = asyncio.create_task(self._step_sft(written, config))
        return await _to_its_end(step, self._stop)

    async def adopt(self, adapter: Path) -> TrainResult:
        """Go on from the adapter in a folder, as the next step.

        Raises:
            CheckpointError: it does not fit this model; nothing has changed.
        """
        self._stop, self._bookmark = threading.Event(), None
        lesson = replace(self._lesson((), TrainConfig()), adopted=adapter)
        step = asyncio.create_task(self._learn(lesson, {}, skipped=()))
        return await _to_its_end(step, self._stop)

    async def sft_loss(self, trajectories: Sequence[Trajectory], config: TrainSFTConfig) -> float:
        """As `Backend.sft_loss`."""
        written = await self._written(trajectories, config)
        return await self.base.bench.loss(Question(self.adapter, written.samples, config))

    async def join(self, trajectories: Sequence[Trajectory]) -> None:
        """As `Backend.join`; prompts that a server sent no ids of are rendered."""
        await asyncio.to_thread(join_records, trajectories, self.base.service.records)
        await asyncio.to_thread(
            render_missing_prompts, trajectories, self.base.engine.tokenizer, model=self.model.name
        )

    async def forget(self, step: int) -> None:
        """Serve that step no more."""
        self.base.service.models.retire(self.model.name, step)
        await self.base.engine.unload_adapter(AdapterRef(self.model.name, step))

    def mark(self, bookmark: Bookmark | None) -> None:
        """Keep a place with the next step."""
        self.bookmarks = _marked(self.bookmarks, bookmark)

    def stop(self) -> None:
        """Ask the step under way to end before its end."""
        self._stop.set()

    # A step

    async def _step(
        self,
        groups: Sequence[TrajectoryGroup],
        selection: Selection,
        config: TrainConfig,
        reference: Path | None,
        phases: Phases,
    ) -> TrainResult:
        """Keep what was played, learn from it, keep the figures."""
        played = self.step
        means = summarize(groups) if groups else {}
        counted = await asyncio.to_thread(_drift, groups, self.base.engine.tokenizer)
        counted |= {f"misfit/{cause}": number for cause, number in selection.misfits.items()}
        if groups:
            await asyncio.to_thread(write_trajectories, self.folder, "train", played, groups)
        result = TrainResult(played, trained=False, skipped=tuple(selection.skipped))
        if selection.samples:
            result = await self._or_skipped(
                self._learn_groups(selection, config, reference),
                config.max_nonfinite_steps,
                result.skipped,
            )
        for skip in result.skipped:
            _log.info("not trained, of group %d: %s", skip.group, skip.reason)
        times = phases.figures() | gather_seconds(groups) if result.trained else {}
        result = replace(result, metrics=counted | times | result.metrics)
        if result.trained:
            _log.info("step %d: %s", result.step, told(result.metrics))
        figures = {
            **means,
            **result.metrics,
            **_outcome(result),
            "groups_skipped": sum(skip.trajectory is None for skip in result.skipped),
            "trajectories_skipped": sum(skip.trajectories for skip in result.skipped),
        }
        await asyncio.to_thread(log_step, self.folder, "train", played, (), figures)
        self.mark(self._bookmark)  # also where nothing was learned
        return result

    async def _or_skipped(
        self, learning: Awaitable[TrainResult], allowed: int, skipped: tuple[Skipped, ...]
    ) -> TrainResult:
        """A step that was not finite is left out, unless `allowed` in a row were."""
        try:
            result = await learning
        except NonFiniteStep as error:
            self._nonfinite += 1
            if self._nonfinite >= allowed:
                raise TrainingError(
                    f"{self._nonfinite} steps in a row were not finite; the last: {error}",
                    fix=f"Step {self.step} goes on serving.",
                ) from error
            _log.warning("the step is left out, first at %s: %s", error.tensor, error)
            return TrainResult(
                self.step,
                trained=False,
                metrics={"nonfinite_steps": self._nonfinite},
                skipped=skipped,
                reason=f"{error.tensor}: {error}",
            )
        self._nonfinite = 0
        return result

    async def _learn_groups(
        self, selection: Selection, config: TrainConfig, reference: Path | None
    ) -> TrainResult:
        rate = config.learning_rate * selection.share**config.trained_share_power
        lesson = self._lesson(
            [selection.samples],
            config.model_copy(update={"learning_rate": rate}),
            reference=reference,
            running=selection.running,
        )
        figures = {"groups_trained": selection.groups, "learning_rate": rate}
        return await self._learn(lesson, figures, skipped=tuple(selection.skipped))

    async def _step_sft(self, written: Written, config: TrainSFTConfig) -> TrainResult:
        """Learn from what was written, keep the figures."""
        before = self.step
        batches = written.batches(config.rows_per_step)
        for row, why in written.left_out.items():
            _log.info("trajectory %d is not trained: %s", row, why)
        for text, number in written.warnings.items():
            _log.warning("ignored: %s (%d times)", text, number)
        skipped = tuple(Skipped(row, why, 1) for row, why in written.left_out.items())
        result = await self._or_skipped(
            self._learn(self._lesson(batches, config), written.figures, skipped=skipped),
            config.max_nonfinite_steps,
            skipped,
        )
        figures = {**result.metrics, **_outcome(result)}
        await asyncio.to_thread(log_step, self.folder, "sft", before, (), figures)
        self.mark(self._bookmark)  # also where nothing was learned
        return result

    async def _written(self, trajectories: Sequence[Trajectory], config: TrainSFTConfig) -> Written:
        """The answers of `trajectories` as samples."""
        if any(trajectory.calls for trajectory in trajectories):
            await self.join(trajectories)
        longest = self.base.engine.context_length
        return await asyncio.to_thread(
            written_samples,
            trajectories,
            self.base.engine.tokenizer,
            model=self.model.name,
            max_length=min(config.max_length or longest, longest),
            too_long=config.too_long,
        )

    def _lesson(
        self,
        batches: Sequence[Sequence[Sample]],
        config: TrainConfig | TrainSFTConfig,
        *,
        reference: Path | None = None,
        running: float | None = None,
    ) -> Lesson:
        """The next step."""
        bench = self.base.bench
        return Lesson(
            adapter=self.adapter,
            step=self.step + 1,
            checkpoints=self.folder.checkpoints,
            batches=batches,
            config=config,
            reference=reference,
            running=running,
            bookmarks=_marked(self.bookmarks, self._bookmark),
            probe_within=self.base.engine.context_length if bench.wants_probe else None,
        )

    async def _learn(
        self, lesson: Lesson, figures: dict[str, float], *, skipped: tuple[Skipped, ...]
    ) -> TrainResult:
        """Train, save, serve.

        Args:
            figures: to be among the step's.
        """
        begun, phases = time.perf_counter(), Phases()
        self.base.service.gate.hold()
        try:
            learned = await self._learned(lesson)
            self.step, self.bookmarks = lesson.step, dict(lesson.bookmarks)
            self.running = learned.running
            metrics = {**learned.metrics, **figures}
            with phases.of("swap"):
                metrics |= await self._serve(self.step, learned.probe)
        finally:
            self.base.service.gate.release()
        return TrainResult(
            step=self.step,
            trained=True,
            metrics={**metrics, **phases.figures(), "step_seconds": time.perf_counter() - begun},
            skipped=skipped,
            checkpoint_path=str(learned.path),
        )

    async def _learned(self, lesson: Lesson) -> Learned:
        """Train and save, and show how far it is."""
        ref = AdapterRef(self.model.name, lesson.step)
        with progress("train", shown=self.show_progress) as bar:

            def tell(done: int, total: int) -> None:
                bar.show(done, total, "positions")
                if self.on_progress is not None:
                    self.on_progress(self.model, done, total)

            learned = await self.base.bench.learn(lesson, ref, tell, self._stop)
            done = int(learned.metrics["tokens_computed"])
            bar.show(done, done, told(learned.metrics))
            return learned

    async def _serve(self, step: int, probe: Probe | None = None) -> dict[str, float]:
        """Make a saved step answer, once it is proved that it is what answers; figures of that.

        Args:
            probe: of the step before and this one.
        """
        name, settings = self.model.name, self.model.art_config
        ref = AdapterRef(name, step)
        path = self.folder.checkpoints / checkpoints.folder_name(step)
        await self.base.engine.load_adapter(ref, path)
        figures = await self.base.bench.prove(AdapterRef(name, step - 1), ref, probe)
        self.base.service.models.publish(name, step, seed=settings.seed, sampling=settings.sampling)
        return figures


def _drift(groups: Sequence[TrajectoryGroup], tokenizer: Tokenizer) -> dict[str, float]:
    """Calls that drifted, in all and by cause; of each cause the first is shown."""
    found = [d for group in groups for t in group for d in drifts(t.calls, tokenizer.decode)]
    causes = Counter(drift.cause for drift in found)
    for cause, number in causes.items():
        first = next(drift for drift in found if drift.cause == cause)
        _log.warning("%d calls drifted from the history they appended to: %s", number, first)
    return {"drift": len(found), **{f"drift/{cause}": n for cause, n in causes.items()}}


def _outcome(result: TrainResult) -> dict[str, Any]:
    """For the log: whether something was learned, and why not."""
    return {"trained": result.trained, **({"reason": result.reason} if result.reason else {})}


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


def _reference(run: RunDir, config: TrainConfig) -> Path | None:
    """Folder of the policy that the KL holds to; None: the base model, or there is no KL."""
    if not config.kl_penalty_coef:
        return None
    if config.kl_ref_adapter_path is not None:
        return Path(config.kl_ref_adapter_path)
    if config.kl_penalty_reference_step is not None:
        return checkpoints.find(run, config.kl_penalty_reference_step).path
    return None


def _marked(
    places: dict[str, dict[str, Any]], bookmark: Bookmark | None
) -> dict[str, dict[str, Any]]:
    return places if bookmark is None else {**places, bookmark.name: bookmark.place}
