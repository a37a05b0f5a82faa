"""Token records by record id: what a policy really read and sampled, kept in SQLite.

In: one `TokenRecord` per choice of each call the endpoint answered, whole or broken off.
Out: the same records by (record id, choice index), or those of a rollout in order.
It leaves out what the client saw on the wire; `calls.ModelCall` joins the two.
"""

from __future__ import annotations

import json
import sqlite3
import threading
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from art_core.calls import Ids, Logprobs, Sampling
from art_core.errors import CaptureError

_SCHEMA_VERSION = 1
_COLUMNS = (
    "record_id, choice_index, rollout_id, model, step, prompt_ids, sampled_ids, logprobs, "
    "sampling, finish_reason, message, request_messages, tools, created, complete"
)
_SCHEMA = """
CREATE TABLE IF NOT EXISTS token_records (
    record_id TEXT NOT NULL,
    choice_index INTEGER NOT NULL,
    rollout_id TEXT,
    model TEXT NOT NULL,
    step INTEGER,
    prompt_ids BLOB NOT NULL,
    sampled_ids BLOB NOT NULL,
    logprobs BLOB NOT NULL,
    sampling TEXT NOT NULL,
    finish_reason TEXT,
    message TEXT NOT NULL,
    request_messages TEXT NOT NULL,
    tools TEXT,
    created REAL NOT NULL,
    complete INTEGER NOT NULL,
    PRIMARY KEY (record_id, choice_index)
);
CREATE INDEX IF NOT EXISTS token_records_of_rollout ON token_records (rollout_id);
"""


