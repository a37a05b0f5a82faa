"""Trajectories on the wire: a stream of frames that neither side ever holds whole.

In: a request and groups. Out: bytes, and the same request and groups read back, all that a
trajectory file keeps, ids and float32 logprobs exact. A frame is the length of a JSON header (4
bytes, little-endian), the header, and the arrays it names as raw little-endian bytes. The first
has the request, each of the others a row (trajectory_rows.py), the last their number, so that a
stream that was cut is seen. A call may be sent as its record id alone; see `fill`.
"""

from __future__ import annotations

import json
import struct
import zlib
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from typing import Any, Protocol

import numpy as np

from art_core.errors import ARTError, PayloadError, PayloadTooLarge, UnknownRecords
from art_core.records import RecordStore, TokenRecord
from art_core.trajectories import TrajectoryGroup
from art_core.trajectory_rows import COLUMNS, Row, groups_of, rows_of
from art_core.wire.protocol import WIRE

CHUNK = 2**20
"""Bytes that are sent at once, about."""
MAX_HEADER = 64 * 2**20
"""Bytes of a frame's header: a request's messages and an answer are in it."""
_LENGTH = struct.Struct("<I")
_ARRAYS = {"prompt_ids": "<i4", "sampled_ids": "<i4", "logprobs": "<f4", "response": "|u1"}
_OF_RECORD = ("message", "request", "response", "sampling", "finish_reason", "step", *_ARRAYS)
"""What a call sent by its id leaves to the server's record."""


class Source(Protocol):
    """What a payload is read from, such as a file."""

    def read(self, size: int, /) -> bytes:
        """At most so many bytes; none at the end."""


@dataclass(frozen=True)
class Payload:
    """What was read."""

    kind: str
    request: dict[str, Any]
    """Fields of the request; who asked for them checks them."""
    groups: list[TrajectoryGroup]


def write_payload(
    kind: str,
    request: dict[str, Any],
    groups: Iterable[TrajectoryGroup],
    *,
    by_record: bool = False,
) -> Iterator[bytes]:
    """The payload in pieces of about `CHUNK` bytes.

    Args:
        by_record: send calls that the server has a record of by its id alone.

    Raises:
        PayloadError: a header is longer than `MAX_HEADER`.
    """
    yield from _in_chunks(_frames(kind, request, groups, by_record=by_record))


def compressed(chunks: Iterable[bytes]) -> Iterator[bytes]:
    """The same as gzip, at the level that takes the least time."""
    pack = zlib.compressobj(1, zlib.DEFLATED, 31)
    for chunk in chunks:
        if out := pack.compress(chunk):
            yield out
    yield pack.flush()


def read_payload(source: Source, *, records: RecordStore | None = None) -> Payload:
    """What `write_payload` wrote. The caller bounds the length of `source`.

    Args:
        records: has the calls that were sent by their ids; None: there may be none.

    Raises:
        PayloadError: it is cut, damaged, of another version, or nothing of the kind.
        UnknownRecords: a call was sent by an id that `records` does not have (any more).
    """
    kind, request = read_head(source)
    rows = list(_rows(source))
    fill(rows, records)
    try:
        return Payload(kind, request, groups_of(rows))
    except ARTError:
        raise
    except (KeyError, TypeError, ValueError, AttributeError, IndexError, RecursionError) as error:
        raise PayloadError(f"a row of a payload can't be read ({error!r:.300})") from error


def read_head(source: Source) -> tuple[str, dict[str, Any]]:
    """Kind and request of a payload, of which nothing else is read.

    Raises:
        PayloadError: as `read_payload`.
    """
    head = _header(source)
    if head.get("art_wire") != WIRE:
        raise PayloadError(
            "a payload of another version",
            got=head.get("art_wire"),
            expected=str(WIRE),
            fix="Take the same release of art-langgraph on both sides.",
        )
    kind, request = head.get("kind"), head.get("request")
    if not isinstance(kind, str) or not isinstance(request, dict):
        raise PayloadError("the first frame of a payload", got=kind, expected="a kind, a request")
    return kind, request


def fill(rows: Iterable[Row], records: RecordStore | None) -> None:
    """Complete, in place, the rows of calls that were sent by their record ids.

    Raises:
        UnknownRecords: it names the ids that are not there.
    """
    wanting = [row for row in rows if row.pop("by_record", False)]
    ids = [str(row["record_id"]) for row in wanting]
    found = records.get(ids) if records is not None and ids else {}
    known = [found.get((str(row["record_id"]), row["choice_index"])) for row in wanting]
    if lost := tuple(dict.fromkeys(i for i, r in zip(ids, known, strict=True) if r is None)):
        raise UnknownRecords(
            f"{len(lost)} calls were sent by record ids that the server does not have",
            ids=lost[:100],
            fix="They expired, or are another server's: send whole calls, "
            'HttpBackend(send="calls").',
        )
    for row, record in zip(wanting, known, strict=True):
        assert record is not None
        row.update(_of_record(record))


