"""How often a serving process looks for garbage."""

from __future__ import annotations

import gc

import pytest

pytest.importorskip("torch", reason="art-langgraph[train] is not installed")

from art_core.local.garbage import search_less_often


@pytest.mark.parametrize(
    ("before", "after"), [(700, 50_000), (50_000, 50_000), (90_000, 90_000), (0, 0)]
)
def test_the_threshold_is_raised_and_never_lowered(before: int, after: int) -> None:
    """0 means never, which somebody has chosen."""
    kept = gc.get_threshold()
    try:
        gc.set_threshold(before, 11, 12)
        search_less_often()
        assert gc.get_threshold()[:2] == (after, 11)
    finally:
        gc.set_threshold(*kept)
