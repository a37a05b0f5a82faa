"""What the server was asked for, on disk: its jobs, and the models that it serves.

In: jobs as they are asked for, begin and end. Out: the same after any end of the process. A job is
written before it is acknowledged. Left out: trajectories, which lie in files beside until their
job has ended, and progress, which is nobody's business after a restart.
"""

from __future__ import annotations

import json
import sqlite3
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from art_core.errors import RunFolderError
from art_core.wire.protocol import ENDED, Job, RegisterRequest, State

_SCHEMA_VERSION = 1
_SCHEMA = """
CREATE TABLE IF NOT EXISTS jobs (
    number INTEGER PRIMARY KEY,
    id TEXT NOT NULL UNIQUE,
    key TEXT UNIQUE,
    kind TEXT NOT NULL,
    project TEXT NOT NULL,
    name TEXT NOT NULL,
    state TEXT NOT NULL,
    created REAL NOT NULL,
    started REAL,
    ended REAL,
    request TEXT NOT NULL,
    result TEXT,
    error TEXT
);
CREATE TABLE IF NOT EXISTS models (
    project TEXT NOT NULL,
    name TEXT NOT NULL,
    request TEXT NOT NULL,
    PRIMARY KEY (project, name)
);
"""
_JOB = "id, key, kind, project, name, state, created, started, ended, result, error"


class Ledger:
    """Jobs and models. Every method may be called from any thread.

    Args:
        path: the database file, made if missing.

    Raises:
        RunFolderError: the file is damaged, or of a newer release.
    """

    def __init__(self, path: Path) -> None:
        self._lock = threading.Lock()
        self._db = sqlite3.connect(path, check_same_thread=False, isolation_level=None)
        try:
            self._db.execute("PRAGMA journal_mode = WAL")
            self._db.execute("PRAGMA synchronous = FULL")  # a job that is acknowledged is kept
            version = self._db.execute("PRAGMA user_version").fetchone()[0]
            if version not in (0, _SCHEMA_VERSION):
                raise RunFolderError(
                    f"the server's ledger {path.name} has another version",
                    got=version,
                    expected=str(_SCHEMA_VERSION),
                    fix="Serve with the release that wrote it.",
                )
            self._db.executescript(_SCHEMA)
            self._db.execute(f"PRAGMA user_version = {_SCHEMA_VERSION}")
        except sqlite3.DatabaseError as error:
            self._db.close()
            raise RunFolderError(
                f"the server's ledger {path.name} can't be opened ({error})",
                fix="Move it away; runs and checkpoints stay, jobs that had not ended are lost.",
            ) from error
        except RunFolderError:
            self._db.close()
            raise

    def add(self, job: Job, request: dict[str, Any]) -> Job:
        """Keep a new job; or the one that was kept under the same key."""
        with self._lock:
            known = self._find("key = ?", job.key) if job.key is not None else []
            if known:
                return known[0]
            self._db.execute(
                f"INSERT INTO jobs ({_JOB}, request) VALUES ({', '.join('?' * 12)})",
                (
                    *(job.id, job.key, job.kind, job.project, job.name, job.state, job.created),
                    *(None, None, None, None, json.dumps(request)),
                ),
            )
        return job

    def begin(self, job_id: str) -> None:
        """It runs from now on."""
        with self._lock:
            self._db.execute(
                "UPDATE jobs SET state = 'running', started = ? WHERE id = ?",
                (time.time(), job_id),
            )

    def end(
        self,
        job_id: str,
        state: State,
        *,
        result: dict[str, Any] | None = None,
        error: dict[str, Any] | None = None,
    ) -> None:
        """It has ended; what came of it."""
        told = [None if value is None else json.dumps(value) for value in (result, error)]
        with self._lock:
            self._db.execute(
                "UPDATE jobs SET state = ?, ended = ?, result = ?, error = ? WHERE id = ?",
                (state, time.time(), *told, job_id),
            )

    def job(self, job_id: str) -> Job | None:
        """The job of that id."""
        return next(iter(self.jobs(id=job_id)), None)

    def request(self, job_id: str) -> dict[str, Any]:
        """What a job was asked for with."""
        with self._lock:
            row = self._db.execute("SELECT request FROM jobs WHERE id = ?", (job_id,)).fetchone()
        found: dict[str, Any] = json.loads(row[0])
        return found

    def jobs(self, *, states: Sequence[str] = (), **columns: str | None) -> list[Job]:
        """Jobs, the oldest first.

        Args:
            states: of these; none given: of any.
            columns: `id`, `key`, `project`, `name` that they have; None: any.
        """
        wanted = {name: value for name, value in columns.items() if value is not None}
        parts = [f"{name} = ?" for name in wanted]
        if states:
            parts.append(f"state IN ({', '.join('?' * len(states))})")
        with self._lock:
            return self._find(" AND ".join(parts) or "1", *wanted.values(), *states)

    def unended(self) -> list[Job]:
        """What the process before this one left to do, the oldest first."""
        return [job for job in self.jobs() if job.state not in ENDED]

    def forget_ended(self, before: float) -> list[str]:
        """Drop jobs that ended before a time; their ids."""
        with self._lock:
            rows = self._db.execute(
                "DELETE FROM jobs WHERE ended < ? RETURNING id", (before,)
            ).fetchall()
        return [row[0] for row in rows]

    def keep_model(self, model: RegisterRequest) -> None:
        """Serve it again after the next start."""
        with self._lock:
            self._db.execute(
                "INSERT OR REPLACE INTO models VALUES (?, ?, ?)",
                (model.project, model.name, model.model_dump_json()),
            )

    def models(self) -> list[RegisterRequest]:
        """Those that were kept."""
        with self._lock:
            rows = self._db.execute("SELECT request FROM models ORDER BY rowid").fetchall()
        return [RegisterRequest.model_validate_json(row[0]) for row in rows]

    def close(self) -> None:
        """Close the file. Safe to call twice."""
        with self._lock:
            self._db.close()

    def _find(self, where: str, *values: Any) -> list[Job]:
        rows = self._db.execute(
            f"SELECT {_JOB} FROM jobs WHERE {where} ORDER BY number", values
        ).fetchall()
        return [_job(row) for row in rows]


def _job(row: tuple[Any, ...]) -> Job:
    plain = dict(zip(_JOB.split(", "), row, strict=True))
    for name in ("result", "error"):
        plain[name] = None if plain[name] is None else json.loads(plain[name])
    return Job.model_validate(plain)