def _of_record(record: TokenRecord) -> Row:
    request: dict[str, Any] = {"model": record.model, "messages": record.request_messages}
    if record.tools:
        request["tools"] = record.tools
    return {
        "message": json.dumps(record.message),
        "request": json.dumps(request),
        "response": b"",
        "sampling": json.dumps(asdict(record.sampling)),
        "finish_reason": record.finish_reason,
        "step": record.step,
        "prompt_ids": record.prompt_ids,
        "sampled_ids": record.sampled_ids,
        "logprobs": record.logprobs,
    }


# --- frames written


def _frames(
    kind: str, request: dict[str, Any], groups: Iterable[TrajectoryGroup], *, by_record: bool
) -> Iterator[bytes]:
    yield from _frame({"art_wire": WIRE, "kind": kind, "request": request}, [])
    count = 0
    for row in rows_of(groups):
        yield from _row_frame(row, by_record=by_record)
        count += 1
    yield from _frame({"end": count}, [])


def _row_frame(row: Row, *, by_record: bool) -> Iterator[bytes]:
    if by_record and _has_record(row):
        row = {name: v for name, v in row.items() if name not in _OF_RECORD} | {"by_record": True}
    arrays = [
        (name, np.ascontiguousarray(_bytes_or_array(row[name]), kind))
        for name, kind in _ARRAYS.items()
        if row.get(name) is not None
    ]
    plain = {name: value for name, value in row.items() if name not in _ARRAYS}
    lengths = {name: len(array) for name, array in arrays}
    yield from _frame({"row": plain, "arrays": lengths}, [array for _, array in arrays])


def _has_record(row: Row) -> bool:
    """The server answered this call, and its record is whole."""
    record = row.get("record_id")
    is_whole = row.get("sampled_ids") is not None and row.get("left_out") is None
    return isinstance(record, str) and not record.startswith("local-") and is_whole


def _bytes_or_array(value: Any) -> Any:
    return np.frombuffer(value, np.uint8) if isinstance(value, bytes) else value


def _frame(header: dict[str, Any], arrays: Iterable[Any]) -> Iterator[bytes]:
    text = json.dumps(header).encode()
    if len(text) > MAX_HEADER:
        raise PayloadTooLarge(
            "a call can't be sent",
            got=f"{len(text)} bytes of JSON",
            expected=f"at most {MAX_HEADER}",
            fix="Shorten its messages, or what metadata and logs hold.",
        )
    yield _LENGTH.pack(len(text)) + text
    for array in arrays:
        yield array.tobytes()


def _in_chunks(pieces: Iterable[bytes]) -> Iterator[bytes]:
    held = bytearray()
    for piece in pieces:
        held += piece
        if len(held) >= CHUNK:
            yield bytes(held)
            held.clear()
    if held:
        yield bytes(held)


# --- frames read


def _rows(source: Source) -> Iterator[Row]:
    count = 0
    while True:
        header = _header(source)
        if "end" in header:
            if header["end"] != count or source.read(1):
                raise PayloadError(
                    "a payload ends wrong", got=f"{count} rows", expected=f"{header['end']}"
                )
            return
        row, lengths = header.get("row"), header.get("arrays")
        if not isinstance(row, dict) or not isinstance(lengths, dict):
            raise PayloadError("a frame of a payload", got=sorted(header)[:9], expected="a row")
        arrays = {name: _array(source, name, lengths[name]) for name in _ARRAYS if name in lengths}
        yield {**dict.fromkeys(COLUMNS), **row, **arrays}
        count += 1


def _header(source: Source) -> dict[str, Any]:
    (length,) = _LENGTH.unpack(_exactly(source, _LENGTH.size))
    if length > MAX_HEADER:
        raise PayloadError("a frame's header", got=f"{length} bytes", expected=f"<= {MAX_HEADER}")
    try:
        header = json.loads(_exactly(source, length))
    except (ValueError, RecursionError) as error:
        raise PayloadError(f"a frame's header is not JSON ({error})") from error
    if not isinstance(header, dict):
        raise PayloadError("a frame's header", got=type(header).__name__, expected="an object")
    return header


def _array(source: Source, name: str, length: Any) -> Any:
    if type(length) is not int or length < 0:
        raise PayloadError(f"the length of {name}", got=length, expected="a whole number")
    kind = np.dtype(_ARRAYS[name])
    raw = _exactly(source, length * kind.itemsize)
    return raw if name == "response" else np.frombuffer(raw, kind).astype(kind.newbyteorder("="))


def _exactly(source: Source, size: int) -> bytes:
    """So many bytes; what a length lies about is never allocated."""
    parts, left = [], size
    while left:
        part = source.read(min(left, CHUNK))
        if not part:
            raise PayloadError(
                "a payload is cut",
                got=f"{size - left} bytes",
                expected=f"{size}",
                fix="Send it again.",
            )
        parts.append(part)
        left -= len(part)
    return b"".join(parts)
