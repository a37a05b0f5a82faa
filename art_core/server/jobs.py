"""Jobs: one at a time for each model, in the order they came, whoever still waits for them.

In: what to do, by kind; jobs as they are asked for. Out: their states and events. What was not
ended when the process ended is begun again at the next start, so that work has to be safe to do
twice (run_work.py). Left out: what the work is.
"""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
from collections import defaultdict
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeAlias

from art_core.errors import ARTError, ConfigError, JobCancelled
from art_core.server.job_files import JobFiles
from art_core.server.ledger import Ledger
from art_core.wire.errors import error_to_json
from art_core.wire.protocol import Job, JobEvent, Progress, State

_log = logging.getLogger(__name__)

_KEPT_SECONDS = 14 * 24 * 3600.0
"""How long a job that has ended is found again."""
Work: TypeAlias = Callable[[Job, dict[str, Any]], Awaitable[dict[str, Any]]]
"""Does a job, of which the request is given; its result, JSON-ready."""


@dataclass
class _Live:
    """What is known of a job while this process lives."""

    progress: Progress = field(default_factory=Progress)
    events: list[JobEvent] = field(default_factory=list)
    changed: asyncio.Event = field(default_factory=asyncio.Event)
    """Set and replaced at each event."""
    task: asyncio.Task[None] | None = None
    is_cancelled: bool = False


class Jobs:
    """The jobs of a server. To be used on one event loop.

    Args:
        ledger: keeps them.
        work: by kind.
        files: what lies beside them on disk.
        shown: what may be told of an error's text.
    """

    def __init__(
        self,
        ledger: Ledger,
        work: Mapping[str, Work],
        files: JobFiles,
        shown: Callable[[str], str],
    ) -> None:
        self._ledger, self._work, self._files, self._shown = ledger, work, files, shown
        self._live: dict[str, _Live] = defaultdict(_Live)
        self._turns: dict[tuple[str, str], asyncio.Lock] = defaultdict(asyncio.Lock)
        self._loop: asyncio.AbstractEventLoop | None = None

    def start(self) -> None:
        """Go on with what an earlier process left."""
        self._loop = asyncio.get_running_loop()
        for gone in self._ledger.forget_ended(time.time() - _KEPT_SECONDS):
            self._files.forget(gone)
        for job in self._ledger.unended():
            _log.info("job %s (%s of %s) goes on", job.id, job.kind, job.name)
            self._begin(job)

    def submit(
        self,
        kind: str,
        project: str,
        name: str,
        key: str | None,
        request: dict[str, Any],
        *,
        given: Path | None = None,
    ) -> Job:
        """Take a job; the same key brings back the job that was taken with it.

        Args:
            given: the file of what the job is given, synced to the disk; it becomes the job's.

        Raises:
            ConfigError: the key was another request's.
        """
        wanted = Job(
            id=uuid.uuid4().hex,
            kind=kind,
            project=project,
            name=name,
            state="queued",
            key=key,
            created=time.time(),
        )
        if given is not None:
            self._files.adopt(given, wanted.id)
        job = self._ledger.add(wanted, request)
        if job is not wanted:
            self._files.ended(wanted.id)
            return self.known(kind, project, name, key) or job
        self._begin(job)
        return self.get(job.id) or job

    def known(self, kind: str, project: str, name: str, key: str | None) -> Job | None:
        """The job that was taken with this key; None if there is none.

        Raises:
            ConfigError: the key was another request's.
        """
        found = self._ledger.jobs(key=key) if key is not None else []
        if not found:
            return None
        job = found[0]
        if (job.kind, job.project, job.name) != (kind, project, name):
            raise ConfigError(
                "an idempotency key was used before, for something else",
                got=f"{kind} of {name!r}",
                expected=f"{job.kind} of {job.name!r}",
                fix="Make a new key for each request, and keep it for its repetitions.",
            )
        return self.get(job.id) or job

    def get(self, job_id: str) -> Job | None:
        """The job as it is now."""
        job = self._ledger.job(job_id)
        if job is None or job_id not in self._live:
            return job
        return job.model_copy(update={"progress": self._live[job_id].progress})

    def cancel(self, job_id: str) -> None:
        """Ask it to end; one that has ended stays as it is."""
        live = self._live.get(job_id)
        if live is not None and live.task is not None and not live.task.done():
            live.is_cancelled = True
            live.task.cancel()

    def tell(self, job_id: str, progress: Progress) -> None:
        """How far it is. May be called from any thread."""
        if self._loop is not None and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._progressed, job_id, progress)

    async def events(self, job_id: str, after: int) -> AsyncIterator[JobEvent | None]:
        """Events of a job after that number, until its last; None now and then while it is still.

        Of many progresses that nobody has read yet the newest is told.
        """
        while True:
            live = self._live[job_id]
            if not live.events:
                job = self._ledger.job(job_id)
                if job is not None:
                    self._add(job_id, JobEvent(id=0, kind="state", state=job.state))
            changed = live.changed
            new = [event for event in live.events if event.id > after]
            for event in new:
                after = event.id
                yield event
            job = self._ledger.job(job_id)
            if job is None or (job.over and not [e for e in live.events if e.id > after]):
                return
            try:
                async with asyncio.timeout(10.0):
                    await changed.wait()
            except TimeoutError:
                yield None

    async def close(self) -> None:
        """Stop what runs; it is begun again at the next start."""
        tasks = [live.task for live in self._live.values() if live.task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _begin(self, job: Job) -> None:
        self._add(job.id, JobEvent(id=0, kind="state", state="queued"))
        self._live[job.id].task = asyncio.create_task(self._run(job), name=f"job-{job.id}")

    async def _run(self, job: Job) -> None:
        live = self._live[job.id]
        try:
            async with self._turns[job.project, job.name]:
                self._ledger.begin(job.id)
                self._add(job.id, JobEvent(id=0, kind="state", state="running"))
                result = await self._work[job.kind](job, self._ledger.request(job.id))
        except asyncio.CancelledError:
            if not live.is_cancelled:
                raise  # the server ends
            error = JobCancelled(f"{job.kind} of {job.name!r} was cancelled")
            self._end(job, "cancelled", error=error_to_json(error, shown=self._shown))
        except Exception as error:  # noqa: BLE001 - the edge of a job: its client raises it
            if not isinstance(error, ARTError):
                _log.exception("job %s (%s of %s) failed", job.id, job.kind, job.name)
            self._end(job, "failed", error=error_to_json(error, shown=self._shown))
        else:
            self._end(job, "done", result=result)

    def _end(
        self,
        job: Job,
        state: State,
        *,
        result: dict[str, Any] | None = None,
        error: dict[str, Any] | None = None,
    ) -> None:
        self._ledger.end(job.id, state, result=result, error=error)
        self._add(job.id, JobEvent(id=0, kind="state", state=state))
        self._files.ended(job.id)

    def _progressed(self, job_id: str, progress: Progress) -> None:
        self._live[job_id].progress = progress
        self._add(job_id, JobEvent(id=0, kind="progress", progress=progress))

    def _add(self, job_id: str, event: JobEvent) -> None:
        live = self._live[job_id]
        number = live.events[-1].id + 1 if live.events else 1
        if live.events and event.kind == live.events[-1].kind == "progress":
            live.events.pop()
        live.events.append(event.model_copy(update={"id": number}))
        live.changed.set()
        live.changed = asyncio.Event()
