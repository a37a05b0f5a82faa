"""What lies beside a job on disk: the trajectories that it was given, and those that it returns.

In: a request's body as it comes, in any size up to a bound. Out: a payload read from its file,
frame by frame; a file to send back. What was given is kept until the job has ended, what it returns
until the job is forgotten.
"""

from __future__ import annotations

import asyncio
import gzip
import io
import os
import zlib
from collections.abc import AsyncIterable, Iterable
from pathlib import Path
from typing import IO

from art_core.errors import PayloadError, PayloadTooLarge
from art_core.records import RecordStore
from art_core.wire.payload import Payload, compressed, read_head, read_payload

MAX_BYTES = 8 * 2**30
"""Of a payload, once it is unpacked."""


class JobFiles:
    """Files of jobs in a folder, which is made if missing.

    Args:
        max_body: bytes of a request, as they come.
    """

    def __init__(self, folder: Path, *, max_body: int) -> None:
        self._given, self._made = folder / "given", folder / "made"
        self._max_body = max_body
        for path in (self._given, self._made):
            path.mkdir(parents=True, exist_ok=True)

    async def take(self, name: str, body: AsyncIterable[bytes], *, is_packed: bool) -> Path:
        """Write a payload to its file, synced to the disk, and look at its first frame.

        Raises:
            PayloadTooLarge: it is longer than may be; nothing is kept.
            PayloadError: its first frame is none.
        """
        path = await self.keep(f"{name}.gz" if is_packed else name, body)
        try:
            with _opened(path) as source:
                read_head(source)
        except BaseException:
            path.unlink(missing_ok=True)
            raise
        return path

    async def keep(self, name: str, body: AsyncIterable[bytes]) -> Path:
        """Write a request's body to its file, synced to the disk.

        Raises:
            PayloadTooLarge: it is longer than may be; nothing is kept.
        """
        path = self._given / name
        size = 0
        try:
            with path.open("wb") as file:
                async for part in body:
                    size += len(part)
                    if size > self._max_body:
                        raise PayloadTooLarge(
                            "a request is too large",
                            got=f"{size} bytes or more",
                            expected=f"at most {self._max_body}",
                            fix="Send fewer groups at once, or start the server with a larger "
                            "--max-body.",
                        )
                    file.write(part)
                file.flush()
                await asyncio.to_thread(os.fsync, file.fileno())  # it may take long
        except BaseException:
            path.unlink(missing_ok=True)
            raise
        return path

    def adopt(self, path: Path, name: str) -> None:
        """What was taken under another name is the job's of this name."""
        path.rename(path.with_name(f"{name}{path.suffix}"))

    def read(self, name: str, records: RecordStore | None) -> Payload:
        """What a job was given.

        Raises:
            PayloadError, UnknownRecords: as `read_payload`.
        """
        path = next(self._given.glob(f"{name}*"), None)
        if path is None:
            raise PayloadError("what a job was given is not there", fix="Send it again.")
        with _opened(path) as source:
            return read_payload(source, records=records)

    def opened(self, name: str) -> IO[bytes]:
        """What a job was given, as it came.

        Raises:
            PayloadError: it is not there.
        """
        path = next(self._given.glob(f"{name}*"), None)
        if path is None:
            raise PayloadError("what a job was given is not there", fix="Send it again.")
        return path.open("rb")

    def make(self, name: str, chunks: Iterable[bytes]) -> None:
        """Keep what a job returns."""
        with (self._made / f"{name}.gz").open("wb") as file:
            for chunk in compressed(chunks):
                file.write(chunk)

    def made(self, name: str) -> Path | None:
        """The file of what a job returned, as gzip; None if there is none."""
        path = self._made / f"{name}.gz"
        return path if path.exists() else None

    def ended(self, name: str) -> None:
        """What the job was given is of no use any longer."""
        for path in self._given.glob(f"{name}*"):
            path.unlink(missing_ok=True)

    def forget(self, name: str) -> None:
        """Nothing of it is."""
        self.ended(name)
        (self._made / f"{name}.gz").unlink(missing_ok=True)


class _Bounded(io.RawIOBase):
    """Reads a file to its bound, whatever it unpacks to; a damaged one is a `PayloadError`."""

    def __init__(self, source: io.BufferedIOBase) -> None:
        self._source, self._left = source, MAX_BYTES

    def read(self, size: int = -1, /) -> bytes:
        try:
            part = self._source.read(size)
        except (OSError, EOFError, zlib.error) as error:
            raise PayloadError(f"a payload can't be unpacked ({error})") from error
        self._left -= len(part)
        if self._left < 0:
            raise PayloadTooLarge("a payload unpacks to too much", expected=f"{MAX_BYTES} bytes")
        return part

    def close(self) -> None:
        self._source.close()
        super().close()


def _opened(path: Path) -> _Bounded:
    file = path.open("rb")
    return _Bounded(gzip.GzipFile(fileobj=file) if path.suffix == ".gz" else file)
