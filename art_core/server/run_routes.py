"""The run surface over HTTP: models, jobs, checkpoints, logs, rollouts (wire/protocol.py).

In: requests of `HttpBackend`, or of curl. Out: JSON, payloads, server-sent events. What takes long
is a job, answered at once; what a job does is in run_work.py.
"""

from __future__ import annotations

import asyncio
import re
import uuid
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Annotated

from fastapi import APIRouter, Header, Query, Request
from fastapi.responses import FileResponse, JSONResponse, Response, StreamingResponse

from art_core import checkpoints
from art_core.bookmarks import Bookmark
from art_core.engine.api_errors import ApiError
from art_core.metrics import MetricsLog
from art_core.server.job_files import JobFiles
from art_core.server.jobs import Jobs
from art_core.server.ledger import Ledger
from art_core.server.rollout_urls import PREFIX, trajectory_of
from art_core.server.run_work import JOB_MARK, RunWork
from art_core.server.signed import Signer
from art_core.trajectories import TrajectoryGroup
from art_core.wire import protocol as wire
from art_core.wire.adapter_tar import tar_of
from art_core.wire.errors import error_from_json
from art_core.wire.payload import compressed, write_payload

_QUICK_SECONDS = 1.0
"""A job that ends within it is answered with its result."""
UPLOADS = re.compile(r"/api/models/[^/]+/[^/]+/(train|train_sft|sft_loss|join|log|checkpoints)")
"""Paths whose bodies go to a file, and are bounded there."""
IdempotencyKey = Annotated[
    str | None, Header(alias=wire.KEY_HEADER, pattern=rf"^[A-Za-z0-9_-]{{1,{wire.MAX_KEY}}}$")
]


