"""The ambient recorder: which rollout an LLM call belongs to, and where its call goes.

In: `open_scope` around a rollout. Out: the scope's calls, in the order they were started. A scope
is found through two carriers: a ContextVar (`current_scope`), and its id, which travels where the
ContextVar is lost (`scope_by_id`). It leaves out HTTP (`transport`) and parsing (`exchange`).
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import re
import threading
import uuid
from bisect import bisect
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from contextvars import ContextVar, copy_context
from dataclasses import dataclass, field, replace
from functools import partial
from types import MappingProxyType
from typing import ParamSpec, Protocol, TypeVar

from art_core.calls import ModelCall
from art_core.config import SamplingConfig
from art_core.errors import ConfigError

_P = ParamSpec("_P")
_T = TypeVar("_T")
_log = logging.getLogger(__name__)
_ID = re.compile(r"[A-Za-z0-9._:/-]{1,200}")


@dataclass(frozen=True)
class Target:
    """Where the calls of a role go."""

    base_url: str
    """OpenAI-compatible, ends in "/v1"."""
    api_key: str = field(repr=False)
    model_name: str
    """Served name; "name@3" pins a step."""
    sampling: SamplingConfig | None = None
    """Settings that training samples with; None keeps what the caller asks for."""
    trains: bool = False
    """True if this is the policy being trained: `sampling` then overrides what the caller asks
    for; otherwise it fills in what the caller left open."""
    token_data: bool = True
    """False for hosted providers: they refuse to be asked for token ids."""


class OpenCall(Protocol):
    """A call that has been sent and not yet been recorded."""

    def finish(self, error: str | None = None) -> None:
        """Record it now; ignored if it was recorded before."""


class Scope:
    """One rollout being recorded. Every method may be called from any thread.

    Args:
        rollout_id: names the rollout on the wire and in the server's records.
        targets: where calls go, by role; None is the default role.
        parent: the scope around this one; it is given every call too.
    """

    def __init__(
        self,
        rollout_id: str,
        targets: Mapping[str | None, Target] | None = None,
        parent: Scope | None = None,
    ) -> None:
        inherited = parent.targets if parent is not None else {}
        self.rollout_id = rollout_id
        self.targets: Mapping[str | None, Target] = MappingProxyType(dict(targets or inherited))
        self.calls: list[ModelCall] = []
        """Finished calls, in the order they were started."""
        self.incomplete: list[str] = []
        """Why the record of this rollout is not whole; empty if it is."""
        self.closed = False
        self.started_calls = 0
        """HTTP attempts that were begun."""
        self._parent = parent
        self._children = itertools.count()
        self._places: list[tuple[int, int]] = []
        self._keys: dict[tuple[str, int], str | None] = {}
        self._run_ids: set[str] = set()
        self._open: set[OpenCall] = set()
        self._idle: list[Callable[[], object]] = []
        self._lock = threading.RLock()

    def __repr__(self) -> str:
        return f"Scope({self.rollout_id!r}, {len(self.calls)} calls, closed={self.closed})"

    def target(self, role: str | None = None) -> Target | None:
        """Where calls of `role` go: its own target, else the default one, else None."""
        return self.targets.get(role) or self.targets.get(None)

    def begin(self, call: OpenCall | None = None, run_id: str | None = None) -> int:
        """Note that a call starts now; returns its place in the order of starts."""
        with self._lock:
            if call is not None:
                self._open.add(call)
                self.started_calls += 1
        if run_id is not None:
            self._note_run(run_id)
        return next(_ORDER)

    def _note_run(self, run_id: str) -> None:
        """Here and around: a callback of the scope around hears of the calls made inside."""
        with self._lock:
            self._run_ids.add(run_id)
        if self._parent is not None:
            self._parent._note_run(run_id)

    def end(self, call: OpenCall) -> None:
        """Note that a call from `begin` is recorded."""
        with self._lock:
            self._open.discard(call)
            idle = [] if self._open else self._idle
            if idle:
                self._idle = []
        for tell in idle:
            tell()

    async def settle(self, seconds: float) -> None:
        """Wait until no call is open, at most so long: a loop may be about to close responses."""
        loop, done = asyncio.get_running_loop(), asyncio.Event()
        with self._lock:
            if not self._open:
                return
            self._idle.append(partial(_set_in, loop, done))
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await done.wait()

    @property
    def open_calls(self) -> int:
        """Calls that were begun and are not recorded yet."""
        return len(self._open)

    def saw_run(self, run_id: str) -> bool:
        """True if a call of this LangChain run went through the transport."""
        return run_id in self._run_ids

    def saw_answer(self, key: tuple[str, int]) -> bool:
        """True if an answer with this key came over the transport."""
        return key in self._keys and any(c.key == key and c.response for c in self.calls)

    def add(self, call: ModelCall, place: int | None = None) -> None:
        """Keep a finished call.

        Args:
            call: one with a key that was there before is a replay, kept as context; or, if it is of
                the same LangChain run, the same call, told by a second handler: it is dropped.
            place: what `begin` returned; None means that it starts now.
        """
        place = next(_ORDER) if place is None else place
        run_id = call.origin.run_id
        with self._lock:
            if self.closed:
                self.note(f"call {call.record_id!r} ended after its rollout and is left out")
                _log.warning("rollout %s: a call ended after its rollout", self.rollout_id)
            else:
                if call.key in self._keys:
                    if run_id is not None and self._keys[call.key] == run_id:
                        return
                    call = replace(
                        call, record_id=f"local-{uuid.uuid4().hex}", left_out="cache replay"
                    )
                self._keys[call.key] = run_id
                at = bisect(self._places, (place, call.choice_index))
                self._places.insert(at, (place, call.choice_index))
                self.calls.insert(at, call)
        if self._parent is not None:
            self._parent.add(call, place)

    def note(self, reason: str) -> None:
        """Say why this rollout's record is not whole; the same reason is kept once."""
        with self._lock:
            if reason not in self.incomplete:
                self.incomplete.append(reason)

    def child_id(self) -> str:
        """An id for the next scope inside this one: the same in every repetition of the run."""
        return f"{self.rollout_id}.{next(self._children)}"

    def close(self) -> None:
        """Stop recording; calls still open are recorded as broken off. Safe to call twice."""
        with self._lock:
            left = list(self._open)
        for call in left:
            call.finish("the rollout ended while this call was open")
        with self._lock:
            self.closed = True


