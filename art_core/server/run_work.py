"""What a job does, by kind: load a model, train it, look up its loss, complete trajectories.

In: a job and the request it was asked for with. Out: its result, JSON-ready. A job that the process
before this one began may be done again: a step that was saved is found by the job's id, which its
checkpoint keeps, and is not made twice.
"""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

from art_core.backend import TrainResult
from art_core.bookmarks import Bookmark
from art_core.config import EngineConfig
from art_core.errors import ConfigError, ModelNotRegistered, PayloadError
from art_core.local.backend import LocalBackend
from art_core.metrics import MetricsLog
from art_core.model import TrainableModel
from art_core.names import check_name
from art_core.server.job_files import JobFiles
from art_core.server.jobs import Work
from art_core.server.ledger import Ledger
from art_core.trajectories import Trajectory, TrajectoryGroup
from art_core.wire.adapter_tar import unpack
from art_core.wire.payload import Payload, write_payload
from art_core.wire.protocol import (
    ForkRequest,
    Job,
    LogRequest,
    Mark,
    Progress,
    Registered,
    RegisterRequest,
    SFTRequest,
    TrainRequest,
)
from art_core.wire.results import read_figures, result_to_json

JOB_MARK = "art.job"
"""Bookmark by which a checkpoint knows the job that made it; clients don't see it."""
R = TypeVar("R", bound=BaseModel)
Key = tuple[str, str]


