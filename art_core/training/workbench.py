"""The trained module with the trainers of its adapters: does what requests.py names, one at a time.

In: requests. Out: adapters opened, steps learned and saved, losses; or an error, and nothing has
changed. It runs in this process beside the embedded engine, which samples from the very module, and
in a process of its own beside vLLM (apart.py); it does not know which.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from weakref import WeakSet

import torch

from art_core.batch.probe import Probe
from art_core.bookmarks import write_bookmarks
from art_core.checkpoints import save_into
from art_core.config import TrainSFTConfig
from art_core.errors import BaseModelError
from art_core.nn.lora import LoraModel
from art_core.readiness.memory import embedded_engine
from art_core.readiness.shape import shape_of
from art_core.readiness.step_memory import MOMENTS, SINGLE
from art_core.training.canary import watch_canary
from art_core.training.foretold import foretell
from art_core.training.out_of_memory import is_out_of_memory
from art_core.training.phases import Phases
from art_core.training.requests import Learned, Lesson, Loaded, Loading, Opened, Opening, Question
from art_core.training.sft import supervised_loss, train_supervised
from art_core.training.trainer import Trainer
from art_core.training.watch import OnProgress, stopped

_log = logging.getLogger(__name__)


def load_module(loading: Loading) -> LoraModel:
    """The base model in memory.

    Raises:
        BaseModelError: it is damaged, or of a kind that can't be used.
        ConfigError: 4 bits or Unsloth's layers are asked for, and can't be had here.
    """
    return LoraModel.load(
        loading.path,
        dtype=torch.bfloat16 if loading.on_gpu else torch.float32,
        device="cuda" if loading.on_gpu else "cpu",
        four_bit=loading.four_bit,
        layers=loading.layers,
    )


class Workbench:
    """Every method runs on the module's owner thread.

    Args:
        cached: positions of keys and values that an engine may keep in this process.
    """

    def __init__(self, module: LoraModel, *, cached: int = 0) -> None:
        self._module = module
        self._trainers: dict[str, Trainer] = {}
        self._beside = _engine_beside(module, cached)
        self._weights = module.base_bytes + module.copied_bytes
        self.loaded = Loaded(
            vocab_size=module.vocab_size,
            context_length=module.context_length,
            gpu=torch.cuda.mem_get_info(module.device) if module.device.type == "cuda" else None,
        )
        with _lock:
            _here.add(self)

    def open(self, opening: Opening) -> Opened:
        """Put an adapter into the module, one of that name away.

        Raises:
            CheckpointError: the checkpoint does not fit the settings, or step 0 can't be saved.
            ConfigError: the settings name what the base model does not have.
        """
        name = opening.adapter
        self._trainers.pop(name, None)
        self._module.drop_adapter(name)
        self._module.create_adapter(name, opening.lora, seed=opening.seed)
        try:
            trainer = Trainer(
                self._module,
                name,
                seed=opening.seed,
                optimizer=opening.optimizer,
                held=partial(self._held, name),
            )
            if opening.checkpoint is None:
                save_into(opening.checkpoints, 0, trainer.save)
            else:
                trainer.load(opening.checkpoint)
        except BaseException:
            self._module.drop_adapter(name)
            raise
        self._trainers[name] = trainer
        foretell(trainer, gives_way=opening.gives_way)
        return Opened(trainer.running)

    def learn(self, lesson: Lesson, on_progress: OnProgress, stop: threading.Event) -> Learned:
        """Train and save a step. To save is the last of it, so that what is on disk was learned
        whole, and an error has left nothing there.

        Args:
            on_progress: told positions done, and all of them.
            stop: once it is set, the step ends at its next row.

        Raises:
            As `Trainer.step`; CheckpointError: it can't be saved.
        """
        begun = time.perf_counter()
        trainer, phases = self._trainers[lesson.adapter], Phases()

        def tell(done: int, total: int) -> None:
            if stop.is_set():
                raise stopped()
            on_progress(done, total)

        def write(folder: Path) -> None:
            trainer.save(folder)
            write_bookmarks(folder, lesson.bookmarks)

        with trainer.undone_on_error():
            with phases.of("canary"):
                canary = self._canary(lesson)
            metrics = _train(trainer, lesson, tell)
            if lesson.running is not None:
                trainer.running = lesson.running
            with phases.of("canary"):
                probe = _probe(canary, lesson.step)
            with phases.of("save"):
                path = save_into(lesson.checkpoints, lesson.step, write)
        metrics |= phases.figures()
        return Learned(path, metrics, probe, trainer.running, time.perf_counter() - begun)

    def loss(self, question: Question) -> float:
        """Weighted mean loss, in nats a token; nothing changes."""
        return supervised_loss(self._module, question.adapter, question.samples, question.config)

    def close(self) -> None:
        """It is not used any more: its base model leaves memory when nobody holds it."""
        with _lock:
            _here.discard(self)

    def _canary(self, lesson: Lesson) -> Callable[[], Probe | None]:
        longest = lesson.probe_within
        watched = () if longest is None else lesson.samples
        return watch_canary(self._module, lesson.adapter, watched, longest=longest or 0)

    def _held(self, adapter: str) -> dict[str, int]:
        """Bytes that this process keeps on a processor beside a step of `adapter`; on a GPU they
        are looked up."""
        if self._module.device.type == "cuda":
            return {}
        with _lock:
            benches = list(_here)
        found = Counter(self._beside)
        for other in benches:
            if other is not self:
                found["other base models"] += other._weights
                found["keys and values"] += other._beside.get("keys and values", 0)
        for name in self._module.adapters():
            if name != adapter:
                each = SINGLE + MOMENTS if name in self._trainers else SINGLE
                found["other adapters"] += each * self._module.numbers_of(name)
        return dict(found)


_here: WeakSet[Workbench] = WeakSet()
"""All in this process: their base models are in the memory that a step of one has."""
_lock = threading.Lock()


def _engine_beside(module: LoraModel, cached: int) -> dict[str, int]:
    """Bytes of an engine on a processor, and of the program; none where no estimate is known."""
    try:
        return embedded_engine(shape_of(module.config.to_dict()), cached)
    except BaseModelError:
        return {}


def _train(trainer: Trainer, lesson: Lesson, tell: OnProgress) -> dict[str, float]:
    if lesson.adopted is not None:
        trainer.load(lesson.adopted)
        return {"tokens_computed": 0.0}
    if isinstance(lesson.config, TrainSFTConfig):
        return train_supervised(trainer, lesson.batches, lesson.config, on_progress=tell)
    return trainer.step(lesson.samples, lesson.config, reference=lesson.reference, on_progress=tell)


def _probe(canary: Callable[[], Probe | None], step: int) -> Probe | None:
    """What proves that `step` answers; want of memory is no reason to lose what was learned."""
    try:
        return canary()
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        _log.warning("step %d is served without a proof that it answers: %s", step, error)
        return None