def _set_in(loop: asyncio.AbstractEventLoop, event: asyncio.Event) -> None:
    with suppress(RuntimeError):  # that loop is closed, nobody waits there any more
        loop.call_soon_threadsafe(event.set)


def current_scope() -> Scope | None:
    """The scope around the caller; None outside, and after it has closed."""
    scope = _CURRENT.get()
    return None if scope is None or scope.closed else scope


def scope_by_id(rollout_id: str) -> Scope | None:
    """The open scope with this id; the way back where the ContextVar was lost."""
    return _OPEN.get(rollout_id)


def open_scopes() -> list[Scope]:
    """Every scope open in this process."""
    return list(_OPEN.values())


@contextmanager
def open_scope(
    rollout_id: str | None = None, targets: Mapping[str | None, Target] | None = None
) -> Iterator[Scope]:
    """Record the calls made inside.

    Args:
        rollout_id: keys the sampling noise, so that a run repeated under the same id repeats. None:
            derived from the scope around, else random.
        targets: where calls go, by role; None takes those of the scope around.

    Raises:
        ConfigError: the id is open already, or holds characters an HTTP header can't carry.
    """
    parent = current_scope()
    if rollout_id is None:
        rollout_id = parent.child_id() if parent else uuid.uuid4().hex
    if not _ID.fullmatch(rollout_id):
        raise ConfigError(
            "a rollout id can't be sent", got=rollout_id, expected="letters, digits and . _ : / -"
        )
    scope = Scope(rollout_id, targets, parent)
    if _OPEN.setdefault(rollout_id, scope) is not scope:
        raise ConfigError(
            "a rollout with this id is running", got=rollout_id, expected="an id of its own"
        )
    token = _CURRENT.set(scope)
    try:
        yield scope
    finally:
        scope.close()
        del _OPEN[rollout_id]
        with suppress(ValueError):  # left in another context; there a closed scope counts as none
            _CURRENT.reset(token)


class ContextExecutor(ThreadPoolExecutor):
    """A thread pool whose tasks see the scope of whoever submits them.

    As a loop's default executor it makes `loop.run_in_executor(None, ...)` keep the rollout, which
    a plain pool loses.
    """

    def submit(self, fn: Callable[_P, _T], /, *args: _P.args, **kwargs: _P.kwargs) -> Future[_T]:
        """Run `fn` in a thread, in a copy of the caller's context."""
        return super().submit(partial(copy_context().run, partial(fn, *args, **kwargs)))


_ORDER = itertools.count()
_CURRENT: ContextVar[Scope | None] = ContextVar("art_scope", default=None)
_OPEN: dict[str, Scope] = {}
