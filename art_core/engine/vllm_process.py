"""vLLM as a supervised child: started, watched, restarted within bounds, stopped without a trace.

In: `VllmSettings`, a Python that has vLLM, a folder. Out: the address of a server that is up, or a
typed error with the end of its log and what to do. A thread watches it: an exit is noticed at once,
a hang after `Supervision.hang_after`. Left out: adapters and requests, which are the engine's; it
is told of every restart, so that it loads its adapters again.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Literal, Self

from art_core.engine.supervision import Supervision, longest_silence
from art_core.engine.vllm_faults import Fault
from art_core.engine.vllm_server import LOG, Progress, VllmServer
from art_core.engine.vllm_settings import VllmSettings
from art_core.errors import EngineDied, EngineError, EngineStartFailed

__all__ = ["Progress", "State", "Supervision", "VllmProcess"]

_log = logging.getLogger(__name__)

State = Literal["new", "starting", "ready", "restarting", "failed", "stopped"]
_PORT_TRIES = 3
_NOTICED_S = 0.05
"""After so long an end is noticed."""


class VllmProcess:
    """A vLLM server of our own on 127.0.0.1. Every method may be called from any thread.

    Args:
        settings: what is served.
        python: a Python that has vLLM; see `art_core.engine.runtime.find_runtime`.
        folder: for its log (`vllm.log`) and the record by which a crashed run's processes are found
            and ended; one server at a time.
        on_restart: called in the watching thread with this object, after a restart and before
            `state` is "ready" again; `base_url` is the new one. What it raises counts as a fault
            of the restart.
        supervision: how it is watched.
    """

    def __init__(
        self,
        settings: VllmSettings,
        *,
        python: Path,
        folder: Path,
        on_restart: Callable[[VllmProcess], None] | None = None,
        supervision: Supervision | None = None,
    ) -> None:
        self.settings = settings
        self.folder = folder
        self.supervision = supervision or Supervision()
        self._python = python
        self._on_restart = on_restart
        self._api_key = secrets.token_hex(16)
        self._lock = threading.Lock()  # guards what follows
        self._state: State = "new"
        self._server: VllmServer | None = None
        self._starts = 0
        self._fault: EngineError | None = None
        self._hang_after = 0.0  # known once it has started
        self._patience = 0  # how many blocks of `patiently` are open
        self._may_restart = threading.Event()
        self._may_restart.set()
        self._watch: threading.Thread | None = None
        self._look = threading.Event()  # look at once
        self._ended = threading.Event()  # `stop` was called

    # What it is

    @property
    def state(self) -> State:
        """Where it is in its life."""
        return self._state

    @property
    def base_url(self) -> str:
        """Like "http://127.0.0.1:5000", "" before the start; a restart changes it."""
        return "" if self._server is None else self._server.base_url

    @property
    def headers(self) -> dict[str, str]:
        """What each request must carry; other users of the machine don't know it."""
        return {"Authorization": f"Bearer {self._api_key}"}

    @property
    def starts(self) -> int:
        """How many processes there have been. A call that broke while this grew met a restart."""
        return self._starts

    @property
    def log(self) -> Path:
        """Its log, over all starts."""
        return self.folder / LOG

    # What is done with it

    def start(self, progress: Progress | None = None) -> Self:
        """Start it and wait until it answers; nothing if it is up.

        Args:
            progress: told, in a line each, what takes time.

        Raises:
            EngineStartFailed: it did not come up; with the cause, where it is known.
            EngineError: it was stopped meanwhile, or another server has the folder.
        """
        with self._lock:
            if self._state == "ready":
                return self
            if self._state != "new":
                raise self._unusable()
            self._state = "starting"
        try:
            self._bring_up(progress or _silent)
            self._hang_after = longest_silence(self.supervision, self._python)
        except BaseException as error:
            if self._server is not None:
                self._server.stop(at_once=True)
            self._settle("failed", error if isinstance(error, EngineError) else None)
            raise
        with self._lock:
            if self._ended.is_set():
                raise _stopped_while_starting()
            self._state = "ready"
            self._watch = threading.Thread(target=self._supervise, name="art-vllm", daemon=True)
            self._watch.start()
        return self

    def stop(self) -> None:
        """Stop it, and wait until nothing of it is left. Safe to call twice, and while it starts.

        It may end what it is doing for `Supervision.stop_within`, then it is terminated, then
        killed, with every process that it started.
        """
        self._ended.set()
        self._look.set()
        with self._lock:  # from here on no server is started
            server, watch = self._server, self._watch
        if server is not None:
            server.stop()
        if watch is not None and watch is not threading.current_thread():
            watch.join()
        self._settle("stopped")

    def look_now(self) -> None:
        """Have its health checked at once: a call has just failed."""
        self._look.set()

    @contextmanager
    def patiently(self) -> Iterator[None]:
        """For what keeps the engine silent for long (sleep, wake): no silence is a hang inside."""
        with self._lock:
            self._patience += 1
        try:
            yield
        finally:
            with self._lock:
                self._patience -= 1

    @contextmanager
    def staying_down(self) -> Iterator[None]:
        """While something else needs its GPU: one that dies inside is started again after it."""
        self._may_restart.clear()
        try:
            yield
        finally:
            self._may_restart.set()

    async def ready(self, timeout: float) -> None:
        """Return once it can be asked, which is at once unless it is being restarted.

        Raises:
            EngineDied: it is down for good.
            EngineError: it is not up after `timeout` seconds, was stopped or never started.
        """
        deadline = time.monotonic() + timeout
        while not self._is_up():
            state = self._state
            if state not in ("starting", "ready", "restarting"):
                raise self._unusable()
            if time.monotonic() > deadline:
                raise EngineError(
                    "vLLM is not up again",
                    got=f"{state} for {timeout:g} s",
                    fix=f"Ask again later; {self.log} tells how far it is.",
                )
            await asyncio.sleep(0.05)

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.stop()

    # In the thread that starts it

    def _bring_up(self, say: Progress) -> None:
        """Start a server and wait until it answers; take other ports if its port is taken."""
        for tries_left in reversed(range(_PORT_TRIES)):
            server = self._spawn()
            say(f"starting vLLM at {server.base_url}; its log is {self.log}")
            fault = server.await_ready(
                within=self.supervision.start_within, say=say, given_up=self._ended
            )
            if fault is None:
                return
            server.stop(at_once=True)
            if self._ended.is_set():
                raise _stopped_while_starting()
            if not fault.is_port_taken or not tries_left:
                raise self._start_failed(fault)

    def _spawn(self) -> VllmServer:
        with self._lock:
            if self._ended.is_set():
                raise _stopped_while_starting()
            self._server = VllmServer(
                self.settings,
                python=self._python,
                folder=self.folder,
                api_key=self._api_key,
                grace=self.supervision.stop_within,
            )
            self._starts += 1
            return self._server

    # In the thread that watches it

    def _supervise(self) -> None:
        """The thread: see that it is alive, restart it if not, give up at some point."""
        try:
            self._keep_up()
        except BaseException as error:  # a bug of ours: nobody may wait for a restart
            self._settle("failed", EngineError(f"nobody watches vLLM any more ({error!r})"))
            raise

    def _keep_up(self) -> None:
        faults: list[float] = []
        while (why := self._until_fault()) is not None:
            now = time.monotonic()
            faults = [t for t in faults if now - t < self.supervision.restarts_within] + [now]
            self._settle("restarting")
            _log.warning("vLLM is down: %s; the end of its log:\n%s", why.cause, why.tail)
            if not self._restart(faults, why):
                return

    def _until_fault(self) -> Fault | None:
        """Watch until it ends or hangs; None if it was stopped."""
        server = self._server
        assert server is not None
        answered, misses = time.monotonic(), 0
        while not self._ended.is_set():
            if (fault := server.ended()) is not None:
                return None if self._ended.is_set() else fault
            if self._patience or server.answers(within=self._hang_after / 3):
                answered, misses = time.monotonic(), 0
            else:
                misses += 1  # two at least: the first may have met a machine that was asleep
            silent = time.monotonic() - answered
            if misses > 1 and silent > self._hang_after:
                fault = server.fault(f"it hung: its engine gave no answer for {silent:.0f} s")
                server.stop(at_once=True)
                return fault
            self._rest(server)
        return None

    def _rest(self, server: VllmServer) -> None:
        """Wait for the next look, or for the end of the server."""
        until = time.monotonic() + self.supervision.look_every
        while time.monotonic() < until and server.ended() is None:
            if self._look.wait(_NOTICED_S):
                self._look.clear()
                return

    def _restart(self, faults: list[float], why: Fault) -> bool:
        """Bring it up again, pausing longer each time; False if it is down for good or stopped."""
        while len(faults) <= self.supervision.restarts:
            if self._ended.wait(self.supervision.first_pause * 2 ** (len(faults) - 1)):
                return False
            while not self._may_restart.wait(_NOTICED_S):
                if self._ended.is_set():
                    return False
            try:
                self._bring_up(_log.info)
                if self._on_restart is not None:
                    self._on_restart(self)
            except Exception as error:  # noqa: BLE001 - the edge of the thread; told to all callers
                if self._ended.is_set():
                    return False
                _log.warning("vLLM could not be restarted: %s", error)
                why = _of_restart(error, why)
                if self._server is not None:
                    self._server.stop(at_once=True)
                faults.append(time.monotonic())
            else:
                self._settle("ready")
                return True
        count = self.supervision.restarts
        what = f"vLLM is down: {why.cause}. It was restarted {count} times before"
        self._settle("failed", EngineDied(what, tail=why.tail, fix=why.fix))
        return False

    def _is_up(self) -> bool:
        """True if it can be asked, as far as can be seen without asking it."""
        server = self._server
        return self._state == "ready" and server is not None and server.ended() is None

    def _settle(self, state: State, fault: EngineError | None = None) -> None:
        """Enter a state; "stopped" and "failed" are left by nothing but `stop`."""
        with self._lock:
            if self._state == "stopped" or (self._ended.is_set() and state != "stopped"):
                return
            self._state, self._fault = state, fault or self._fault

    def _unusable(self) -> EngineError:
        if self._state == "failed" and self._fault is not None:
            return self._fault.with_traceback(None)  # raised again and again, it would grow
        return EngineError(
            "vLLM can't be asked now", got=self._state, fix="Start it, once; a new one if stopped."
        )

    def _start_failed(self, fault: Fault) -> EngineStartFailed:
        return EngineStartFailed(
            f"vLLM did not start: {fault.cause}",
            tail=fault.tail,
            fix=f"{fault.fix} The whole log: {self.log}",
        )


def _of_restart(error: Exception, before: Fault) -> Fault:
    """Why a restart failed, after the fault `before` that made it necessary."""
    if isinstance(error, EngineStartFailed):
        return Fault(f"it could not be restarted ({error.what})", error.fix, error.tail)
    return Fault(f"it could not be restarted ({error})", before.fix, before.tail)


def _stopped_while_starting() -> EngineError:
    return EngineError("vLLM was stopped while it started", fix="Start a new one.")


def _silent(line: str) -> None:
    """Tells nobody."""