@dataclass(frozen=True, eq=False)
class TokenRecord:
    """One choice of one call, token for token. P prompt ids, S sampled ids."""

    record_id: str
    choice_index: int
    rollout_id: str | None
    """None if the caller named no rollout."""
    model: str
    """Name without its step; the base model's name for calls without an adapter."""
    step: int | None
    """None for the base model."""
    prompt_ids: Ids
    """[P] int32."""
    sampled_ids: Ids
    """[S] int32, end-of-turn token included."""
    logprobs: Logprobs
    """[S] float32, natural log, of the distribution that was sampled from."""
    sampling: Sampling
    finish_reason: str | None
    """"stop", "length", "tool_calls"; None if the call broke off."""
    message: dict[str, Any]
    """The assistant message as it was sent (OpenAI's shape)."""
    request_messages: list[dict[str, Any]]
    """The messages of the request, as received."""
    tools: list[dict[str, Any]] | None
    created: float
    """Seconds since the epoch at which the call began."""
    complete: bool
    """False if the client went away or the engine failed before the end."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "prompt_ids", np.ascontiguousarray(self.prompt_ids, np.int32))
        object.__setattr__(self, "sampled_ids", np.ascontiguousarray(self.sampled_ids, np.int32))
        object.__setattr__(self, "logprobs", np.ascontiguousarray(self.logprobs, np.float32))
        if len(self.sampled_ids) != len(self.logprobs):
            raise ValueError(
                f"record {self.record_id!r}: {len(self.sampled_ids)} sampled ids but "
                f"{len(self.logprobs)} logprobs"
            )

    @property
    def key(self) -> tuple[str, int]:
        """Identity of the record."""
        return (self.record_id, self.choice_index)


class RecordStore:
    """Token records on disk. Every method may be called from any thread.

    A record that `put` returned from survives a killed process (SQLite in WAL mode).

    Args:
        path: the database file, made if missing; None keeps the records in memory.

    Raises:
        CaptureError: the file is not a record store, or one of a newer version.
    """

    def __init__(self, path: Path | None = None) -> None:
        self._lock = threading.Lock()
        self._db = sqlite3.connect(
            ":memory:" if path is None else path, check_same_thread=False, isolation_level=None
        )
        try:
            self._db.execute("PRAGMA journal_mode = WAL")
            self._db.execute("PRAGMA synchronous = NORMAL")
            version = self._db.execute("PRAGMA user_version").fetchone()[0]
            if version not in (0, _SCHEMA_VERSION):
                raise CaptureError(
                    f"record store {str(path)!r} has another version",
                    got=version,
                    expected=str(_SCHEMA_VERSION),
                    fix="Open it with the release that wrote it, or start a new run folder.",
                )
            self._db.executescript(_SCHEMA)
            self._db.execute(f"PRAGMA user_version = {_SCHEMA_VERSION}")
        except sqlite3.DatabaseError as error:
            self._db.close()
            raise CaptureError(
                f"can't open the record store {str(path)!r} ({error})",
                fix="Move the file away; a new one is made.",
            ) from error
        except CaptureError:
            self._db.close()
            raise

    def put(self, records: Iterable[TokenRecord]) -> None:
        """Store new records, all of them or none.

        Raises:
            CaptureError: a record of that id and choice is already there.
        """
        rows = [_to_row(record) for record in records]
        with self._lock:
            self._db.execute("BEGIN IMMEDIATE")
            try:
                self._db.executemany(
                    f"INSERT INTO token_records ({_COLUMNS}) VALUES ({', '.join('?' * 15)})", rows
                )
            except sqlite3.IntegrityError as error:
                self._db.execute("ROLLBACK")
                raise CaptureError(
                    "a token record is already stored",
                    got=[row[:2] for row in rows],
                    expected="a new record id for every call",
                ) from error
            except BaseException:
                self._db.execute("ROLLBACK")
                raise
            self._db.execute("COMMIT")

    def get(self, record_ids: Iterable[str]) -> dict[tuple[str, int], TokenRecord]:
        """The records of `record_ids`, all choices of each; unknown ids are left out."""
        found: dict[tuple[str, int], TokenRecord] = {}
        wanted = list(dict.fromkeys(record_ids))
        for start in range(0, len(wanted), 500):
            part = wanted[start : start + 500]
            for record in self._select(
                f"record_id IN ({', '.join('?' * len(part))}) ORDER BY rowid", part
            ):
                found[record.key] = record
        return found

    def answered_in(self, rollout_id: str, *, after: float) -> list[str]:
        """Ids of the whole answers of a rollout, begun after a time (seconds since the epoch)."""
        with self._lock:
            rows = self._db.execute(
                "SELECT DISTINCT record_id FROM token_records WHERE rollout_id = ? AND complete "
                "AND created >= ? ORDER BY created",
                (rollout_id, after),
            ).fetchall()
        return [row[0] for row in rows]

    def of_rollout(self, rollout_id: str) -> list[TokenRecord]:
        """The records of a rollout, in the order their calls began."""
        return self._select("rollout_id = ? ORDER BY created, rowid", [rollout_id])

    def size(self) -> int:
        """Bytes of the file that records take."""
        with self._lock:
            pages, free, page = (
                self._db.execute(f"PRAGMA {name}").fetchone()[0]
                for name in ("page_count", "freelist_count", "page_size")
            )
        return int((pages - free) * page)

    def newest(self) -> int:
        """Number of the newest record; numbers grow. 0 if there is none."""
        with self._lock:
            return int(
                self._db.execute("SELECT COALESCE(MAX(rowid), 0) FROM token_records").fetchone()[0]
            )

    def drop(self, up_to: int, *, at_most: int | None = None) -> int:
        """Delete the oldest records, up to that number; how many they were.

        Args:
            at_most: so many of them.
        """
        limit = -1 if at_most is None else at_most
        with self._lock:
            return self._db.execute(
                "DELETE FROM token_records WHERE rowid IN (SELECT rowid FROM token_records "
                "WHERE rowid <= ? ORDER BY rowid LIMIT ?)",
                (up_to, limit),
            ).rowcount

    def close(self) -> None:
        """Close the file. Safe to call twice."""
        with self._lock:
            self._db.close()

    def _select(self, where: str, values: Sequence[str]) -> list[TokenRecord]:
        with self._lock:
            rows = self._db.execute(
                f"SELECT {_COLUMNS} FROM token_records WHERE {where}", values
            ).fetchall()
        return [_from_row(row) for row in rows]


def _to_row(record: TokenRecord) -> tuple[Any, ...]:
    return (
        record.record_id,
        record.choice_index,
        record.rollout_id,
        record.model,
        record.step,
        record.prompt_ids.astype("<i4").tobytes(),
        record.sampled_ids.astype("<i4").tobytes(),
        record.logprobs.astype("<f4").tobytes(),
        json.dumps(asdict(record.sampling)),
        record.finish_reason,
        json.dumps(record.message),
        json.dumps(record.request_messages),
        None if record.tools is None else json.dumps(record.tools),
        record.created,
        int(record.complete),
    )


def _from_row(row: tuple[Any, ...]) -> TokenRecord:
    return TokenRecord(
        record_id=row[0],
        choice_index=row[1],
        rollout_id=row[2],
        model=row[3],
        step=row[4],
        prompt_ids=np.frombuffer(row[5], "<i4").astype(np.int32),
        sampled_ids=np.frombuffer(row[6], "<i4").astype(np.int32),
        logprobs=np.frombuffer(row[7], "<f4").astype(np.float32),
        sampling=Sampling.from_json(json.loads(row[8])),
        finish_reason=row[9],
        message=json.loads(row[10]),
        request_messages=json.loads(row[11]),
        tools=None if row[12] is None else json.loads(row[12]),
        created=row[13],
        complete=bool(row[14]),
    )
