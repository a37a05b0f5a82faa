"""A server's job, followed to its end: through a lost connection, and a server that starts anew.

In: a job as it was acknowledged. Out: its result, or the error that it ended with, of the class
that `LocalBackend` raises; progress on the way.
"""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections.abc import AsyncIterator, Callable
from typing import Any

from pydantic import ValidationError

from art_core.client.http import Http
from art_core.errors import BadAnswer, JobCancelled, ServerError, ServerUnreachable
from art_core.wire import protocol as wire
from art_core.wire.errors import error_from_json

_log = logging.getLogger(__name__)

_PATIENCE = 900.0
"""Seconds that a server may be away, as one that starts anew and loads its models is."""
_CANCEL_SECONDS = 60.0
_PAUSE = 0.5
"""Seconds between two looks, where a proxy ends the stream of events before the job has."""
OnProgress = Callable[[wire.Progress], None]


async def followed(http: Http, job: wire.Job, tell: OnProgress) -> dict[str, Any]:
    """The result of `job`. Cancelled, it cancels the job, and ends when that has ended.

    Raises:
        ServerUnreachable: the server was away for too long; the job goes on if the server does.
        JobCancelled: somebody else cancelled it.
        ARTError: what it failed with.
    """
    try:
        return await _ended(http, job, tell)
    except asyncio.CancelledError:
        await asyncio.shield(_cancelled(http, job))
        raise


async def _ended(http: Http, job: wire.Job, tell: OnProgress) -> dict[str, Any]:
    last, seen = 0, time.monotonic()
    while not job.over:
        try:
            async for event in _events(http, job.id, last):
                last, seen = event.id, time.monotonic()
                if event.progress is not None:
                    tell(event.progress)
            job = await _look(http, job.id)
            seen = time.monotonic()
            if not job.over:
                await asyncio.sleep(_PAUSE)
        except ServerUnreachable:
            if time.monotonic() - seen > _PATIENCE:
                raise
            await asyncio.sleep(1.0)
            last = 0  # a server that started anew counts anew
    if job.state == "done":
        return job.result or {}
    if job.state == "cancelled":
        raise JobCancelled(f"{job.kind} of {job.name!r} was cancelled", fix="Ask for it again.")
    raise error_from_json(job.error)


async def _events(http: Http, job_id: str, after: int) -> AsyncIterator[wire.JobEvent]:
    path = wire.path(wire.EVENTS_OF_JOB, id=job_id)
    headers = {wire.LAST_EVENT: str(after)}
    async with http.stream("GET", path, headers=headers) as response:
        async for line in _lines(response.aiter_bytes()):
            if line.startswith(b"data:"):
                yield _read(wire.JobEvent, line.removeprefix(b"data:"))


async def _lines(parts: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    """Lines as an event stream has them: a text may hold other separators (U+2028, U+0085)."""
    held = b""
    async for part in parts:
        *whole, held = (held + part).split(b"\n")
        for line in whole:
            yield line.rstrip(b"\r")


async def _look(http: Http, job_id: str) -> wire.Job:
    response = await http.ask("GET", wire.path(wire.JOB, id=job_id))
    answer: wire.JobAnswer = _read(wire.JobAnswer, response.content)
    return answer.job


async def cancelled_by_key(http: Http, key: str) -> None:
    """Cancel what was asked for with this key, if the server took it before its caller left."""
    found = wire.Jobs(jobs=())
    try:
        async with asyncio.timeout(_CANCEL_SECONDS):
            for pause in (0.0, _PAUSE):  # it may be about to take it
                await asyncio.sleep(pause)
                response = await http.ask("GET", wire.JOBS, query={"key": key})
                found = _read(wire.Jobs, response.content)
                if found.jobs:
                    break
    except (ServerError, TimeoutError) as error:
        _log.warning("a request could not be cancelled: %s", error)
        return
    for job in found.jobs:
        if not job.over:
            await _cancelled(http, job)


async def _cancelled(http: Http, job: wire.Job) -> None:
    """Ask the server to end it, and wait until it has; it may end otherwise meanwhile."""
    try:
        async with asyncio.timeout(_CANCEL_SECONDS):
            await http.ask("POST", wire.path(wire.CANCEL_JOB, id=job.id))
            async for _ in _events(http, job.id, 0):
                pass
    except (ServerError, TimeoutError) as error:
        _log.warning("job %s could not be cancelled: %s", job.id, error)


def _read(kind: Any, text: str | bytes) -> Any:
    try:
        return kind.model_validate(json.loads(text))
    except (ValueError, RecursionError, ValidationError) as error:
        raise BadAnswer(f"an answer of the server can't be read ({error})") from error
