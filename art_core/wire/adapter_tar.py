"""A checkpoint's adapter as a tar: made while it is sent, and unpacked with suspicion.

In: the checkpoint's folder; or a tar that somebody sent. Out: peft's two files, and what says which
base model they belong to; optimizer, moments and bookmarks stay. Of what was sent no other file is
written, whatever its name: weights are safetensors, and nothing is ever unpickled.
"""

from __future__ import annotations

import shutil
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import IO

from art_core.errors import CheckpointError

BASE = "base_model.json"
"""Which base model it is of, where we wrote it (nn/base_identity.py)."""

MAX_BYTES = 8 * 2**30
"""Of the files in a tar."""
NAMES = ("adapter_config.json", "adapter_model.safetensors", BASE)
_PIECE = 2**20


def tar_of(folder: Path) -> Iterator[bytes]:
    """The archive, in pieces."""
    for name in NAMES:
        path = folder / name
        if not path.exists():
            continue
        size = path.stat().st_size
        info = tarfile.TarInfo(name)
        info.size, info.mode = size, 0o644
        yield info.tobuf(tarfile.PAX_FORMAT)
        with path.open("rb") as file:
            while piece := file.read(_PIECE):
                yield piece
        yield b"\0" * (-size % tarfile.BLOCKSIZE)
    yield b"\0" * (2 * tarfile.BLOCKSIZE)


def unpack(source: IO[bytes], folder: Path) -> None:
    """Write the adapter in a tar into `folder`, which is made if missing.

    Raises:
        CheckpointError: it is no tar, has other files in it, or lacks one.
    """
    folder.mkdir(parents=True, exist_ok=True)
    size, found = 0, set[str]()
    try:
        with tarfile.open(fileobj=source, mode="r|") as archive:
            for member in archive:
                name = member.name.removeprefix("./")
                if member.isdir() and name in (".", ""):
                    continue
                size += member.size
                if not member.isfile() or name not in NAMES or name in found or size > MAX_BYTES:
                    raise _refused(f"it has {member.name!r} in it")
                part = archive.extractfile(member)
                assert part is not None, "it is a file"
                with (folder / name).open("wb") as file:
                    shutil.copyfileobj(part, file, _PIECE)
                found.add(name)
    except (tarfile.TarError, EOFError, OSError) as error:
        raise _refused(str(error)) from error
    if lacking := {*NAMES[:2]} - found:
        raise _refused(f"it lacks {', '.join(sorted(lacking))}")


def _refused(why: str) -> CheckpointError:
    return CheckpointError(
        f"what was sent is no adapter: {why}",
        expected=f"a tar of {', '.join(NAMES)}, the last of which may be missing",
        fix="Send the folder that peft's save_pretrained writes, with safetensors.",
    )
