"""Which Python has vLLM, for the tests."""

from __future__ import annotations

import os
from pathlib import Path

import pytest


def vllm_python() -> Path:
    """The one that the runtime finds; a test that needs it is skipped by name where there is none."""
    told = os.environ.get("ART_VLLM_PYTHON")
    if not told:
        pytest.skip("no environment with vLLM: art-langgraph setup vllm --cpu")
    return Path(told)
