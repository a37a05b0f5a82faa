"""Whether kernels written in Triton can be compiled here: it comes with torch for GPUs."""

from __future__ import annotations

from functools import lru_cache
from importlib.util import find_spec


@lru_cache(maxsize=1)
def has_triton() -> bool:
    """True if it is installed; whether there is a GPU is another question."""
    return find_spec("triton") is not None
