"""The embedded engine: serving from the very module that is trained, where there is no GPU.

In: requests from any event loop. Out: streams of sampled tokens. One thread owns the module; it
batches what waits, one `Lane` per adapter, and steps the lanes in turn. Training runs on the same
thread through `exclusive`: what was asked before is answered first, what comes later waits.
"""

from __future__ import annotations

import asyncio
import logging
import queue
import threading
import time
from collections import deque
from collections.abc import AsyncIterator, Callable
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch

from art_core.config import EngineConfig
from art_core.engine.base import AdapterRef, Delta, GenerateRequest, Tokenizer
from art_core.engine.generate import Event, Lane
from art_core.engine.grammar import GrammarMatcher
from art_core.errors import ARTError, EngineError
from art_core.nn.lora import LoraModel

_log = logging.getLogger(__name__)
T = TypeVar("T")

_LOADED_FROM_DISK = 4
"""Adapters of old steps held in memory; the longest unused goes."""
_GATHER_LIMIT_S = 0.1
"""An idle engine never waits longer than this for more requests."""


@dataclass(frozen=True)
class _Caller:
    """Where a request's deltas go."""

    request: GenerateRequest
    loop: asyncio.AbstractEventLoop
    deltas: asyncio.Queue[Delta | ARTError]


@dataclass(frozen=True)
class _Cancel:
    request_id: str


@dataclass(frozen=True)
class _Job:
    """Work for the owner thread; `alone` waits until every request before it is answered."""

    run: Callable[[], Any]
    done: Future[Any]
    alone: bool