class RunWork:
    """The models of a server, and what is done with them.

    Args:
        backend: serves and trains them.
        folder: where run folders are kept.
        base_models: names and folders that may be loaded, by the name they are asked for; None:
            any name on the hub, and no folder of this machine.
        engine: what answers; a client does not choose it.
    """

    def __init__(
        self,
        backend: LocalBackend,
        ledger: Ledger,
        files: JobFiles,
        folder: Path,
        *,
        base_models: Mapping[str, str] | None,
        engine: EngineConfig,
    ) -> None:
        self.backend, self._ledger, self._files = backend, ledger, files
        self._folder, self._base_models, self._engine = folder, base_models, engine
        self.models: dict[Key, TrainableModel[Any]] = {}
        self.running: dict[Key, str] = {}
        """Id of the job under way, by model."""

    def kinds(self) -> dict[str, Work]:
        """The work of each kind of job."""
        return {
            "register": self.register,
            "train": self.train,
            "train_sft": self.train_sft,
            "sft_loss": self.sft_loss,
            "join": self.join,
            "fork": self.fork,
            "upload": self.upload,
        }

    def model(self, project: str, name: str) -> TrainableModel[Any]:
        """A model that is loaded.

        Raises:
            ModelNotRegistered: it is not.
        """
        found = self.models.get((project, name))
        if found is None:
            raise ModelNotRegistered(
                f"model {name!r} of project {project!r} is not registered with this server",
                fix="First: await model.register(backend).",
            )
        return found

    def check(self, asked: RegisterRequest) -> str:
        """The base model to load for a request.

        Raises:
            ConfigError: the server does not serve it, or the request wants to choose what the
                server alone chooses.
        """
        if asked.art_config.engine not in (EngineConfig(), self._engine):
            raise ConfigError(
                "art_config.engine is the server's to choose",
                expected="EngineConfig()",
                fix="Leave it out; start the server with what it should serve with.",
            )
        if self._base_models is not None:
            if asked.base_model not in self._base_models:
                raise ConfigError(
                    "this server does not serve the base model",
                    got=asked.base_model,
                    expected=" or ".join(sorted(self._base_models)),
                )
            return self._base_models[asked.base_model]
        if Path(asked.base_model).exists() or asked.base_model.startswith(("/", ".", "~", "\\")):
            raise ConfigError(
                "a base model is a folder of the server's machine",
                got=asked.base_model,
                expected="a name on the hub",
                fix="Start the server with --base-model FOLDER to serve it.",
            )
        return asked.base_model

    async def register(self, job: Job, request: dict[str, Any]) -> dict[str, Any]:
        """Load a model; its `Registered`."""
        asked = RegisterRequest.model_validate(request)
        return (await self.load(asked)).model_dump()

    async def load(self, asked: RegisterRequest) -> Registered:
        """Load and serve a model, and keep that it is to be served."""
        model: TrainableModel[Any] = TrainableModel(
            name=asked.name,
            project=asked.project,
            base_model=self.check(asked),
            base_path=str(self._folder),
            art_config=asked.art_config.model_copy(update={"engine": self._engine}),
        )
        inference = await self.backend.register(model)
        known = self.models.setdefault((asked.project, asked.name), model)
        known._backend = self.backend
        self._ledger.keep_model(asked)
        return Registered(model_name=inference.model_name, step=await self.backend.get_step(model))

    async def train(self, job: Job, request: dict[str, Any]) -> dict[str, Any]:
        """A step of reinforcement learning; its train result."""
        model = self.model(job.project, job.name)
        if (made := await self._made_before(job, model, "train")) is not None:
            return made
        payload = await self._payload(job, model)
        asked = read_as(TrainRequest, payload.request)
        if asked.config.kl_ref_adapter_path is not None:
            raise ConfigError(
                "kl_ref_adapter_path is a path of the server's machine",
                got=asked.config.kl_ref_adapter_path,
                expected="None",
                fix="Hold to a step of this model: kl_penalty_reference_step=N.",
            )
        await self._mark(job, model)
        with self._watched(job):
            result = await self.backend.train(
                model, payload.groups, asked.config, bookmark=_bookmark(asked.bookmark)
            )
        return result_to_json(result)

    async def train_sft(self, job: Job, request: dict[str, Any]) -> dict[str, Any]:
        """Supervised training; its train result."""
        model = self.model(job.project, job.name)
        if (made := await self._made_before(job, model, "sft")) is not None:
            return made
        payload = await self._payload(job, model)
        asked = read_as(SFTRequest, payload.request)
        await self._mark(job, model)
        with self._watched(job):
            result = await self.backend.train_sft(
                model, single(payload), asked.config, bookmark=_bookmark(asked.bookmark)
            )
        return result_to_json(result)

    async def sft_loss(self, job: Job, request: dict[str, Any]) -> dict[str, Any]:
        """The loss on some answers."""
        model = self.model(job.project, job.name)
        payload = await self._payload(job, model)
        asked = read_as(SFTRequest, payload.request)
        return {"loss": await self.backend.sft_loss(model, single(payload), asked.config)}

    async def join(self, job: Job, request: dict[str, Any]) -> dict[str, Any]:
        """Trajectories with the tokens that the server recorded; they are kept to be fetched."""
        model = self.model(job.project, job.name)
        payload = await self._payload(job, model)
        trajectories = single(payload)
        await self.backend.join(model, trajectories)
        chunks = write_payload("joined", {}, [TrajectoryGroup(trajectories)])
        await asyncio.to_thread(self._files.make, job.id, chunks)
        return {}

    async def fork(self, job: Job, request: dict[str, Any]) -> dict[str, Any]:
        """Go on from another model's step; its train result."""
        asked = ForkRequest.model_validate(request)
        for kind, name in (("model", asked.from_name), ("project", asked.from_project)):
            if name is not None:
                check_name(kind, name)
        model = self.model(job.project, job.name)
        if (made := await self._made_before(job, model, "fork")) is not None:
            return made
        await self._mark(job, model)
        result = await self.backend.fork(
            model, asked.from_name, from_project=asked.from_project, step=asked.step
        )
        return result_to_json(result)

    async def upload(self, job: Job, request: dict[str, Any]) -> dict[str, Any]:
        """Go on from an adapter that was sent; its train result."""
        model = self.model(job.project, job.name)
        if (made := await self._made_before(job, model, "upload")) is not None:
            return made
        await self._mark(job, model)
        with tempfile.TemporaryDirectory() as folder:
            with self._files.opened(job.id) as source:
                await asyncio.to_thread(unpack, source, Path(folder))
            return result_to_json(await self.backend.adopt(model, folder))

    async def log(self, project: str, name: str, given: str) -> None:
        """Write what was given into the run folder."""
        model = self.model(project, name)
        payload = await asyncio.to_thread(self._files.read, given, self.backend.records(model))
        asked = read_as(LogRequest, payload.request)
        await self.backend.log(
            model,
            payload.groups,
            split=asked.split,
            metrics=read_figures(asked.metrics),
            step=asked.step,
        )

    async def _payload(self, job: Job, model: TrainableModel[Any]) -> Payload:
        return await asyncio.to_thread(self._files.read, job.id, self.backend.records(model))

    async def _mark(self, job: Job, model: TrainableModel[Any]) -> None:
        """The checkpoint to come will know its job."""
        step = await self.backend.get_step(model)
        await self.backend.set_bookmark(model, Bookmark(JOB_MARK, {"id": job.id, "from": step}))

    async def _made_before(
        self, job: Job, model: TrainableModel[Any], split: str
    ) -> dict[str, Any] | None:
        """The result, if an earlier process saved the step and ended before it told so."""
        mark = (await self.backend.bookmarks(model)).get(JOB_MARK, {})
        step = await self.backend.get_step(model)
        if mark.get("id") != job.id or step <= mark.get("from", step):
            return None
        history = await asyncio.to_thread(MetricsLog(self.backend.folder(model).history).read)
        logged = [m.values for m in history if (m.step, m.split) == (mark["from"], split)]
        told = logged[-1] if logged else {}
        figures = {n: float(v) for n, v in told.items() if isinstance(v, int | float)}
        return result_to_json(TrainResult(step, trained=True, metrics=figures))

    @contextmanager
    def _watched(self, job: Job) -> Iterator[None]:
        """Progress of the model's step is this job's."""
        key = (job.project, job.name)
        self.running[key] = job.id
        try:
            yield
        finally:
            del self.running[key]


def positions(done: int, total: int) -> Progress:
    """How far a step is."""
    return Progress(done=done, total=total, unit="positions")


def read_as(kind: type[R], request: dict[str, Any]) -> R:
    """The request of a payload.

    Raises:
        PayloadError: it is another one.
    """
    try:
        return kind.model_validate(request)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"]))
        raise PayloadError(
            f"{where or 'the request'} of a payload: {first['msg']}",
            got=repr(first.get("input"))[:200],
        ) from error


def single(payload: Payload) -> list[Trajectory]:
    """Its trajectories, whatever group they came in."""
    return [trajectory for group in payload.groups for trajectory in group.trajectories]


def _bookmark(mark: Mark | None) -> Bookmark | None:
    return None if mark is None else Bookmark(mark.name, mark.place)
