"""The run folder of one model: its layout, its owner's lock, its `model.json` and `state.json`.

    <base_path>/<project>/models/<name>/
        model.json      what the run is          history.jsonl   metrics (metrics.py)
        checkpoints/    NNNN/ (checkpoints.py)   trajectories/   <split>/NNNN.parquet
        state.json      the user's own           records.sqlite  logs/  lock  holder.json

One process owns the folder, by a lock of the operating system that ends with the process (on a
shared disk, as far as that disk passes locks on); anybody may read without it. Left out: what the
files beside `model.json` and `state.json` hold.
"""

from __future__ import annotations

import json
import logging
import os
import shutil
import socket
import sys
import uuid
from contextlib import suppress
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from threading import Lock
from types import TracebackType
from typing import Any

from filelock import FileLock, Timeout

from art_core.errors import ConfigError, RunLocked
from art_core.files import read_object, write_object, writing
from art_core.names import check_name, same_folder

VERSION = 1
"""Version of the folder's layout, kept in `model.json`."""

_LONGEST_FILE = "a-file-as-long-as-the-longest-in-a-checkpoint.safetensors"

_log = logging.getLogger(__name__)
_state_lock = Lock()


@dataclass(frozen=True)
class Holder:
    """The process that owns a run folder, as it wrote itself down."""

    pid: int
    host: str
    command: str
    """Name of the program, without its arguments, which may hold secrets."""
    since: str
    """ISO 8601, UTC."""

    def __str__(self) -> str:
        return f"process {self.pid} ({self.command}) on {self.host} since {self.since}"


