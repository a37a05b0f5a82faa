"""Tests that need a GPU skip themselves where there is none."""

from __future__ import annotations

import pytest


@pytest.fixture(autouse=True)
def gpu() -> None:
    """The GPU that a test runs on."""
    torch = pytest.importorskip("torch", reason="art-langgraph[train] is not installed")
    if not torch.cuda.is_available():
        pytest.skip("not on this platform: there is no GPU")
