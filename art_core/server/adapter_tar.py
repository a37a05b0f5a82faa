"""A checkpoint's adapter as a tar that is made while it is sent.

In: the checkpoint's folder. Out: peft's two files, and what says which base model they belong to;
optimizer, moments and bookmarks stay.
"""

from __future__ import annotations

import tarfile
from collections.abc import Iterator
from pathlib import Path

from art_core.nn.base_identity import FILE as BASE

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
