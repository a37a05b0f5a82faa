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
from collections.abc import AsyncGenerator, Callable, Iterable
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch

from art_core.config import EngineConfig
from art_core.engine.api_errors import ApiError
from art_core.engine.base import AdapterRef, Delta, GenerateRequest, Tokenizer, check_prompt
from art_core.engine.generate import Event, Lane
from art_core.engine.grammar import GrammarMatcher
from art_core.errors import ARTError, EngineError
from art_core.nn.lora import LoraModel

_log = logging.getLogger(__name__)
T = TypeVar("T")

_LOADED_FROM_DISK = 4
"""Adapters of old steps held in memory; of those at rest the longest unasked goes."""
_GATHER_LIMIT_S = 0.1
"""An idle engine never waits longer than this for more requests."""


@dataclass(frozen=True, eq=False)
class _Caller:
    """Where a request's deltas go."""

    request: GenerateRequest
    loop: asyncio.AbstractEventLoop
    deltas: asyncio.Queue[Delta | ARTError]


@dataclass(frozen=True)
class _Cancel:
    caller: _Caller


@dataclass(frozen=True, eq=False)
class _Job:
    """Work for the owner thread; `alone` waits until every request before it is answered."""

    run: Callable[[], Any]
    done: Future[Any]
    alone: bool


@dataclass(frozen=True, eq=False)
class _Policy:
    """What answers for an adapter."""

    lane: Lane
    name: str | None
    """Of the adapter in the module; None for the base model."""
    is_loaded: bool
    """It was read from disk for this, and is dropped with it."""


