"""`HttpBackend`: a server that serves and trains, under the same protocol as `LocalBackend`.

In: a URL and a key. Out: what `Backend` promises. Trajectories go out as a stream of frames, made
while they are sent; what takes long is a job of the server, which outlives a lost connection and
this process. Left out: state (`model.merge_state`), which stays on this side.
"""

from __future__ import annotations

import asyncio
import io
import logging
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, Literal, Self, TypeVar

from pydantic import BaseModel, ValidationError

from art_core.backend import Inference, TrainResult
from art_core.bookmarks import Bookmark
from art_core.client.http import Http
from art_core.client.jobs import cancelled_by_key, followed
from art_core.client.kept_log import keep
from art_core.config import TrainConfig, TrainSFTConfig, environment
from art_core.errors import ARTError, BadAnswer, ServerError, WireMismatch
from art_core.model import TrainableModel
from art_core.progress import progress
from art_core.trajectories import Trajectory, TrajectoryGroup
from art_core.wire import protocol as wire
from art_core.wire.adapter_tar import tar_of, unpack
from art_core.wire.payload import Payload, compressed, read_payload, write_payload
from art_core.wire.results import result_from_json, told_figures

_log = logging.getLogger(__name__)
R = TypeVar("R", bound=BaseModel)


class HttpBackend:
    """Serves and trains on another machine, or in another process.

    Args:
        url: of the server, such as "http://gpu-box:7999".
        api_key: None takes ART_API_KEY from the environment, if it is set.
        send: "calls" sends calls whole; "records" sends those that the server answered by their
            ids alone, which is less to send, as long as the server keeps its records.
        show_progress: a bar (or plain lines) while the server is at work; else silent.
        keep_log: write what is logged into the model's run folder on this side too.

    Raises:
        ConfigError: `url` is none of a server, or `api_key` can't be sent.
    """

    def __init__(
        self,
        url: str,
        *,
        api_key: str | None = None,
        send: Literal["calls", "records"] = "calls",
        show_progress: bool = True,
        keep_log: bool = True,
    ) -> None:
        self._keep_log = keep_log
        self._http = Http(url, api_key or environment().api_key)
        self._by_record = send == "records"
        self._show_progress = show_progress
        self._is_known = False

    def __repr__(self) -> str:
        return f"HttpBackend({self._http.url!r})"

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def register(self, model: TrainableModel) -> Inference:
        """As `Backend.register`.

        Raises:
            WireMismatch: the server is of another release.
            ServerError: a kind of it says what is wrong between the two.
            ARTError: as `LocalBackend.register`.
        """
        await self._connect()
        asked = wire.RegisterRequest(
            project=model.project,
            name=model.name,
            base_model=model.base_model,
            art_config=model.art_config,
        )
        response = await self._http.ask(
            "POST",
            wire.MODELS,
            content=asked.model_dump(mode="json"),
            headers={wire.KEY_HEADER: wire.new_key()},
        )
        if response.status_code == 202:
            job = _read(wire.JobAnswer, response.content).job
            known = _as(wire.Registered, await self._followed(job, "load"))
        else:
            known = _read(wire.Registered, response.content)
        return Inference(
            base_url=self._http.url + known.base_path,
            api_key=self._http.key or "none",
            model_name=known.model_name,
        )

    async def train(
        self,
        model: TrainableModel,
        groups: Sequence[TrajectoryGroup],
        config: TrainConfig,
        *,
        bookmark: Bookmark | None = None,
    ) -> TrainResult:
        """As `Backend.train`. Cancelled, it cancels the job.

        Raises:
            ARTError: as `LocalBackend.train`, and those of the way to the server (`ServerError`).
        """
        asked = wire.TrainRequest(config=config, bookmark=_mark(bookmark))
        result = result_from_json(await self._job(wire.TRAIN, "train", model, asked, groups))
        played = result.step - result.trained
        await self._kept(model, "train", played, groups, {**result.metrics, **_outcome(result)})
        return result

    async def train_sft(
        self,
        model: TrainableModel,
        trajectories: Sequence[Trajectory],
        config: TrainSFTConfig,
        *,
        bookmark: Bookmark | None = None,
    ) -> TrainResult:
        """As `Backend.train_sft`. Cancelled, it cancels the job."""
        asked = wire.SFTRequest(config=config, bookmark=_mark(bookmark))
        groups = [TrajectoryGroup(list(trajectories))]
        told = await self._job(wire.TRAIN_SFT, "train_sft", model, asked, groups)
        result = result_from_json(told)
        before = result.step - result.trained
        await self._kept(model, "sft", before, (), {**result.metrics, **_outcome(result)})
        return result

    async def sft_loss(
        self, model: TrainableModel, trajectories: Sequence[Trajectory], config: TrainSFTConfig
    ) -> float:
        """As `Backend.sft_loss`."""
        asked = wire.SFTRequest(config=config)
        groups = [TrajectoryGroup(list(trajectories))]
        told = await self._job(wire.SFT_LOSS, "sft_loss", model, asked, groups)
        return float(told["loss"])

    async def bookmarks(self, model: TrainableModel) -> dict[str, dict[str, Any]]:
        """As `Backend.bookmarks`."""
        response = await self._http.ask("GET", _path(wire.BOOKMARKS, model))
        return _read(wire.Bookmarks, response.content).bookmarks

    async def set_bookmark(self, model: TrainableModel, bookmark: Bookmark) -> None:
        """As `Backend.set_bookmark`."""
        mark = _mark(bookmark)
        assert mark is not None
        path = _path(wire.BOOKMARKS, model)
        await self._http.ask("PUT", path, content=mark.model_dump(mode="json"))

    async def join(self, model: TrainableModel, trajectories: Sequence[Trajectory]) -> None:
        """As `Backend.join`; the trajectories go to the server, and their calls come back."""
        whole = list({id(t): t for t in trajectories}.values())
        if not whole:
            return
        asked, groups = wire.JoinRequest(), [TrajectoryGroup(whole)]
        job = await self._submitted(wire.JOIN, "join", model, asked, groups)
        await self._followed(job, "join")
        payload = await self._payload(wire.path(wire.RESULT_OF_JOB, id=job.id))
        joined = [t for group in payload.groups for t in group.trajectories]
        if len(joined) != len(whole):
            raise BadAnswer("the server completed other trajectories", got=len(joined))
        for trajectory, other in zip(whole, joined, strict=True):
            trajectory.calls = other.calls

    async def get_step(self, model: TrainableModel) -> int:
        """As `Backend.get_step`."""
        response = await self._http.ask("GET", _path(wire.MODEL, model))
        return _read(wire.ModelInfo, response.content).step

    async def log(
        self,
        model: TrainableModel,
        groups: Sequence[TrajectoryGroup],
        *,
        split: str,
        metrics: dict[str, Any] | None = None,
        step: int | None = None,
    ) -> None:
        """As `Backend.log`. It is sent once: a second line could not be told from a first."""
        asked = wire.LogRequest(split=split, metrics=told_figures(metrics), step=step)
        await self._http.ask(
            "POST",
            _path(wire.LOG, model),
            headers=_HEADERS,
            body=self._body("log", asked, groups),
            repeats=False,
        )
        if self._keep_log:
            at = await self.get_step(model) if step is None else step
            await self._kept(model, split, at, groups, metrics)

    async def delete_checkpoints(self, model: TrainableModel, *, best_metric: str) -> list[int]:
        """As `Backend.delete_checkpoints`."""
        response = await self._http.ask(
            "POST", _path(wire.PRUNE, model), content={"best_metric": best_metric}
        )
        return list(_read(wire.Pruned, response.content).deleted)

    async def close(self) -> None:
        """Close the connections; the server goes on. Safe to call twice."""
        await self._http.close()

    # What only a server has

    async def checkpoints(self, model: TrainableModel) -> list[wire.CheckpointInfo]:
        """The whole checkpoints of a model, the oldest first, with their figures."""
        response = await self._http.ask("GET", _path(wire.CHECKPOINTS, model))
        return list(_read(wire.Checkpoints, response.content).checkpoints)

    async def download_checkpoint(
        self, model: TrainableModel, step: int, folder: str | Path
    ) -> Path:
        """Fetch the adapter of a step, in peft's form, into `folder`, which is made if missing.

        Raises:
            CheckpointError: there is no such step, or what came is cut.
        """
        target = Path(folder)
        path = wire.path(wire.CHECKPOINT, project=model.project, name=model.name, step=step)
        response = await self._http.ask("GET", path)
        await asyncio.to_thread(unpack, io.BytesIO(response.content), target)
        return target

    async def adopt(self, model: TrainableModel, adapter: str | Path) -> TrainResult:
        """As `LocalBackend.adopt`: the adapter in a folder here is sent, and becomes the next step.

        Raises:
            CheckpointError: it is no adapter for this model; nothing has changed.
        """
        folder = Path(adapter)
        response = await self._http.ask(
            "PUT",
            _path(wire.CHECKPOINTS, model),
            headers={"content-type": wire.TAR, wire.KEY_HEADER: wire.new_key()},
            body=lambda: tar_of(folder),
        )
        job = _read(wire.JobAnswer, response.content).job
        return result_from_json(await self._followed(job, "upload"))

    async def fork(
        self,
        model: TrainableModel,
        from_name: str,
        *,
        from_project: str | None = None,
        step: int | None = None,
    ) -> TrainResult:
        """As `LocalBackend.fork`, among the server's models.

        Raises:
            CheckpointError: there is no such step, or it does not fit; nothing has changed.
        """
        asked = wire.ForkRequest(from_name=from_name, from_project=from_project, step=step)
        response = await self._http.ask(
            "POST",
            _path(wire.FORK, model),
            content=asked.model_dump(mode="json"),
            headers={wire.KEY_HEADER: wire.new_key()},
        )
        job = _read(wire.JobAnswer, response.content).job
        return result_from_json(await self._followed(job, "fork"))

    async def jobs(self, model: TrainableModel) -> list[wire.Job]:
        """What the server was asked to do with a model, the oldest first."""
        query = {"project": model.project, "name": model.name}
        response = await self._http.ask("GET", wire.JOBS, query=query)
        return list(_read(wire.Jobs, response.content).jobs)

    async def rollout_url(self, model: TrainableModel, rollout_id: str | None = None) -> RolloutUrl:
        """A base URL for any OpenAI client: its calls are recorded as one rollout."""
        asked = wire.RolloutRequest(model=model.name, rollout_id=rollout_id)
        response = await self._http.ask("POST", wire.ROLLOUTS, content=asked.model_dump())
        told = _read(wire.RolloutUrl, response.content)
        return told.model_copy(update={"base_url": self._http.url + told.base_url})

    async def trajectory(self, rollout_id: str) -> Trajectory:
        """The calls that were made through a rollout's URL; the reward is yours to set."""
        path = wire.path(wire.ROLLOUT_TRAJECTORY, rollout_id=rollout_id)
        payload = await self._payload(path)
        [trajectory] = [t for group in payload.groups for t in group.trajectories]
        return trajectory

    # How

    async def _connect(self) -> None:
        """See, once, that a server of this release answers."""
        if self._is_known:
            return
        response = await self._http.ask("GET", wire.VERSION)
        told = _read(wire.ServerVersion, response.content)
        if told.wire != wire.WIRE:
            raise WireMismatch(
                f"the server is of release {told.version}, and speaks another version of the wire",
                got=told.wire,
                expected=str(wire.WIRE),
                fix="Install the same release of art-langgraph on both sides.",
            )
        self._is_known = True

    async def _kept(
        self,
        model: TrainableModel,
        split: str,
        step: int,
        groups: Sequence[TrajectoryGroup],
        metrics: dict[str, Any] | None,
    ) -> None:
        """What is kept here is a copy: where it can't be, that is told, and no more."""
        if not self._keep_log:
            return
        try:
            await asyncio.to_thread(keep, model, split, step, groups, metrics)
        except ARTError as error:
            _log.warning("step %d is logged by the server alone: %s", step, error)

    async def _job(
        self,
        template: str,
        kind: str,
        model: TrainableModel,
        asked: BaseModel,
        groups: Iterable[TrajectoryGroup],
    ) -> dict[str, Any]:
        job = await self._submitted(template, kind, model, asked, groups)
        return await self._followed(job, kind)

    async def _submitted(
        self,
        template: str,
        kind: str,
        model: TrainableModel,
        asked: BaseModel,
        groups: Iterable[TrajectoryGroup],
    ) -> wire.Job:
        key = wire.new_key()  # outside the loop that repeats: a reply that was lost is found again
        try:
            response = await self._http.ask(
                "POST",
                _path(template, model),
                headers={**_HEADERS, wire.KEY_HEADER: key},
                body=self._body(kind, asked, groups),
            )
        except asyncio.CancelledError:
            await asyncio.shield(cancelled_by_key(self._http, key))
            raise
        return _read(wire.JobAnswer, response.content).job

    async def _followed(self, job: wire.Job, what: str) -> dict[str, Any]:
        with progress(what, shown=self._show_progress) as display:

            def tell(now: wire.Progress) -> None:
                display.show(now.done, now.total, now.unit)

            return await followed(self._http, job, tell)

    def _body(
        self, kind: str, asked: BaseModel, groups: Iterable[TrajectoryGroup]
    ) -> Callable[[], Iterable[bytes]]:
        request = asked.model_dump(mode="json")
        return lambda: compressed(
            write_payload(kind, request, groups, by_record=self._by_record and kind == "train")
        )

    async def _payload(self, path: str) -> Payload:
        response = await self._http.ask("GET", path)
        return await asyncio.to_thread(read_payload, io.BytesIO(response.content))


RolloutUrl = wire.RolloutUrl
_HEADERS = {"content-type": wire.PAYLOAD, "content-encoding": "gzip"}


def _outcome(result: TrainResult) -> dict[str, Any]:
    return {"trained": result.trained, **({"reason": result.reason} if result.reason else {})}


def _path(template: str, model: TrainableModel) -> str:
    return wire.path(template, project=model.project, name=model.name)


def _mark(bookmark: Bookmark | None) -> wire.Mark | None:
    return None if bookmark is None else wire.Mark(name=bookmark.name, place=bookmark.place)


def _read(kind: type[R], raw: bytes) -> R:
    try:
        return kind.model_validate_json(raw)
    except ValidationError as error:
        raise _bad(kind, raw) from error


def _as(kind: type[R], told: Any) -> R:
    try:
        return kind.model_validate(told)
    except ValidationError as error:
        raise _bad(kind, repr(told).encode()) from error


def _bad(kind: type[BaseModel], raw: bytes) -> ServerError:
    return BadAnswer(
        f"an answer of the server is no {kind.__name__}",
        got=raw[:200].decode("utf-8", "replace"),
        fix="Check the URL: another program may answer there.",
    )
