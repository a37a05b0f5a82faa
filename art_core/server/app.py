"""The server as one ASGI app: the OpenAI surface of all models, and the run surface.

In: a folder, which is this server's alone, and what it may load. Out: an app whose lifespan loads
the models that it served before, goes on with the jobs that were left, and closes all in the end.
Left out: the port and the key (`serve`).
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any, TypeAlias

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, PlainTextResponse, Response
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from art_core.config import EngineConfig
from art_core.engine.api_errors import ApiError, error_headers
from art_core.engine.openai_routes import openai_routes
from art_core.errors import ARTError, WireMismatch
from art_core.local.backend import LocalBackend
from art_core.local.live_run import OnStepProgress
from art_core.model import TrainableModel
from art_core.server.admission import Admission
from art_core.server.faults import Teller
from art_core.server.figures import MEDIA_TYPE, figures
from art_core.server.job_files import JobFiles
from art_core.server.jobs import Jobs
from art_core.server.kept_records import KeptRecords
from art_core.server.ledger import Ledger
from art_core.server.rollout_urls import RolloutUrls
from art_core.server.run_routes import run_routes
from art_core.server.run_work import RunWork, positions
from art_core.server.served_models import ServedModels
from art_core.server.signed import Signer
from art_core.wire.protocol import WIRE, WIRE_HEADER

_log = logging.getLogger(__name__)

_LOOK_SECONDS = 600.0
"""Between two looks at how many records are kept."""


@dataclass(frozen=True)
class ServerSettings:
    """How a server is run."""

    path: Path
    """Its folder: runs, jobs, records, secret."""
    base_models: Mapping[str, str] | None = None
    """See `RunWork`."""
    engine: EngineConfig = field(default_factory=EngineConfig)
    max_body: int = 2 * 2**30
    """Bytes of a payload as it comes."""


MakeBackend: TypeAlias = Callable[[OnStepProgress], LocalBackend]


def create_server(settings: ServerSettings, make_backend: MakeBackend | None = None) -> ASGIApp:
    """The app.

    Args:
        make_backend: what serves and trains, such as a backend that answers from a script; None:
            this machine.

    Raises:
        RunFolderError: the ledger is damaged.
    """
    folder = settings.path / "server"
    folder.mkdir(parents=True, exist_ok=True)
    teller = Teller(settings.path.resolve(), Path.home())
    ledger = Ledger(folder / "jobs.sqlite")
    files = JobFiles(folder, max_body=settings.max_body)
    signer = Signer(folder / "secret")

    def on_progress(model: TrainableModel[Any], done: int, total: int) -> None:
        job = work.running.get((model.project, model.name))
        if job is not None:
            jobs.tell(job, positions(done, total))

    def this_machine(on_progress: OnStepProgress) -> LocalBackend:
        return LocalBackend(
            settings.path, show_progress=False, endpoint="/v1", on_progress=on_progress
        )

    backend = (make_backend or this_machine)(on_progress)
    work = RunWork(
        backend,
        ledger,
        files,
        settings.path,
        base_models=settings.base_models,
        engine=settings.engine,
    )
    jobs = Jobs(ledger, work.kinds(), files, teller.shown)

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        try:
            await _restore(work, ledger)
            jobs.start()
            bounded = asyncio.create_task(_bound_records(backend))
            yield
            bounded.cancel()
        finally:
            await jobs.close()
            await backend.close()
            ledger.close()

    app = FastAPI(
        title="art-langgraph",
        version=version("art-langgraph"),
        lifespan=lifespan,
        docs_url=None,
        redoc_url=None,
        openapi_url="/api/openapi.json",
    )
    app.include_router(run_routes(work, jobs, ledger, files, signer, app.version))
    answers: Counter[str] = Counter()
    admission = Admission()

    @app.get("/metrics", response_class=PlainTextResponse)
    async def metrics() -> Response:
        return PlainTextResponse(
            await figures(work, ledger, answers, admission), media_type=MEDIA_TYPE
        )

    app.router.routes.extend(openai_routes(ServedModels(backend.services, admission)))
    _tell_faults(app, teller)

    def refuse(error: Exception) -> Response:
        return _answer(teller, error)

    return _counted(RolloutUrls(_same_wire(app, refuse), signer, refuse), answers)


async def _bound_records(backend: LocalBackend) -> None:
    """Look at the records of all bases, now and then."""
    kept: dict[int, KeptRecords] = {}
    while True:
        for service in backend.services():
            store = kept.setdefault(id(service.records), KeptRecords(service.records))
            gone = await asyncio.to_thread(store.look)
            if gone:
                _log.info("%d token records were dropped: they were old, or too many", gone)
        await asyncio.sleep(_LOOK_SECONDS)


async def _restore(work: RunWork, ledger: Ledger) -> None:
    """Serve again what was served; what can't be loaded now is told, and left."""
    for model in ledger.models():
        try:
            await work.load(model)
        except ARTError as error:
            _log.error("model %s is not served: %s", model.name, error)


def _tell_faults(app: FastAPI, teller: Teller) -> None:
    async def told(request: Request, error: Exception) -> Response:
        if isinstance(error, RequestValidationError):
            first = error.errors()[0]
            where = ".".join(str(part) for part in first["loc"])
            error = ApiError(f"{where}: {first['msg']}", param=where)
        elif isinstance(error, HTTPException):
            error = ApiError(
                f"{request.method} {request.url.path}: {error.detail}", status=error.status_code
            )
        elif not isinstance(error, ARTError):
            _log.exception("a request failed", exc_info=error)
        return _answer(teller, error)

    for kind in (RequestValidationError, HTTPException, ARTError, Exception):
        app.add_exception_handler(kind, told)


def _answer(teller: Teller, error: Exception) -> Response:
    status, body = teller.answer(error)
    return JSONResponse(body, status, error_headers(error))


def _same_wire(app: ASGIApp, refuse: Callable[[Exception], Response]) -> ASGIApp:
    """Refuse a client of another version, which would misread what it is told."""

    async def checked(scope: Scope, receive: Receive, send: Send) -> None:
        told = dict(scope.get("headers", ())).get(WIRE_HEADER.encode(), str(WIRE).encode())
        if scope["type"] == "http" and told != str(WIRE).encode():
            error = WireMismatch(
                "client and server speak different versions of the wire",
                status=400,
                got=told.decode("latin-1")[:20],
                expected=str(WIRE),
                fix=f"Take release {version('art-langgraph')} of art-langgraph on both sides.",
            )
            await refuse(error)(scope, receive, send)
        else:
            await app(scope, receive, send)

    return checked


def _counted(app: ASGIApp, answers: Counter[str]) -> ASGIApp:
    async def counted(scope: Scope, receive: Receive, send: Send) -> None:
        async def watched(message: Message) -> None:
            if message["type"] == "http.response.start":
                answers[f"{message['status'] // 100}xx"] += 1
            await send(message)

        await app(scope, receive, watched)

    return counted