class RunDir:
    """Paths of a run folder, and its lock while this object owns it.

    `RunDir.at` is for reading and takes no lock, `RunDir.open` is for the owner.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.project, self.name = path.parents[1].name, path.name
        self.model_json = path / "model.json"
        self.state_json = path / "state.json"
        self.history = path / "history.jsonl"
        self.records = path / "records.sqlite"
        self.checkpoints = path / "checkpoints"
        self.logs = path / "logs"
        self._holder_json = path / "holder.json"
        self._lock: FileLock | None = None

    @classmethod
    def at(cls, base_path: str | Path, project: str, name: str) -> RunDir:
        """The folder's paths; nothing is made, locked or looked at.

        Raises:
            ConfigError: a name breaks the rule of `names.check_name`.
        """
        check_name("project", project)
        check_name("model", name)
        return cls(Path(base_path).expanduser().absolute() / project / "models" / name)

    @classmethod
    def open(
        cls,
        base_path: str | Path,
        project: str,
        name: str,
        *,
        base_model: str | None = None,
        config: dict[str, Any] | None = None,
    ) -> RunDir:
        """Become the folder's owner, making it if need be. Close it, or use it as a context.

        Args:
            base_path: where run folders are kept, ART's ".art".
            project: groups models; a name.
            name: of the model.
            base_model: recorded, and compared with what is recorded.
            config: JSON-ready settings of the model, recorded for readers; the newest counts.

        Raises:
            ConfigError: a name breaks the rule or differs only by case from a folder that is
                there, or the run was made with another base model.
            RunLocked: another owner holds it; the message names process, host and since when.
            RunFolderError: it can't be made or written.
        """
        run = cls.at(base_path, project, name)
        run._make()
        try:
            run._acquire()
            run._probe()
            run.describe(base_model=base_model, config=config)
            run._remove_leftovers()
        except BaseException:
            run.close()
            raise
        return run

    @property
    def locked(self) -> bool:
        """True while this object owns the folder."""
        return self._lock is not None

    def trajectories(self, split: str) -> Path:
        """Folder of a split's trajectory files."""
        return self.path / "trajectories" / check_name("split", split)

    def holder(self) -> Holder | None:
        """Who owns the folder by its own account; None if nobody said so."""
        with suppress(OSError, ValueError, TypeError):
            return Holder(**json.loads(self._holder_json.read_text("utf-8")))
        return None

    def is_held(self) -> bool:
        """True if an owner is at work in it, this process or another."""
        if not (self.path / "lock").exists():
            return False
        lock = FileLock(self.path / "lock", timeout=0, thread_local=False)
        try:
            lock.acquire()
        except Timeout:
            return True
        lock.release()
        return False

    def close(self) -> None:
        """Give the folder free. Safe to call twice."""
        lock, self._lock = self._lock, None
        if lock is not None:
            with suppress(OSError):  # the lock decides; holder.json only tells
                self._holder_json.unlink()
            lock.release()

    def __enter__(self) -> RunDir:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def describe(
        self, *, base_model: str | None = None, config: dict[str, Any] | None = None
    ) -> dict[str, Any]:
        """Bring `model.json` up to date, making the folder if need be; return what it says.

        Raises:
            ConfigError: the run was made with another base model, or by a newer version.
            RunFolderError: `model.json` is damaged, or can't be written.
        """
        self._make()
        old = read_object(self.model_json) or {}
        version, known = old.get("version", VERSION), old.get("base_model")
        if version != VERSION:
            raise ConfigError(
                f"the layout version of {self.model_json}",
                got=version,
                expected=str(VERSION),
                fix="Open it with the version of art-langgraph that wrote it, or a newer one.",
            )
        if base_model is not None and known not in (None, base_model):
            raise ConfigError(
                f"the base model of run {self.name!r} (project {self.project!r})",
                got=base_model,
                expected=f"{known!r}, which it was made with",
                fix="Give the model another name, or its own base model back.",
            )
        new = {
            **old,
            "version": VERSION,
            "project": self.project,
            "name": self.name,
            "base_model": known or base_model,
            "created": old.get("created") or utc_now(),
        }
        if config is not None:
            new["config"] = config
        if new != old:
            write_object(self.model_json, new)
        return new

    def read_state(self) -> dict[str, Any] | None:
        """The user's state; None if none was written."""
        return read_object(self.state_json)

    def overwrite_state(self, state: dict[str, Any]) -> None:
        """Replace the user's state by `state`, which must be JSON-ready."""
        with _state_lock:
            write_object(self.state_json, state)

    def merge_state(self, state: dict[str, Any]) -> dict[str, Any]:
        """Put the keys of `state` over the user's state; return the whole."""
        with _state_lock:
            merged = {**(read_object(self.state_json) or {}), **state}
            write_object(self.state_json, merged)
        return merged

    def _make(self) -> None:
        """Make the folder, unless another name already owns it on some file system."""
        for parent, own in ((self.path.parents[2], self.project), (self.path.parent, self.name)):
            names = _names_in(parent)
            twin = next((name for name in names if same_folder(name, own)), own)
            if own not in names and twin != own:
                raise ConfigError(
                    f"the folder {twin!r} is there already in {parent} and differs only by case "
                    "or accents, so that some systems see one folder",
                    got=own,
                    expected=f"{twin!r}, or a name that differs in its letters",
                )
        with writing(self.path):
            self.path.mkdir(parents=True, exist_ok=True)

    def _acquire(self) -> None:
        lock = FileLock(self.path / "lock", timeout=0, thread_local=False)
        with writing(self.path):
            try:
                lock.acquire()
            except Timeout:
                raise RunLocked(
                    f"the run folder {self.path} is in use by {self.holder() or 'another process'}",
                    fix="Wait for it or stop it; reading the folder needs no lock.",
                ) from None
        self._lock = lock
        before = self.holder()
        if before is not None:
            _log.warning("%s: taken over from %s, which did not close it", self.path, before)
        write_object(self._holder_json, asdict(_this_process()))

    def _probe(self) -> None:
        """Fail now, not after the first rollouts, if the longest path of a run can't be written."""
        aside = self.checkpoints / f".tmp-0000-{uuid.uuid4().hex[:12]}"
        with writing(self.path):
            try:
                aside.mkdir(parents=True)
                (aside / _LONGEST_FILE).touch()
            finally:
                shutil.rmtree(aside, ignore_errors=True)

    def _remove_leftovers(self) -> None:
        """Remove what killed owners left half-written; needs the lock."""
        for pattern in (".tmp-*", "*/.tmp-*", "trajectories/*/.tmp-*"):
            for leftover in self.path.glob(pattern):
                if leftover.is_dir():
                    shutil.rmtree(leftover, ignore_errors=True)
                else:
                    leftover.unlink(missing_ok=True)


def utc_now() -> str:
    """Now in ISO 8601, with its offset."""
    return datetime.now(UTC).isoformat()


def _this_process() -> Holder:
    command = Path(sys.argv[0]).name if sys.argv and sys.argv[0] else "python"
    return Holder(pid=os.getpid(), host=socket.gethostname(), command=command, since=utc_now())


def _names_in(folder: Path) -> list[str]:
    with suppress(OSError):
        return [path.name for path in folder.iterdir()]
    return []