def run_routes(
    work: RunWork, jobs: Jobs, ledger: Ledger, files: JobFiles, signer: Signer, version: str
) -> APIRouter:
    """The routes below /api."""
    api = APIRouter()

    def job_of(job_id: str) -> wire.Job:
        job = jobs.get(job_id)
        if job is None:
            raise ApiError(f"there is no job {job_id!r}", code="job_not_found", status=404)
        return job

    async def given(
        request: Request, kind: str, project: str, name: str, key: str | None
    ) -> Response:
        """Take a payload as a job."""
        work.model(project, name)
        if (known := jobs.known(kind, project, name, key)) is not None:
            return _accepted(known)
        _check_media(request)
        aside = uuid.uuid4().hex
        is_packed = request.headers.get("content-encoding", "identity") == "gzip"
        path = await files.take(aside, request.stream(), is_packed=is_packed)
        job = jobs.submit(kind, project, name, key, {}, given=path)
        return _accepted(job)

    @api.get(wire.VERSION)
    async def version_of_server() -> wire.ServerVersion:
        return wire.ServerVersion(version=version, wire=wire.WIRE)

    # Models

    @api.post(wire.MODELS, response_model=None)
    async def register(asked: wire.RegisterRequest, key: IdempotencyKey = None) -> Response:
        work.check(asked)
        job = jobs.submit("register", asked.project, asked.name, key, asked.model_dump(mode="json"))
        job = await _soon(jobs, job)
        if job.state == "failed":
            raise error_from_json(job.error)
        if job.state == "done":
            return JSONResponse(job.result)
        return _accepted(job)

    @api.get(wire.MODELS)
    async def models() -> dict[str, list[wire.ModelInfo]]:
        return {"models": [await info(*key) for key in list(work.models)]}

    @api.get(wire.MODEL)
    async def info(project: str, name: str) -> wire.ModelInfo:
        model = work.model(project, name)
        folder = work.backend.folder(model)
        return wire.ModelInfo(
            project=project,
            name=name,
            base_model=model.base_model,
            step=await work.backend.get_step(model),
            steps=tuple(await asyncio.to_thread(checkpoints.steps, folder)),
            model_name=model.name,
        )

    # Training

    @api.post(wire.TRAIN, response_model=None)
    async def train(
        request: Request, project: str, name: str, key: IdempotencyKey = None
    ) -> Response:
        return await given(request, "train", project, name, key)

    @api.post(wire.TRAIN_SFT, response_model=None)
    async def train_sft(
        request: Request, project: str, name: str, key: IdempotencyKey = None
    ) -> Response:
        return await given(request, "train_sft", project, name, key)

    @api.post(wire.SFT_LOSS, response_model=None)
    async def sft_loss(
        request: Request, project: str, name: str, key: IdempotencyKey = None
    ) -> Response:
        return await given(request, "sft_loss", project, name, key)

    @api.post(wire.JOIN, response_model=None)
    async def join(
        request: Request, project: str, name: str, key: IdempotencyKey = None
    ) -> Response:
        return await given(request, "join", project, name, key)

    @api.post(wire.LOG, response_model=None)
    async def log(request: Request, project: str, name: str) -> Response:
        work.model(project, name)
        _check_media(request)
        aside = uuid.uuid4().hex
        is_packed = request.headers.get("content-encoding", "identity") == "gzip"
        await files.take(aside, request.stream(), is_packed=is_packed)
        try:
            await work.log(project, name, aside)
        finally:
            files.ended(aside)
        return JSONResponse({})

    @api.get(wire.BOOKMARKS)
    async def bookmarks(project: str, name: str) -> wire.Bookmarks:
        found = await work.backend.bookmarks(work.model(project, name))
        return wire.Bookmarks(bookmarks={n: p for n, p in found.items() if n != JOB_MARK})

    @api.put(wire.BOOKMARKS)
    async def set_bookmark(project: str, name: str, mark: wire.Mark) -> wire.Bookmarks:
        if mark.name == JOB_MARK:
            raise ApiError("a bookmark has the name of the server's own", got=mark.name)
        model = work.model(project, name)
        await work.backend.set_bookmark(model, Bookmark(mark.name, mark.place))
        return await bookmarks(project, name)

    # Jobs

    @api.get(wire.JOBS)
    async def all_jobs(
        project: str | None = None,
        name: str | None = None,
        key: str | None = None,
        state: Annotated[list[wire.State] | None, Query()] = None,
    ) -> wire.Jobs:
        found = ledger.jobs(states=state or (), project=project, name=name, key=key)
        return wire.Jobs(jobs=tuple(jobs.get(job.id) or job for job in found))

    @api.get(wire.JOB)
    async def job(id: str) -> wire.JobAnswer:
        return wire.JobAnswer(job=job_of(id))

    @api.post(wire.CANCEL_JOB)
    async def cancel(id: str) -> wire.JobAnswer:
        job_of(id)
        jobs.cancel(id)
        return wire.JobAnswer(job=job_of(id))

    @api.get(wire.EVENTS_OF_JOB, response_model=None)
    async def events(
        id: str, last: Annotated[str | None, Header(alias=wire.LAST_EVENT)] = None
    ) -> Response:
        job_of(id)
        after = int(last) if last is not None and last.isascii() and last.isdigit() else 0
        return StreamingResponse(_told(jobs, id, after), media_type=wire.EVENTS)

    @api.get(wire.RESULT_OF_JOB, response_model=None)
    async def result(id: str) -> Response:
        job_of(id)
        path = files.made(id)
        if path is None:
            raise ApiError(f"job {id!r} returned no trajectories", status=404)
        headers = {"content-encoding": "gzip"}
        return FileResponse(path, media_type=wire.PAYLOAD, headers=headers)

    # Checkpoints and figures

    @api.get(wire.CHECKPOINTS)
    async def all_checkpoints(project: str, name: str) -> wire.Checkpoints:
        folder = work.backend.folder(work.model(project, name))
        there = await asyncio.to_thread(checkpoints.steps, folder)
        history = await asyncio.to_thread(MetricsLog(folder.history).read)
        figures: dict[int, dict[str, float]] = {}
        for told in history:
            of_step = figures.setdefault(told.step, {})
            numbers = {n: v for n, v in told.values.items() if isinstance(v, int | float)}
            of_step |= {f"{told.split}/{n}": float(v) for n, v in numbers.items()}
        return wire.Checkpoints(
            checkpoints=tuple(
                _checkpoint(folder.checkpoints / checkpoints.folder_name(step), step, figures)
                for step in there
            )
        )

    @api.get(wire.CHECKPOINT, response_model=None)
    async def checkpoint(project: str, name: str, step: int) -> Response:
        folder = work.backend.folder(work.model(project, name))
        found = await asyncio.to_thread(checkpoints.find, folder, step)
        return StreamingResponse(tar_of(found.path), media_type=wire.TAR)

    @api.put(wire.CHECKPOINTS, response_model=None)
    async def upload(
        request: Request, project: str, name: str, key: IdempotencyKey = None
    ) -> Response:
        work.model(project, name)
        if (known := jobs.known("upload", project, name, key)) is not None:
            return _accepted(known)
        kind = request.headers.get("content-type", "").partition(";")[0].strip()
        if kind != wire.TAR:
            raise ApiError(
                "the content type of an adapter", got=kind, expected=wire.TAR, status=415
            )
        path = await files.keep(uuid.uuid4().hex, request.stream())
        return _accepted(jobs.submit("upload", project, name, key, {}, given=path))

    @api.post(wire.FORK, response_model=None)
    async def fork(
        project: str, name: str, asked: wire.ForkRequest, key: IdempotencyKey = None
    ) -> Response:
        work.model(project, name)
        request = asked.model_dump(mode="json")
        return _accepted(jobs.submit("fork", project, name, key, request))

    @api.post(wire.PRUNE)
    async def prune(project: str, name: str, asked: wire.PruneRequest) -> wire.Pruned:
        model = work.model(project, name)
        gone = await work.backend.delete_checkpoints(model, best_metric=asked.best_metric)
        return wire.Pruned(deleted=tuple(gone))

    @api.get(wire.HISTORY, response_model=None)
    async def history(project: str, name: str, after: Annotated[int, Query(ge=0)] = 0) -> Response:
        path = work.backend.folder(work.model(project, name)).history
        return StreamingResponse(_lines(path, after), media_type=wire.JSON_LINES)

    # Rollouts

    @api.post(wire.ROLLOUTS)
    async def rollout(asked: wire.RolloutRequest) -> wire.RolloutUrl:
        rollout_id = asked.rollout_id or uuid.uuid4().hex
        return wire.RolloutUrl(
            rollout_id=rollout_id, base_url=f"{PREFIX}{signer.sign(rollout_id)}/v1"
        )

    @api.get(wire.ROLLOUT_TRAJECTORY, response_model=None)
    async def rollout_trajectory(rollout_id: str) -> Response:
        stores = {id(s.records): s.records for s in work.backend.services()}.values()
        found = [record for store in stores for record in store.of_rollout(rollout_id)]
        trajectory = trajectory_of(rollout_id, found)
        chunks = write_payload("trajectory", {}, [TrajectoryGroup([trajectory])])
        headers = {"content-encoding": "gzip"}
        return StreamingResponse(compressed(chunks), media_type=wire.PAYLOAD, headers=headers)

    return api


