"""Where the trained module is, and its turn with the engine: what reads or changes it runs alone.

In: requests of training/requests.py. Out: their answers. Two kinds: beside the embedded engine,
which samples from the very module, and beside vLLM, where the module only trains, in a process of
its own. What differs between them is here, so that a step (live_run.py) need not know.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Protocol, TypeVar

from art_core.batch.probe import Probe
from art_core.engine.base import AdapterRef
from art_core.engine.embedded import EmbeddedEngine
from art_core.engine.swap_proof import Verdict, prove_swap
from art_core.engine.vllm import VllmEngine
from art_core.engine.vllm_adapters import to_its_end
from art_core.errors import EngineError
from art_core.local.workbench_apart import WorkbenchApart
from art_core.step_times import PREFIX
from art_core.training.out_of_memory import is_out_of_memory
from art_core.training.requests import Learned, Lesson, Loaded, Opened, Opening, Question
from art_core.training.watch import OnProgress
from art_core.training.workbench import Workbench

_log = logging.getLogger(__name__)
T = TypeVar("T")


class Bench(Protocol):
    """One module, one request at a time. Errors are those of `Workbench`."""

    loaded: Loaded
    wants_probe: bool
    """A new step has to be proved to answer."""
    gives_way: bool
    """The engine has no memory of the device while a step is learned."""

    async def open(self, opening: Opening, ref: AdapterRef) -> Opened:
        """Put an adapter into the module; it is `ref`. An engine that has a module of its own goes
        on answering."""
        ...

    async def learn(
        self, lesson: Lesson, ref: AdapterRef, on_progress: OnProgress, stop: threading.Event
    ) -> Learned:
        """A step, which is `ref` then; with what it waited for, among its metrics."""
        ...

    async def loss(self, question: Question) -> float:
        """A loss; the engine goes on as in `open`."""
        ...

    async def prove(
        self, old: AdapterRef, new: AdapterRef, probe: Probe | None
    ) -> dict[str, float]:
        """Make sure that `new`, which the engine was given, is what will answer; figures of it.

        Raises:
            EngineError: other weights answer.
        """
        ...

    def close(self) -> None:
        """No more work comes."""
        ...


class EmbeddedBench:
    """The module that the embedded engine samples from: what was trained is what answers. So it is
    in this process, and a crash in a step takes serving along."""

    wants_probe = gives_way = False

    def __init__(self, engine: EmbeddedEngine, workbench: Workbench) -> None:
        self._engine, self._workbench = engine, workbench
        self.loaded = workbench.loaded

    async def open(self, opening: Opening, ref: AdapterRef) -> Opened:
        def work() -> Opened:
            opened = self._workbench.open(opening)
            self._engine.adopt(ref, opening.adapter)
            return opened

        return await self._alone(work)

    async def learn(
        self, lesson: Lesson, ref: AdapterRef, on_progress: OnProgress, stop: threading.Event
    ) -> Learned:
        begun = time.perf_counter()

        def work() -> tuple[Learned, float]:
            learned = self._workbench.learn(lesson, on_progress, stop)
            self._engine.adopt(ref, lesson.adapter)
            return learned, time.perf_counter()

        return _with_waits(*await self._alone(work), begun=begun)

    async def loss(self, question: Question) -> float:
        return await self._alone(lambda: self._workbench.loss(question))

    async def prove(
        self, old: AdapterRef, new: AdapterRef, probe: Probe | None
    ) -> dict[str, float]:
        return {}

    def close(self) -> None:
        """The engine owns the thread."""
        self._workbench.close()

    async def _alone(self, work: Callable[[], T]) -> T:
        return await self._engine.exclusive(lambda _: work())


class OwnBench:
    """A module that only trains, in a process of its own, beside vLLM.

    Args:
        sleeps: both share a GPU: vLLM gives its memory back while a step is learned.
    """

    wants_probe = True

    def __init__(self, workbench: WorkbenchApart, engine: VllmEngine, *, sleeps: bool) -> None:
        self._workbench, self._engine = workbench, engine
        self.loaded, self.gives_way = workbench.loaded, sleeps
        self._thread = ThreadPoolExecutor(1, "art-trainer")
        self._turn = asyncio.Lock()

    async def open(self, opening: Opening, ref: AdapterRef) -> Opened:
        """As `Bench.open`; where memory is too little, with vLLM asleep after all."""
        return await to_its_end(self._alone(lambda: self._workbench.open(opening), awake=True))

    async def learn(
        self, lesson: Lesson, ref: AdapterRef, on_progress: OnProgress, stop: threading.Event
    ) -> Learned:
        begun = time.perf_counter()

        def work() -> tuple[Learned, float]:
            return self._workbench.learn(lesson, on_progress, stop), time.perf_counter()

        done = await to_its_end(self._alone(work, awake=not self.gives_way))
        return _with_waits(*done, begun=begun)

    async def loss(self, question: Question) -> float:
        """As `Bench.loss`; memory as in `open`."""
        return await to_its_end(self._alone(lambda: self._workbench.loss(question), awake=True))

    async def _alone(self, work: Callable[[], T], *, awake: bool) -> T:
        async with self._turn:
            if awake:
                try:
                    return await self._run(work)
                except Exception as error:
                    if not self.gives_way or not is_out_of_memory(error):
                        raise
                    _log.info("vLLM sleeps after all: %s", error)
            async with self._engine.asleep():
                self._workbench.gives_back = True  # before vLLM wakes
                try:
                    return await self._run(work)
                finally:
                    self._workbench.gives_back = False

    async def _run(self, work: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._thread, work)

    async def prove(
        self, old: AdapterRef, new: AdapterRef, probe: Probe | None
    ) -> dict[str, float]:
        if probe is None:
            return {}
        try:
            verdict = await prove_swap(self._engine, old, new, probe)
        except EngineError as error:
            _log.warning("%s is loaded once more: %s", new, error)
            self._engine.shelf.renew(new)
            verdict = await prove_swap(self._engine, old, new, probe)
        return _figures(verdict)

    def close(self) -> None:
        self._thread.shutdown()
        self._workbench.close()


def _with_waits(learned: Learned, ended: float, *, begun: float) -> Learned:
    """With the seconds before the lesson and after it: until nothing else computed and vLLM slept,
    until it woke."""
    waits = {
        f"{PREFIX}wait": max(0.0, ended - begun - learned.seconds),
        f"{PREFIX}wake": time.perf_counter() - ended,
    }
    return replace(learned, metrics={**learned.metrics, **waits})


def _figures(verdict: Verdict) -> dict[str, float]:
    _log.info("the swap is %s: %s", verdict.outcome, verdict)
    return {
        "swap/proved": float(verdict.outcome == "proved"),
        "swap/slope": verdict.slope,
        "swap/slope_error": verdict.error,
        "swap/moved": verdict.moved,
        "swap/noise": verdict.noise,
    }
