"""Where data files are left off: kept in every checkpoint, so that weights and place never part.

In: a checkpoint's folder. Out: the bookmarks in it, by name. What a place means is its owner's
business (`sft/run.py`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from art_core.files import read_object, write_object

_FILE = "bookmarks.json"


@dataclass(frozen=True)
class Bookmark:
    """A place in a data file."""

    name: str
    """Of the pass through the file."""
    place: dict[str, Any]
    """JSON-ready."""


def read_bookmarks(folder: Path) -> dict[str, dict[str, Any]]:
    """Place by name; none if the checkpoint has no such file.

    Raises:
        RunFolderError: the file is damaged.
    """
    return read_object(folder / _FILE) or {}


def write_bookmarks(folder: Path, places: Mapping[str, dict[str, Any]]) -> None:
    """Put the bookmarks into a checkpoint that is being written; no file if there are none."""
    if places:
        write_object(folder / _FILE, dict(places))
