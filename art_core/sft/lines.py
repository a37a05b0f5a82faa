"""The lines of a JSONL file as objects, or the reason why one is refused.

In: a path, plain or gzip. Out: one `Line` per physical line that is not blank, streamed. Lines end
at LF alone, so texts may hold any other separator; texts are what the file says, byte for byte. A
file that can't be such a file at all (a folder, UTF-16, a JSON array, an archive) is an error.
"""

from __future__ import annotations

import gzip
import json
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, NoReturn, cast

from art_core.errors import DataFileError

LONGEST = 64 << 20
"""Bytes of a line; a longer one is refused before it is read whole."""
_SHOWN = 80
"""Characters of a file's content that a message may show."""
_BOM = b"\xef\xbb\xbf"
_BLANK = b" \t\r\n"
_FOREIGN = {
    b"\xff\xfe\x00\x00": "UTF-32 text",
    b"\x00\x00\xfe\xff": "UTF-32 text",
    b"\xff\xfe": "UTF-16 text",
    b"\xfe\xff": "UTF-16 text",
    b"PK\x03\x04": "a zip archive",
    b"PAR1": "a Parquet file",
    b"\x28\xb5\x2f\xfd": "zstandard data",
    b"BZh": "bzip2 data",
    b"\xfd7zXZ\x00": "xz data",
    b"ARROW1": "an Arrow file",
    b"SQLite format 3": "an SQLite database",
}


@dataclass(frozen=True)
class Line:
    """A line that is not blank."""

    number: int
    """Physical, from 1; blank lines count."""
    offset: int
    """Of its first byte, in the unpacked file."""
    value: dict[str, Any] | None
    """The object; None if the line is refused."""
    refusal: str | None
    """Why, without the line's number."""


@contextmanager
def open_lines(path: Path) -> Iterator[IO[bytes]]:
    """The file's bytes, unpacked if it is gzip. Faults of file and packing are `DataFileError`s."""
    try:
        _check_kind(path)
        with path.open("rb") as file:
            start = file.read(16)
            file.seek(0)
            _check_start(path, start)
            if start.startswith(b"\x1f\x8b"):
                with gzip.open(file) as unpacked:
                    _check_start(path, unpacked.peek(16)[:16])
                    yield cast(IO[bytes], unpacked)
            else:
                yield file
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise DataFileError(
            f"{str(path)!r} can't be unpacked: {error}", fix="Copy the gzip file again, whole."
        ) from error
    except OSError as error:
        raise DataFileError(
            f"{str(path)!r} can't be read: {error.strerror or error}", fix="Check the path."
        ) from error


def read_lines(file: IO[bytes], *, path: Path) -> Iterator[Line]:
    """Every line of `file` that is not blank.

    Raises:
        DataFileError: the file is a JSON array.
    """
    offset = 0
    is_first = True
    number = 0
    while raw := file.readline(LONGEST + 1):
        number += 1
        begin, offset = offset, offset + len(raw)
        if len(raw) > LONGEST:
            offset += _skip_rest(file)
            yield Line(number, begin, None, f"longer than {LONGEST >> 20} MB")
            continue
        text = raw.removeprefix(_BOM) if begin == 0 else raw
        if not text.strip(_BLANK):
            continue
        if is_first and text.lstrip(_BLANK).startswith(b"["):
            raise DataFileError(
                f"line {number} of {str(path)!r} begins a JSON array",
                expected="JSON lines: one object a line",
                fix="Convert it, e.g. with `jq -c '.[]' FILE > FILE.jsonl`.",
            )
        is_first = False
        try:
            yield Line(number, begin, parse_line(text, begin + len(raw) - len(text)), None)
        except ValueError as error:
            yield Line(number, begin, None, str(error))


def parse_line(raw: bytes, offset: int = 0) -> dict[str, Any]:
    """The JSON object that a line holds.

    Args:
        offset: of `raw` in its file, for the message.

    Raises:
        ValueError: with the reason; it shows at most 80 characters of the line.
    """
    try:
        text = raw.decode("utf-8").strip(_BLANK.decode())
    except UnicodeDecodeError as error:
        at = error.start
        byte = f"byte 0x{raw[at]:02X} at offset {offset + at}"
        raise ValueError(f"not UTF-8 ({byte}); convert the file to UTF-8") from None
    if "\0" in text:
        raise ValueError("holds NUL bytes; UTF-16 text without its mark, or a damaged file")
    try:
        value = json.loads(text, object_pairs_hook=_object, parse_constant=no_constant)
    except json.JSONDecodeError as error:
        raise ValueError(_broken(text, error)) from None
    except RecursionError:
        raise ValueError("nested too deep") from None
    if not isinstance(value, dict):
        raise ValueError(f"must be an object, not {shown(value)}")
    if "\\u" in text:
        _check_surrogates(value)
    return value


def shown(value: object) -> str:
    """`value` as JSON, cut so that a message shows at most 80 characters of it."""
    try:
        text = json.dumps(value, ensure_ascii=False)
    except (TypeError, ValueError):
        text = repr(value)
    return text if len(text) <= _SHOWN else text[: _SHOWN - 3] + "..."


def _check_kind(path: Path) -> None:
    if path.is_dir():
        raise DataFileError(f"{str(path)!r} is a folder, not a file", fix="Give the file in it.")
    if path.exists() and not path.is_file():
        raise DataFileError(
            f"{str(path)!r} is a pipe or a device, not a file",
            fix="Write what it gives to a file: rows are read more than once.",
        )


def _check_start(path: Path, start: bytes) -> None:
    for magic, kind in _FOREIGN.items():
        if start.startswith(magic):
            raise DataFileError(
                f"{str(path)!r} is {kind}",
                expected="JSON lines in UTF-8, plain or gzip",
                fix="Convert it first.",
            )


def _skip_rest(file: IO[bytes]) -> int:
    """Read to the end of the line; how many bytes that was."""
    size = 0
    while part := file.readline(1 << 20):
        size += len(part)
        if part.endswith(b"\n"):
            break
    return size


def _broken(text: str, error: json.JSONDecodeError) -> str:
    rest = text[error.pos :].lstrip()
    if error.msg == "Extra data":
        follows = "another value" if rest[:1] in "{[" else shown(rest[:20])
        return f"{follows} follows the object; one object a line, nothing between them"
    where = f"not JSON: {error.msg} at character {error.pos + 1}"
    if not rest:
        return f"{where}, where the line ends; an object must not be spread over lines"
    return f"{where}, before {shown(rest[:20])}"


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    value = dict(pairs)
    if len(value) != len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"the key {shown(twice)} is given twice in one object")
    return value


def no_constant(name: str) -> NoReturn:
    """Refuse NaN and Infinity, which Python's reader takes."""
    raise ValueError(f"{name} is not JSON")


def _check_surrogates(value: object) -> None:
    try:
        json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        raise ValueError("a text holds half of a surrogate pair, which is no character") from None
