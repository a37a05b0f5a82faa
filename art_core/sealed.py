"""Sealed folders: whole or absent, and able to say whether they are still whole.

In: a target path and a function that fills an empty folder. Out: the folder, written aside, synced
to the disk, listed file by file with size and SHA-256 in `manifest.json`, then renamed into place.
A process killed at any moment leaves no half-written target. It leaves out locking: two writers of
one target must agree between themselves.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import uuid
from collections.abc import Callable
from pathlib import Path

MANIFEST = "manifest.json"


def write_sealed(target: Path, write: Callable[[Path], None]) -> None:
    """Make the folder `target` from what `write` puts into the empty folder it is given.

    If `write` or the disk fails, the part that was written is removed and `target` stays as it was.
    A folder that is already at `target` is removed when the new one is whole, just before the
    rename: killed between the two, it is absent.

    Raises:
        OSError: the disk is full or refuses.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    aside = target.parent / f".tmp-{target.name}-{uuid.uuid4().hex[:12]}"
    aside.mkdir()
    try:
        write(aside)
        _write_manifest(aside)
        for folder in [*_folders(aside), aside]:
            sync_folder(folder)
        if target.exists():  # folders can't be renamed over one another
            shutil.rmtree(target)
        aside.rename(target)
        sync_folder(target.parent)
    finally:
        shutil.rmtree(aside, ignore_errors=True)


def find_damage(folder: Path, *, contents: bool = True) -> str | None:
    """What is wrong with a sealed folder, naming the file; None if every byte is as written.

    Without `contents` only names and sizes are compared, which reads no file but the manifest.
    """
    try:
        listed = json.loads((folder / MANIFEST).read_text("utf-8"))["files"]
        sizes = {str(name): (int(e["size"]), str(e["sha256"])) for name, e in listed.items()}
    except FileNotFoundError:
        return f"{MANIFEST} is missing"
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        return f"{MANIFEST} can't be read ({error})"
    for name, (size, sha256) in sizes.items():
        path = folder / name
        if not path.is_file():
            return f"{name} is missing"
        if (found := path.stat().st_size) != size:
            return f"{name} has {found} bytes, not {size}"
        if contents and file_sha256(path) != sha256:
            return f"{name} does not have the SHA-256 it was written with"
    return None


def sealed_sha256(folder: Path, name: str) -> str | None:
    """The SHA-256 that the file `name` was sealed with; None if the folder is not sealed, or can't
    say.
    """
    try:
        listed = json.loads((folder / MANIFEST).read_text("utf-8"))["files"]
        return str(listed[name]["sha256"])
    except (OSError, ValueError, KeyError, TypeError):
        return None


def remove_leftovers(target: Path) -> None:
    """Remove what killed writers of `target` left beside it. Call it only as the sole writer."""
    for leftover in target.parent.glob(f".tmp-{target.name}-*"):
        shutil.rmtree(leftover, ignore_errors=True)


def file_sha256(path: Path) -> str:
    """SHA-256 of a file's bytes, in hex."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def sync_folder(folder: Path) -> None:
    """Make the names inside `folder` survive a loss of power, where the platform can."""
    if os.name == "nt":  # Windows opens no folders, and keeps renames in its journal
        return
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _write_manifest(folder: Path) -> None:
    files = {}
    for path in sorted(p for p in folder.rglob("*") if p.is_file()):
        with path.open("rb+") as file:
            os.fsync(file.fileno())
        files[path.relative_to(folder).as_posix()] = {
            "size": path.stat().st_size,
            "sha256": file_sha256(path),
        }
    with (folder / MANIFEST).open("w", encoding="utf-8") as file:
        json.dump({"files": files}, file, indent=1)
        file.flush()
        os.fsync(file.fileno())


def _folders(folder: Path) -> list[Path]:
    """Folders below `folder`, the deepest first."""
    return sorted((p for p in folder.rglob("*") if p.is_dir()), reverse=True)
