"""Single files that are whole or as before, and JSON objects kept in them.

In: a path and what to write. Out: the file, written aside, synced to the disk, renamed into place;
faults of the disk as `RunFolderError`. Whole folders are in `sealed.py`.
"""

from __future__ import annotations

import json
import os
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from art_core.errors import ConfigError, RunFolderError
from art_core.sealed import sync_folder


def replace_file(path: Path, write: Callable[[Path], object]) -> None:
    """Make the file `path` from what `write` puts at the path it is given.

    Raises:
        RunFolderError: the disk is full or refuses; `path` is then as before.
    """
    aside = path.parent / f".tmp-{path.name}-{uuid.uuid4().hex[:12]}"
    with writing(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            write(aside)
            with aside.open("rb+") as file:
                os.fsync(file.fileno())
            aside.replace(path)
            sync_folder(path.parent)
        finally:
            aside.unlink(missing_ok=True)


def write_object(path: Path, value: dict[str, Any]) -> None:
    """Replace `path` by a JSON object.

    Raises:
        ConfigError: `value` holds something that JSON has no form for.
        RunFolderError: the disk is full or refuses.
    """
    try:
        text = json.dumps(value, indent=1, allow_nan=False)
    except (TypeError, ValueError) as error:
        raise ConfigError(
            f"{path.name} can't keep this as JSON: {error}",
            expected="text, finite numbers, bool, None, lists and dicts with text keys",
        ) from None
    replace_file(path, lambda aside: aside.write_text(text + "\n", "utf-8"))


def read_object(path: Path) -> dict[str, Any] | None:
    """The JSON object in `path`; None if there is no file.

    Raises:
        RunFolderError: it can't be read or holds something else.
    """
    try:
        value = json.loads(path.read_text("utf-8"))
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise RunFolderError(f"{path} can't be read: {error}", fix=_REPAIR) from error
    if not isinstance(value, dict):
        raise RunFolderError(f"{path} holds no JSON object", got=value, fix=_REPAIR)
    return value


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Turn an OSError inside into a `RunFolderError` that names `path`."""
    try:
        yield
    except OSError as error:
        raise RunFolderError(
            f"{path} can't be written: {error.strerror or error}",
            fix="Free space, or choose a shorter or writable folder by `base_path`.",
        ) from error


_REPAIR = "Repair the file, or move it away."