class EmbeddedEngine:
    """Serves a base model and its adapters from one `LoraModel`. Implements `base.Engine`.

    Raises:
        BaseModelError: the model's layers are not of a kind whose keys and values can be kept.
    """

    def __init__(
        self, model: LoraModel, tokenizer: Tokenizer, *, base_model: str, config: EngineConfig
    ) -> None:
        model.check_servable()
        self.base_model = base_model
        self.context_length = model.served_length
        self.tokenizer = tokenizer
        self._model = model
        self._config = config
        self._lock = threading.Lock()  # nothing enters the inbox once it is closed
        self._inbox: queue.SimpleQueue[_Caller | _Cancel | _Job | None] = queue.SimpleQueue()
        self._closed = threading.Event()
        # Read from any thread, as a whole: `list` of a dict is one step of the interpreter.
        self._resident: dict[AdapterRef, str] = {}  # live adapters, by name in the module
        self._on_disk: dict[AdapterRef, Path] = {}
        # Owned by the thread:
        self._queue: deque[_Caller | _Job] = deque()  # in order of arrival
        self._callers: dict[str, _Caller] = {}  # those in lanes
        self._policies: dict[AdapterRef | None, _Policy] = {}  # longest unasked first
        self._leaving: set[AdapterRef] = set()  # forgotten once their callers are answered
        self._loads = 0
        self._thread = threading.Thread(target=self._run, name="art-engine", daemon=True)
        self._thread.start()

    # From any thread

    async def generate(self, request: GenerateRequest) -> AsyncGenerator[Delta, None]:
        """As `base.Engine.generate`.

        Raises:
            ContextOverflow: the prompt leaves no room for a token.
        """
        self._check(request)
        caller = _Caller(request, asyncio.get_running_loop(), asyncio.Queue())
        self._put(caller)
        is_ended = False
        try:
            while not is_ended:
                delta = await caller.deltas.get()
                if isinstance(delta, ARTError):
                    is_ended = True
                    raise delta
                is_ended = delta.finish_reason is not None
                yield delta
        finally:
            if not is_ended:
                self._inbox.put(_Cancel(caller))

    async def load_adapter(self, adapter: AdapterRef, path: Path) -> None:
        """Make a saved step servable; it is read when first asked for."""
        before = self._on_disk.get(adapter, path)
        self._on_disk[adapter] = path
        if path != before:  # what was read from the other path is out of date
            await self._submit(lambda: self._forget(adapter), alone=False)

    async def unload_adapter(self, adapter: AdapterRef) -> None:
        """As `base.Engine.unload_adapter`; calls that it answers now go on to their end."""
        self._on_disk.pop(adapter, None)

        def unload() -> None:
            self._resident.pop(adapter, None)
            self._forget(adapter)

        await self._submit(unload, alone=False)

    def adapters(self) -> list[AdapterRef]:
        """As `base.Engine.adapters`."""
        known = {*list(self._resident), *list(self._on_disk)}
        return sorted(known, key=lambda adapter: (adapter.model, adapter.step))

    @property
    def running(self) -> int:
        """Requests being answered now."""
        return len(self._callers)

    async def exclusive(self, work: Callable[[LoraModel], T]) -> T:
        """Run `work` on the owner thread with nothing in flight, and return what it returns.

        Requests made before are answered first; those made meanwhile wait, and are then answered
        by the adapters as they are after it. Cancelled while it waits, it is not begun; once
        begun, it goes on to its end.
        """
        return await self._submit(lambda: work(self._model), alone=True)

    def adopt(self, adapter: AdapterRef, name: str) -> None:
        """Within `exclusive`: `adapter` is from now on the module's adapter `name` as it stands.

        The step that `name` stood for before is served from disk, if `load_adapter` knows it.
        """
        for old in [ref for ref, held in self._resident.items() if held == name]:
            del self._resident[old]
            self._drop(old)
        self._drop(adapter)
        self._resident[adapter] = name

    async def close(self) -> None:
        """As `base.Engine.close`."""
        self._shut()
        self._inbox.put(None)  # wakes the thread
        await asyncio.to_thread(self._thread.join)

    def _check(self, request: GenerateRequest) -> None:
        if request.adapter is not None and request.adapter not in self.adapters():
            raise self._not_served(request.adapter)
        if request.sampling.adjusted:
            raise ApiError(
                "the embedded engine samples without penalties and biases",
                expected="presence_penalty=0, frequency_penalty=0, repetition_penalty=1, and no "
                "logit_bias",
                fix="Leave them out, or serve with vLLM: EngineConfig(kind='vllm').",
                param="logit_bias" if request.sampling.logit_bias else "presence_penalty",
            )
        check_prompt(
            request.prompt_ids,
            vocab_size=self._model.vocab_size,
            context_length=self.context_length,
        )

    def _not_served(self, adapter: AdapterRef) -> EngineError:
        return EngineError(
            "adapter is not served",
            got=str(adapter),
            expected=f"one of {[str(a) for a in self.adapters()]}",
            fix="Load it first.",
        )

    def _put(self, item: _Caller | _Job) -> None:
        with self._lock:
            if self._closed.is_set():
                raise EngineError("the engine is closed", fix="Register the model again.")
            self._inbox.put(item)

    def _shut(self) -> None:
        with self._lock:
            self._closed.set()

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
                self._start()
                self._advance()
        finally:
            self._shut()
            self._end()

    def _receive(self) -> None:
        """Take in what has come; block where there is nothing else to do."""
        if not self._callers and not self._queue:
            self._take(self._inbox.get())
            self._gather()
        while not self._inbox.empty():  # this thread alone takes out
            self._take(self._inbox.get())

    def _gather(self) -> None:
        """Collect requests that follow at once, so that they start as one batch."""
        deadline = time.monotonic() + _GATHER_LIMIT_S
        while (
            0 < len(self._queue) < self._config.max_batch
            and isinstance(self._queue[-1], _Caller)
            and time.monotonic() < deadline
        ):
            try:
                self._take(self._inbox.get(timeout=self._config.gather_ms / 1000))
            except queue.Empty:
                return

    def _take(self, item: _Caller | _Cancel | _Job | None) -> None:
        """Queue what has come; a cancellation overtakes everything, its request came before."""
        if isinstance(item, _Cancel):
            self._cancel(item.caller)
        elif item is not None:
            self._queue.append(item)

    def _start(self) -> None:
        """Begin what is first in the queue, as far as there is room for it."""
        taken = 0
        while self._queue and not self._closed.is_set():
            item = self._queue.popleft()
            if isinstance(item, _Job):
                if item.alone and self._callers:
                    self._queue.appendleft(item)
                    return
                _do(item)
                continue
            new = self._admit(item, taken)
            if new is None:
                self._queue.appendleft(item)
                return
            taken += new

    def _admit(self, caller: _Caller, taken: int) -> int | None:
        """Give a request to its lane; returns the positions it adds, None if it has to wait.

        taken: positions that the next step computes already.
        """
        request = caller.request
        if len(self._callers) >= self._config.max_batch or request.adapter in self._leaving:
            return None
        try:
            if request.request_id in self._callers:
                raise EngineError("two requests have one id", got=request.request_id)
            lane = self._policy(request.adapter).lane
            new = lane.missing(request)
            if taken and taken + new > self._config.max_row_tokens:
                return None
            grammar = request.grammar
            lane.admit(request, GrammarMatcher(grammar, self.tokenizer) if grammar else None)
        except Exception as error:  # noqa: BLE001 - the edge: told to this caller
            self._tell([caller], f"the request can't be started ({error})")
            return 0
        self._callers[request.request_id] = caller
        return new

    def _policy(self, adapter: AdapterRef | None) -> _Policy:
        policy = self._policies.pop(adapter, None) or self._open(adapter)
        self._policies[adapter] = policy
        return policy

    def _open(self, adapter: AdapterRef | None) -> _Policy:
        name = None if adapter is None else self._resident.get(adapter)
        is_loaded = adapter is not None and name is None
        if adapter is not None and name is None:
            name = self._load(adapter)
        lane = Lane(self._model, eos_ids=self.tokenizer.eos_ids, context_length=self.context_length)
        return _Policy(lane, name, is_loaded)

    def _load(self, adapter: AdapterRef) -> str:
        """Read an old step from disk; returns its name in the module."""
        path = self._on_disk.get(adapter)
        if path is None:
            raise self._not_served(adapter)
        self._loads += 1
        name = f"loaded{self._loads}"
        self._model.load_adapter(name, path)
        return name

    def _forget(self, adapter: AdapterRef) -> None:
        """Drop `adapter` from memory, now or when the calls that it answers have ended."""
        policy = self._policies.get(adapter)
        if policy is not None and len(policy.lane):
            self._leaving.add(adapter)
        else:
            self._drop(adapter)

    def _drop(self, adapter: AdapterRef | None) -> None:
        policy = self._policies.pop(adapter, None)
        if policy is not None and policy.is_loaded and policy.name is not None:
            self._model.drop_adapter(policy.name)

    def _advance(self) -> None:
        """One step of each lane."""
        for adapter, policy in list(self._policies.items()):
            if not len(policy.lane):
                continue
            try:
                self._model.activate(policy.name)
                events = policy.lane.step()
            except Exception as error:  # noqa: BLE001 - the edge: told to every caller of the lane
                _log.exception("the engine failed on %s", adapter or self.base_model)
                self._drop(adapter)
                mine = [c for c in self._callers.values() if c.request.adapter == adapter]
                self._tell(mine, f"the engine failed ({type(error).__name__}: {error})")
            else:
                self._deliver(events)
        self._tidy()

    def _tidy(self) -> None:
        """Forget what has to go: adapters, memory of lanes at rest, prompts above the limit."""
        for adapter in list(self._leaving):
            self._leaving.discard(adapter)
            self._forget(adapter)
        loaded = [ref for ref, policy in self._policies.items() if policy.is_loaded]
        idle = [ref for ref in loaded if not len(self._policies[ref].lane)]
        for ref in idle[: max(0, len(loaded) - _LOADED_FROM_DISK)]:
            self._drop(ref)
        policies = list(self._policies.values())
        for policy in policies[:-1]:
            policy.lane.rest()
        over = sum(policy.lane.cached for policy in policies) - self._config.cache_tokens
        for policy in policies:
            if over <= 0:
                return
            held = policy.lane.cached
            policy.lane.trim(max(0, held - over))
            over -= held - policy.lane.cached

    def _cancel(self, caller: _Caller) -> None:
        request = caller.request
        if self._callers.get(request.request_id) is caller:
            del self._callers[request.request_id]
            self._policies[request.adapter].lane.cancel(request.request_id)
        elif caller in self._queue:
            self._queue.remove(caller)

    def _deliver(self, events: list[Event]) -> None:
        """Hand each event to its caller, with one wake-up an event loop."""
        by_loop: dict[asyncio.AbstractEventLoop, list[tuple[_Caller, Delta | ARTError]]] = {}
        for event in events:
            caller = self._callers[event.request_id]
            if event.finish_reason is not None:
                del self._callers[event.request_id]
            delta = event.error or Delta(
                event.ids, event.logprobs, event.finish_reason, event.cached_tokens
            )
            by_loop.setdefault(caller.loop, []).append((caller, delta))
        for loop, batch in by_loop.items():
            self._wake(loop, batch)

    def _tell(self, callers: Iterable[_Caller], what: str) -> None:
        """End calls with an error."""
        for caller in callers:
            if self._callers.get(caller.request.request_id) is caller:
                del self._callers[caller.request.request_id]
            error = EngineError(what, fix="Ask again; a repeated failure is in the log.")
            self._wake(caller.loop, [(caller, error)])

    def _wake(
        self, loop: asyncio.AbstractEventLoop, batch: list[tuple[_Caller, Delta | ARTError]]
    ) -> None:
        try:
            loop.call_soon_threadsafe(_put_all, batch)
        except RuntimeError:  # the callers' loop is closed: nobody will ever read
            for caller, _ in batch:
                self._cancel(caller)

    def _end(self) -> None:
        """Tell everyone who still waits; nothing enters the inbox any more."""
        while not self._inbox.empty():
            self._take(self._inbox.get())
        waiting = [item for item in self._queue if isinstance(item, _Caller)]
        self._tell([*self._callers.values(), *waiting], "the engine was closed")
        for item in self._queue:
            if isinstance(item, _Job) and item.done.set_running_or_notify_cancel():
                item.done.set_exception(EngineError("the engine was closed"))
        self._queue.clear()
        self._policies.clear()


def _put_all(batch: list[tuple[_Caller, Delta | ARTError]]) -> None:
    for caller, delta in batch:
        caller.deltas.put_nowait(delta)


def _do(job: _Job) -> None:
    if not job.done.set_running_or_notify_cancel():
        return  # nobody waits for it any more
    try:
        result = job.run()
    except BaseException as error:  # noqa: BLE001 - the edge: the waiter raises it
        job.done.set_exception(error)
    else:
        job.done.set_result(result)