def _accepted(job: wire.Job) -> Response:
    return JSONResponse(wire.JobAnswer(job=job).model_dump(mode="json"), 202)


async def _soon(jobs: Jobs, job: wire.Job) -> wire.Job:
    """The job when it has ended, or a moment later."""

    async def ended() -> None:
        async for _ in jobs.events(job.id, 0):
            pass

    try:
        async with asyncio.timeout(_QUICK_SECONDS):
            await ended()
    except TimeoutError:
        pass
    return jobs.get(job.id) or job


def _check_media(request: Request) -> None:
    kind = request.headers.get("content-type", "").partition(";")[0].strip()
    if kind != wire.PAYLOAD:
        raise ApiError("the content type of a payload", got=kind, expected=wire.PAYLOAD, status=415)
    encoding = request.headers.get("content-encoding", "identity")
    if encoding not in ("identity", "gzip"):
        raise ApiError("the encoding of a payload", got=encoding, expected="gzip", status=415)


async def _told(jobs: Jobs, job_id: str, after: int) -> AsyncIterator[bytes]:
    async for event in jobs.events(job_id, after):
        if event is None:
            yield b": still at work\n\n"
        else:
            yield f"id: {event.id}\ndata: {event.model_dump_json()}\n\n".encode()


def _checkpoint(path: Path, step: int, figures: dict[int, dict[str, float]]) -> wire.CheckpointInfo:
    try:
        told = (path / "adapter_model.safetensors").stat()
    except OSError:
        return wire.CheckpointInfo(step=step, metrics=figures.get(step, {}))
    return wire.CheckpointInfo(
        step=step, created=told.st_mtime, size=told.st_size, metrics=figures.get(step, {})
    )


def _lines(path: Path, after: int) -> Iterator[bytes]:
    """Whole lines of a file, from line number `after` on."""
    if path.exists():
        with path.open("rb") as file:
            for number, line in enumerate(file):
                if number >= after and line.endswith(b"\n"):
                    yield line
