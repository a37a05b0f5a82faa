"""How often Python looks for garbage in a process that serves.

In: nothing. Out: a higher threshold for as long as the process lives. Hundreds of calls side by
side hold tens of thousands of dicts and lists, and at Python's default every 700th new one begins a
search through them: with 512 calls that was two fifths of the endpoint's CPU time. No object lives
longer for it but those in cycles.
"""

from __future__ import annotations

import gc

_NEW_OBJECTS = 50_000
"""Containers made before Python looks among the new ones; some 10 MB."""


def search_less_often() -> None:
    """Raise the threshold; one that is higher, or 0 for never, stays as it is."""
    youngest, *older = gc.get_threshold()
    if 0 < youngest < _NEW_OBJECTS:
        gc.set_threshold(_NEW_OBJECTS, *older)