class EmbeddedEngine:
    """Serves a base model and its adapters from one `LoraModel`. Implements `base.Engine`."""

    def __init__(
        self, model: LoraModel, tokenizer: Tokenizer, *, base_model: str, config: EngineConfig
    ) -> None:
        self.base_model = base_model
        self.context_length = model.context_length
        self.tokenizer = tokenizer
        self._model = model
        self._config = config
        self._inbox: queue.SimpleQueue[_Caller | _Cancel | _Job | None] = queue.SimpleQueue()
        self._closed = threading.Event()
        self._resident: dict[AdapterRef, str] = {}  # live adapters, by name in the module
        self._on_disk: dict[AdapterRef, Path] = {}
        self._loaded: dict[AdapterRef, str] = {}  # read from disk, longest unused first
        self._count = 0
        # Owned by the thread:
        self._lanes: dict[AdapterRef | None, Lane] = {}
        self._callers: dict[str, _Caller] = {}
        self._waiting: deque[_Caller] = deque()
        self._job: _Job | None = None
        self._thread = threading.Thread(target=self._run, name="art-engine", daemon=True)
        self._thread.start()

    # From any thread

    async def generate(self, request: GenerateRequest) -> AsyncIterator[Delta]:
        """As `base.Engine.generate`."""
        if request.adapter is not None and request.adapter not in self.adapters():
            raise EngineError(
                "adapter is not served",
                got=str(request.adapter),
                expected=f"one of {[str(a) for a in self.adapters()]}",
            )
        caller = _Caller(request, asyncio.get_running_loop(), asyncio.Queue())
        self._put(caller)
        ended = False
        try:
            while not ended:
                delta = await caller.deltas.get()
                if isinstance(delta, ARTError):
                    ended = True
                    raise delta
                ended = delta.finish_reason is not None
                yield delta
        finally:
            if not ended:
                self._inbox.put(_Cancel(request.request_id))

    async def load_adapter(self, adapter: AdapterRef, path: Path) -> None:
        """Make a saved step servable; it is read when first asked for."""
        self._on_disk[adapter] = path

    async def unload_adapter(self, adapter: AdapterRef) -> None:
        """As `base.Engine.unload_adapter`."""
        self._on_disk.pop(adapter, None)
        await self._submit(lambda: self._forget(adapter), alone=False)

    def adapters(self) -> list[AdapterRef]:
        """As `base.Engine.adapters`."""
        return sorted({*self._resident, *self._on_disk}, key=lambda a: (a.model, a.step))

    async def exclusive(self, work: Callable[[LoraModel], T]) -> T:
        """Run `work` on the owner thread with nothing in flight, and return what it returns.

        Requests made before are answered first; those made meanwhile wait, and are then answered
        by the adapters as they are after it.
        """
        return await self._submit(lambda: work(self._model), alone=True)

    def adopt(self, adapter: AdapterRef, name: str) -> None:
        """Within `exclusive`: `adapter` is from now on the module's adapter `name` as it stands.

        The step that `name` stood for before is served from disk, if `load_adapter` knows it.
        """
        for old in [ref for ref, held in self._resident.items() if held == name]:
            del self._resident[old]
            self._lanes.pop(old, None)
        self._forget(adapter)
        self._resident[adapter] = name

    async def close(self) -> None:
        """As `base.Engine.close`."""
        self._closed.set()
        self._inbox.put(None)
        await asyncio.to_thread(self._thread.join)

    def _put(self, item: _Caller | _Job) -> None:
        if self._closed.is_set():
            raise EngineError("the engine is closed", fix="Register the model again.")
        self._inbox.put(item)

    async def _submit(self, run: Callable[[], T], *, alone: bool) -> T:
        job = _Job(run, Future(), alone)
        self._put(job)
        result: T = await asyncio.wrap_future(job.done)
        return result

    # On the owner thread

    def _run(self) -> None:
        if self._config.threads:
            torch.set_num_threads(self._config.threads)
        try:
            while not self._closed.is_set():
                self._receive()
                if self._job is not None and not self._callers and not self._waiting:
                    job, self._job = self._job, None
                    _do(job)
                elif self._callers or self._waiting:
                    self._advance()
        finally:
            self._closed.set()
            self._fail([*self._callers.values(), *self._waiting], "the engine was closed")
            self._drain_inbox()

    def _receive(self) -> None:
        """Take in what has come; block where there is nothing else to do."""
        if self._job is not None:  # closed for newcomers; cancels still count
            self._take_cancels()
            return
        is_idle = not self._callers and not self._waiting
        item = self._next(block=is_idle)
        if is_idle and isinstance(item, _Caller):
            self._waiting.append(item)
            item = self._gather()
        while item is not None:
            if isinstance(item, _Caller):
                self._waiting.append(item)
            elif isinstance(item, _Cancel):
                self._cancel(item.request_id)
            elif item.alone:
                self._job = item
                return
            else:
                _do(item)
            item = self._next(block=False)

    def _gather(self) -> _Caller | _Cancel | _Job | None:
        """Collect requests that follow at once, so that they start as one batch."""
        deadline = time.monotonic() + _GATHER_LIMIT_S
        while len(self._waiting) < self._config.max_batch and time.monotonic() < deadline:
            try:
                item = self._inbox.get(timeout=self._config.gather_ms / 1000)
            except queue.Empty:
                return None
            if not isinstance(item, _Caller):
                return item
            self._waiting.append(item)
        return None

    def _next(self, *, block: bool) -> _Caller | _Cancel | _Job | None:
        try:
            return self._inbox.get(block=block)
        except queue.Empty:
            return None

    def _take_cancels(self) -> None:
        later: list[_Caller | _Job | None] = []
        while (item := self._next(block=False)) is not None:
            if isinstance(item, _Cancel):
                self._cancel(item.request_id)
                later = [
                    i for i in later
                    if not (isinstance(i, _Caller) and i.request.request_id == item.request_id)
                ]
            else:
                later.append(item)
        for kept in later:
            self._inbox.put(kept)

    def _advance(self) -> None:
        """Admit what fits, then one step of each lane."""
        self._admit()
        for adapter, lane in list(self._lanes.items()):
            if not len(lane):
                continue
            try:
                self._activate(adapter)
                self._deliver(lane.step())
            except Exception as error:  # noqa: BLE001 - the edge: told to every caller of the lane
                _log.exception("the engine failed on %s", adapter or self.base_model)
                del self._lanes[adapter]
                mine = [c for c in self._callers.values() if c.request.adapter == adapter]
                self._fail(mine, f"the engine failed ({type(error).__name__}: {error})")

    def _admit(self) -> None:
        fresh = 0
        while self._waiting and fresh < self._config.max_row_tokens:
            if len(self._callers) >= self._config.max_batch:
                return
            caller = self._waiting.popleft()
            request = caller.request
            try:
                matcher = (
                    GrammarMatcher(request.grammar, self.tokenizer) if request.grammar else None
                )
                fresh += self._lane(request.adapter).admit(request, matcher)
            except Exception as error:  # noqa: BLE001 - the edge: told to this caller
                self._fail([caller], f"the request can't be started ({error})")
                continue
            self._callers[request.request_id] = caller

    def _lane(self, adapter: AdapterRef | None) -> Lane:
        lane = self._lanes.get(adapter)
        if lane is None:
            lane = self._lanes[adapter] = Lane(
                self._model,
                eos_ids=self.tokenizer.eos_ids,
                context_length=self.context_length,
                cache_tokens=self._config.cache_tokens,
            )
        return lane

    def _activate(self, adapter: AdapterRef | None) -> None:
        if adapter is None or adapter in self._resident:
            self._model.activate(self._resident[adapter] if adapter else None)
            return
        name = self._loaded.pop(adapter, None)
        if name is None:
            path = self._on_disk.get(adapter)
            if path is None:
                raise EngineError("adapter is not served", got=str(adapter))
            self._count += 1
            name = f"loaded{self._count}"
            self._model.load_adapter(name, path)
        self._loaded[adapter] = name
        while len(self._loaded) > _LOADED_FROM_DISK:
            self._forget(next(iter(self._loaded)))
        self._model.activate(name)

    def _forget(self, adapter: AdapterRef) -> None:
        self._lanes.pop(adapter, None)
        name = self._loaded.pop(adapter, None)
        if name is not None:
            self._model.drop_adapter(name)

    def _cancel(self, request_id: str) -> None:
        self._waiting = deque(c for c in self._waiting if c.request.request_id != request_id)
        caller = self._callers.pop(request_id, None)
        if caller is not None and caller.request.adapter in self._lanes:
            self._lanes[caller.request.adapter].cancel(request_id)

    def _deliver(self, events: list[Event]) -> None:
        """Hand each event to its caller, with one wake-up an event loop."""
        by_loop: dict[asyncio.AbstractEventLoop, list[tuple[_Caller, Delta | ARTError]]] = {}
        for event in events:
            caller = self._callers[event.request_id]
            if event.finish_reason is not None:
                del self._callers[event.request_id]
            delta = Delta(event.ids, event.logprobs, event.finish_reason, event.cached_tokens)
            by_loop.setdefault(caller.loop, []).append((caller, delta))
        for loop, batch in by_loop.items():
            self._wake(loop, batch)

    def _fail(self, callers: list[_Caller], what: str) -> None:
        for caller in callers:
            self._callers.pop(caller.request.request_id, None)
            error = EngineError(what, fix="Ask again; a repeated failure is in the log.")
            self._wake(caller.loop, [(caller, error)])

    def _wake(
        self, loop: asyncio.AbstractEventLoop, batch: list[tuple[_Caller, Delta | ARTError]]
    ) -> None:
        try:
            loop.call_soon_threadsafe(_put_all, batch)
        except RuntimeError:  # the caller's loop is gone
            for caller, _ in batch:
                self._cancel(caller.request.request_id)

    def _drain_inbox(self) -> None:
        while (item := self._next(block=False)) is not None:
            if isinstance(item, _Caller):
                self._fail([item], "the engine was closed")
            elif isinstance(item, _Job):
                item.done.set_exception(EngineError("the engine was closed"))
        if self._job is not None:
            self._job.done.set_exception(EngineError("the engine was closed"))


def _put_all(batch: list[tuple[_Caller, Delta | ARTError]]) -> None:
    for caller, delta in batch:
        caller.deltas.put_nowait(delta)


def _do(job: _Job) -> None:
    try:
        result = job.run()
    except BaseException as error:  # noqa: BLE001 - the edge: the waiter raises it
        job.done.set_exception(error)
    else:
        job.done.set_result(result)
