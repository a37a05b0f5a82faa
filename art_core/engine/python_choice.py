"""Which Python an environment is made for.

In: a `Recipe`, and a name if the user gave one. Out: a command that runs. Left out: fetching one.
"""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

from art_core.engine.runtime import probe
from art_core.engine.runtime_recipe import Recipe
from art_core.errors import RuntimeMissing, SetupError


def choose_python(recipe: Recipe, named: str | None) -> str:
    """The Python that an environment is made for: the one named, ours, or the first on PATH.

    Raises:
        SetupError: there is none that vLLM has builds for.
    """
    oldest, newest = recipe.pythons
    ours = sys.executable or "python3"
    others = [f"python3.{minor}" for minor in (12, 13, 11, 14, 10)]
    tried = []
    for python in [named] if named else [ours, *others]:
        command = shutil.which(python)
        version = None if command is None else _version_of(Path(command))
        if command is not None and version is not None and oldest <= version <= newest:
            return command
        tried.append(f"{python} ({'.'.join(map(str, version)) if version else 'not there'})")
    raise SetupError(
        "vLLM has no build for this Python",
        got=", ".join(tried),
        expected=f"Python {oldest[0]}.{oldest[1]} to {newest[0]}.{newest[1]}",
        fix="Install one, and say which by --python.",
    )


def _version_of(python: Path) -> tuple[int, int] | None:
    if str(python) == sys.executable:
        return sys.version_info[:2]
    try:
        found = probe(python)["python"] or ""
    except RuntimeMissing:
        return None
    major, minor = found.split(".")[:2]
    return int(major), int(minor)
