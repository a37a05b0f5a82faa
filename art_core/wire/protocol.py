"""What client and server say to each other over HTTP: paths, headers, requests, jobs, events.

In and out: small records that both sides read and write. A request refuses fields it does not
know; an answer that has more than was asked for is read without them, so that a server may tell
more within one version. Left out: trajectories (payload.py) and faults (errors.py).

Every POST carries an `Idempotency-Key`, made once for what the caller wants and sent again with
each repetition: the server does a thing once, and answers the same key with the same job.
"""

from __future__ import annotations

import uuid
from typing import Any, Literal, TypeAlias
from urllib.parse import quote

from pydantic import BaseModel, ConfigDict, Field

from art_core.config import ModelConfig, TrainConfig, TrainSFTConfig

WIRE = 1
"""Version of all that is in `art_core.wire`. Client and server must have the same."""

# --- headers and media types

WIRE_HEADER = "x-art-wire"
"""Sent with every request below /api: the client's `WIRE`."""
KEY_HEADER = "Idempotency-Key"
MAX_KEY = 128
"""Characters of an idempotency key: letters, digits, "-", "_"."""
PAYLOAD = "application/vnd.art.trajectories"
"""A stream of frames, see payload.py; `Content-Encoding: gzip` is allowed."""
TAR = "application/x-tar"
JSON_LINES = "application/x-ndjson"
EVENTS = "text/event-stream"
LAST_EVENT = "Last-Event-ID"

# --- paths, filled in by `path`; each part is percent-encoded whole

VERSION = "/api/version"
MODELS = "/api/models"
MODEL = "/api/models/{project}/{name}"
TRAIN = MODEL + "/train"
TRAIN_SFT = MODEL + "/train_sft"
SFT_LOSS = MODEL + "/sft_loss"
JOIN = MODEL + "/join"
LOG = MODEL + "/log"
"""POST a payload with `LogRequest`."""
HISTORY = MODEL + "/history"
BOOKMARKS = MODEL + "/bookmarks"
CHECKPOINTS = MODEL + "/checkpoints"
"""GET lists them; PUT takes an adapter as a tar, which becomes the next step: 202 with a job."""
CHECKPOINT = MODEL + "/checkpoints/{step}"
PRUNE = MODEL + "/checkpoints/prune"
FORK = MODEL + "/fork"
JOBS = "/api/jobs"
"""GET with `?project=`, `&name=`, `&state=` (may come again) or `?key=` (an idempotency key)."""
JOB = "/api/jobs/{id}"
EVENTS_OF_JOB = "/api/jobs/{id}/events"
RESULT_OF_JOB = "/api/jobs/{id}/result"
"""The payload of a job of kind "join" (joined.py)."""
CANCEL_JOB = "/api/jobs/{id}/cancel"
ROLLOUTS = "/api/rollouts"
ROLLOUT_TRAJECTORY = "/api/rollouts/{rollout_id}/trajectory"


def path(template: str, **parts: str | int) -> str:
    """A path with its parts put in, so that no part can become two.

    >>> path(MODEL, project="my agents", name="a%2F#b")
    '/api/models/my%20agents/a%252F%23b'
    """
    return template.format(**{name: quote(str(part), safe="") for name, part in parts.items()})


def new_key() -> str:
    """An idempotency key. Make it outside the loop that repeats the request."""
    return uuid.uuid4().hex


class _Asked(BaseModel):
    """Of a request."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class _Told(BaseModel):
    """Of an answer."""

    model_config = ConfigDict(extra="ignore", frozen=True)


# --- GET /api/version


class ServerVersion(_Told):
    """Who answers."""

    version: str
    """Of art-langgraph."""
    wire: int


# --- models


class RegisterRequest(_Asked):
    """POST /api/models. The server decides what of `base_model` and `art_config.engine` a client
    may choose: paths, flags and environments of its processes are not.
    """

    project: str
    name: str
    base_model: str
    art_config: ModelConfig


class Registered(_Told):
    """200; or 202 with a `JobAnswer`, whose job's result is this."""

    model_name: str
    """Served name of the latest step."""
    step: int
    base_path: str = "/v1"
    """Of the OpenAI surface, put behind the server's URL."""


class ModelInfo(_Told):
    """GET /api/models/{project}/{name}; a list of them as `{"models": [...]}` without a name."""

    project: str
    name: str
    base_model: str
    step: int
    steps: tuple[int, ...] = ()
    """Whole checkpoints."""
    model_name: str | None = None
    """Served name; None: the model is known, and not loaded."""


