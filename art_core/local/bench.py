"""Where the trained module is: whatever reads or changes it runs here, alone.

In: work on a `LoraModel`. Out: what the work returns. Two kinds: the embedded engine, which samples
from the very module, and `OwnBench`, whose module only trains while vLLM answers. What differs
between them is here, so that a step (live_run.py) need not know.
"""

from __future__ import annotations

import asyncio
import functools
import logging
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Protocol, TypeVar

import torch

from art_core.batch.probe import Probe
from art_core.engine.base import AdapterRef
from art_core.engine.embedded import EmbeddedEngine
from art_core.engine.swap_proof import Verdict, prove_swap
from art_core.engine.vllm import VllmEngine
from art_core.engine.vllm_adapters import to_its_end
from art_core.errors import EngineError
from art_core.nn.lora import LoraModel
from art_core.training.out_of_memory import is_out_of_memory

_log = logging.getLogger(__name__)
T = TypeVar("T")


class Bench(Protocol):
    """One module, one piece of work at a time."""

    wants_probe: bool
    """A new step has to be proved to answer."""
    gives_way: bool
    """The engine has no memory of the device while there is `exclusive` work."""
    cached: int
    """Positions of keys and values that are kept in this process while a step is trained."""

    async def exclusive(self, work: Callable[[LoraModel], T]) -> T:
        """Run `work` on the module's own thread, with nothing else on it."""
        ...

    async def aside(self, work: Callable[[LoraModel], T]) -> T:
        """As `exclusive`, for work that needs little memory and may be done twice: an engine that
        has a module of its own goes on answering."""
        ...

    def adopt(self, adapter: AdapterRef, name: str) -> None:
        """Within `exclusive`: the module's adapter `name` is `adapter` from now on."""
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
    """The module that the embedded engine samples from: what was trained is what answers."""

    wants_probe = gives_way = False

    def __init__(self, engine: EmbeddedEngine, *, cached: int) -> None:
        self._engine, self.cached = engine, cached

    async def exclusive(self, work: Callable[[LoraModel], T]) -> T:
        return await self._engine.exclusive(work)

    async def aside(self, work: Callable[[LoraModel], T]) -> T:
        return await self._engine.exclusive(work)

    def adopt(self, adapter: AdapterRef, name: str) -> None:
        self._engine.adopt(adapter, name)

    async def prove(
        self, old: AdapterRef, new: AdapterRef, probe: Probe | None
    ) -> dict[str, float]:
        return {}

    def close(self) -> None:
        """The engine owns the thread."""


class OwnBench:
    """A module that only trains, on a thread of its own, beside vLLM.

    Args:
        sleeps: both share a GPU: vLLM gives its memory back while there is work.
        threads: of the CPU; None: as many as torch takes.
    """

    wants_probe = True
    cached = 0

    def __init__(
        self, module: LoraModel, engine: VllmEngine, *, sleeps: bool, threads: int | None
    ) -> None:
        self._module, self._engine = module, engine
        self.gives_way = sleeps
        limit = functools.partial(torch.set_num_threads, threads) if threads else None
        self._thread = ThreadPoolExecutor(1, "art-trainer", initializer=limit)
        self._turn = asyncio.Lock()

    async def exclusive(self, work: Callable[[LoraModel], T]) -> T:
        return await to_its_end(self._alone(work, awake=not self.gives_way))

    async def aside(self, work: Callable[[LoraModel], T]) -> T:
        """As `Bench.aside`; where memory is too little, with vLLM asleep after all."""
        return await to_its_end(self._alone(work, awake=True))

    async def _alone(self, work: Callable[[LoraModel], T], *, awake: bool) -> T:
        async with self._turn:
            if awake:
                try:
                    return await self._run(work)
                except Exception as error:
                    if not self.gives_way or not is_out_of_memory(error):
                        raise
                    _log.info("vLLM sleeps after all: %s", error)
            async with self._engine.asleep():
                return await self._run(functools.partial(_and_give_back, work))

    async def _run(self, work: Callable[[LoraModel], T]) -> T:
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._thread, work, self._module)

    def adopt(self, adapter: AdapterRef, name: str) -> None:
        """vLLM reads what is saved."""

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


def _and_give_back(work: Callable[[LoraModel], T], module: LoraModel) -> T:
    """Run `work`; its memory is vLLM's again before that one wakes."""
    try:
        return work(module)
    finally:
        torch.cuda.empty_cache()


def _figures(verdict: Verdict) -> dict[str, float]:
    _log.info("the swap is %s: %s", verdict.outcome, verdict)
    return {
        "swap/proved": float(verdict.outcome == "proved"),
        "swap/slope": verdict.slope,
        "swap/slope_error": verdict.error,
        "swap/moved": verdict.moved,
        "swap/noise": verdict.noise,
    }
