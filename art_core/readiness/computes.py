"""How a base model computes: asked of the trainer's own code, in a process that may load torch.

In: a model's folder, of which the config is read. Out: `Computed`, or why it can't be told. Left
out: how it is found (nn/sketch.py).
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

SECONDS = 180.0
_NEEDED = ("torch", "transformers", "peft")


@dataclass(frozen=True)
class Computed:
    """What `art_core.nn.sketch.look` found."""

    why_alone: str | None
    """Why every call is computed by itself; None: trees of calls are computed at once."""
    is_plain: bool
    windows: tuple[int, ...]
    context_length: int
    targets: tuple[str, ...]
    """Layers that take an adapter."""
    why_no_adapter: str | None
    config: Mapping[str, Any]
    """The language model's, with the defaults of its kind."""


@dataclass(frozen=True)
class Unknown:
    """It could not be told."""

    why: str
    is_fault: bool
    """True if the model is at fault, not what is installed."""


def how_it_computes(folder: Path, *, timeout: float = SECONDS) -> Computed | Unknown:
    """Ask; takes some seconds, most of them for loading torch."""
    missing = [name for name in _NEEDED if find_spec(name) is None]
    if missing:
        return Unknown(f"{', '.join(missing)} not installed here", is_fault=False)
    try:
        done = subprocess.run(
            [sys.executable, "-P", "-m", "art_core.nn.sketch", str(folder)],  # -P: not from here
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=timeout,
            check=False,
        )
        found: dict[str, Any] = json.loads(done.stdout.strip().rpartition("\n")[2])
    except subprocess.TimeoutExpired:
        return Unknown(f"no answer within {timeout:g} s", is_fault=False)
    except (OSError, ValueError) as error:
        return Unknown(str(error), is_fault=False)
    if "error" in found:
        return Unknown(found["error"], is_fault=True)
    return Computed(
        why_alone=found["why_alone"],
        is_plain=found["is_plain"],
        windows=tuple(found["windows"]),
        context_length=found["context_length"],
        targets=tuple(found["targets"]),
        why_no_adapter=found["why_no_adapter"],
        config=found["config"],
    )