class Mark(_Asked):
    """A `Bookmark`."""

    name: str
    place: dict[str, Any]


class Bookmarks(_Told):
    """GET .../bookmarks. PUT takes a `Mark` and answers the same."""

    bookmarks: dict[str, dict[str, Any]]


# --- requests in a payload's first frame; the field "kind" of the frame says which


class TrainRequest(_Asked):
    """Kind "train"; groups follow."""

    config: TrainConfig
    bookmark: Mark | None = None


class SFTRequest(_Asked):
    """Kinds "train_sft" and "sft_loss"; trajectories follow, without a group."""

    config: TrainSFTConfig
    bookmark: Mark | None = None


class JoinRequest(_Asked):
    """Kind "join"; trajectories follow, without a group."""


class LogRequest(_Asked):
    """Kind "log"; groups follow. Answered by 200 and `{}` when all is written."""

    split: str
    metrics: dict[str, Any] | None = None
    """Finite numbers, bools, text, None; others by `results.told_figures`."""
    step: int | None = None
    """None: the latest."""


# --- jobs

State: TypeAlias = Literal["queued", "running", "done", "failed", "cancelled"]
ENDED: frozenset[State] = frozenset({"done", "failed", "cancelled"})


class Progress(_Told):
    """How far a job is."""

    done: int = 0
    total: int | None = None
    """None: not known."""
    unit: str = ""
    """What is counted: "positions", "bytes"."""


class Job(_Told):
    """Something that takes long. It is kept, and found again by its id or its key."""

    id: str
    kind: str
    """"register", "train", "train_sft", "sft_loss", "join", "fork" or "upload"."""
    project: str
    name: str
    state: State
    key: str | None = None
    """The idempotency key that it was asked for with."""
    created: float
    """Seconds since the epoch."""
    started: float | None = None
    ended: float | None = None
    progress: Progress = Progress()
    result: dict[str, Any] | None = None
    """Of "train" and "train_sft" a train result (results.py), of "sft_loss" `{"loss": ...}`, of
    "register" a `Registered`, of others `{}` or what their route says."""
    error: dict[str, Any] | None = None
    """Why it failed (errors.py)."""

    @property
    def over(self) -> bool:
        """True if its state is final."""
        return self.state in ENDED


class JobAnswer(_Told):
    """202 of what starts a job, and GET /api/jobs/{id}, POST .../cancel."""

    job: Job


class Jobs(_Told):
    """GET /api/jobs; the oldest first."""

    jobs: tuple[Job, ...]


class JobEvent(_Told):
    """One server-sent event of a job: `id: <id>`, and the rest as JSON in `data:`.

    A stream sends the events after `Last-Event-ID`, then new ones as they come, a comment line at
    least every 15 s, and ends after a final state.
    """

    id: int
    """Counts from 1."""
    kind: Literal["state", "progress", "note"]
    state: State | None = None
    progress: Progress | None = None
    text: str = ""
    """For people: of a note, or the figures beside a progress."""


# --- checkpoints


class CheckpointInfo(_Told):
    """One of GET .../checkpoints, `{"checkpoints": [...]}`, the oldest first."""

    step: int
    created: float | None = None
    """Seconds since the epoch."""
    size: int | None = None
    """Bytes of the adapter."""
    metrics: dict[str, float] = Field(default_factory=dict)
    """"<split>/<name>"."""


class Checkpoints(_Told):
    checkpoints: tuple[CheckpointInfo, ...]


class ForkRequest(_Asked):
    """POST .../fork: the model begins as another one is. 202 with a job."""

    from_name: str
    from_project: str | None = None
    """None: the same."""
    step: int | None = None
    """None: its latest."""


class PruneRequest(_Asked):
    """POST .../checkpoints/prune: the latest and the best stay."""

    best_metric: str
    """"<split>/<name>", the higher the better."""


class Pruned(_Told):
    deleted: tuple[int, ...]


# --- rollouts


class RolloutRequest(_Asked):
    """POST /api/rollouts: a URL whose calls are recorded, for clients of any language."""

    model: str
    """Served name."""
    rollout_id: str | None = None
    """None: a new one."""
    step: int | None = None
    """Pins a step."""


class RolloutUrl(_Told):
    rollout_id: str
    base_url: str
    """A path below the server's URL, ends in "/v1"; its signature is no key."""
