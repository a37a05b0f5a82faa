"""Makes the environment that vLLM runs in.

In: a `Recipe`. Out: `VllmRuntime`, made now or found whole. Killed at any moment, it is made again
from what was fetched: the stamp that calls it whole is written last. Two at once take turns. Left
out: finding one (runtime.py), and running pip or uv (installer.py).
"""

from __future__ import annotations

import json
import os
import shutil
import threading
import time
import urllib.request
from pathlib import Path
from queue import Empty, SimpleQueue

from art_core.engine.installer import Installer, Pip, Uv
from art_core.engine.kept_process import check_platform
from art_core.engine.python_choice import choose_python
from art_core.engine.runtime import STAMP, VllmRuntime, is_made, probe, runtimes_folder
from art_core.engine.runtime_recipe import TORCH_CPU_INDEX, Recipe
from art_core.errors import RuntimeMissing, SetupError
from art_core.sole_maker import Progress, silent, sole_maker

_LOCK_SECONDS = 3600.0
_INDEX_SECONDS = 6.0
"""Longest wait for PyTorch's index to say that it is there."""
_IMPORTS = "import torch, vllm; print('accelerator', torch.version.cuda or torch.version.hip)"


def make_runtime(
    recipe: Recipe,
    *,
    folder: Path | None = None,
    python: str | None = None,
    home: Path | None = None,
    progress: Progress | None = None,
) -> VllmRuntime:
    """The environment of `recipe`, made if it is not there.

    Args:
        recipe: what it is made of.
        folder: where; None means where `find_runtime` looks.
        python: the Python to make it for, a name or a path; None means ours, or another on PATH.
        home: as in `find_runtime`.
        progress: told, in a line each, what takes time.

    Raises:
        SetupError: it can't be made; the message says what is missing.
        EngineError: this is Windows.
    """
    check_platform()
    say = progress or silent
    target = (folder or runtimes_folder(home) / recipe.folder).expanduser().absolute()
    if (made := _whole(target, recipe, say)) is not None:
        return made
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with sole_maker(
            target, "making the same environment", say, SetupError, seconds=_LOCK_SECONDS
        ):
            return _whole(target, recipe, say) or _make(target, recipe, python, say)
    except OSError as error:
        raise SetupError(
            f"the environment of vLLM can't be made: {error.strerror or error}",
            got=str(target),
            expected="a folder that may be written",
            fix="Choose another by --path, or set ART_HOME.",
        ) from error


def _make(target: Path, recipe: Recipe, python: str | None, say: Progress) -> VllmRuntime:
    _check_space(target, recipe)
    begun = time.monotonic()
    version = choose_python(recipe, python)
    installer = _begin(target, recipe, version, say)
    say(f"installing {' '.join(recipe.requirements)} with {installer.name}")
    installer.install(recipe.requirements)
    if recipe.removed:
        installer.remove(recipe.removed)
    say("importing it once")
    told = installer.run([str(installer.python), "-c", _IMPORTS])
    if recipe.torch is not None and "accelerator None" not in told:
        raise _wrong_torch(recipe, told)
    _stamp(target, recipe)
    say(f"vLLM {recipe.version} is ready after {time.monotonic() - begun:.0f} s")
    return _runtime(target)


def _begin(target: Path, recipe: Recipe, python: str, say: Progress) -> Installer:
    """An empty environment where the right torch is to be had, or in it; and who installs."""
    *others, last = (Uv, Pip) if Uv.command() else (Pip,)
    for kind in others:
        installer = _empty_for(kind, target, python, say)
        if not _brings_cuda(installer, recipe):
            return installer
    installer = _empty_for(last, target, python, say)
    if not _brings_cuda(installer, recipe):
        return installer
    if recipe.torch is None or not _is_reachable(TORCH_CPU_INDEX):
        raise _wrong_torch(recipe, f"{TORCH_CPU_INDEX} can't be reached")
    say(f"taking {recipe.torch} from {TORCH_CPU_INDEX}")
    installer.install([recipe.torch], index=TORCH_CPU_INDEX)
    return installer


def _empty_for(kind: type[Pip] | type[Uv], target: Path, python: str, say: Progress) -> Installer:
    """An empty environment that `kind` has made."""
    _take(target)
    installer = kind(target, _work(target), say)
    say(f"making an environment in {target} for {python} with {installer.name}")
    installer.make(python)
    return installer


def _brings_cuda(installer: Installer, recipe: Recipe) -> bool:
    """True if the index's torch is a build for CUDA, where the recipe wants another: NVIDIA's
    libraries come with it."""
    if recipe.torch is None:
        return False
    return any(name.startswith("nvidia-") for name in installer.plan(recipe.torch))


def _whole(target: Path, recipe: Recipe, say: Progress) -> VllmRuntime | None:
    """The environment at `target` if it was made to the end and still runs."""
    if not is_made(target, recipe):
        return None
    try:
        return _runtime(target)
    except RuntimeMissing as error:
        say(f"{target} is damaged ({error.what}), so it is made again")
        return None


def _runtime(target: Path) -> VllmRuntime:
    python = target / "bin" / "python"
    found = probe(python)
    if found["vllm"] is None:
        raise RuntimeMissing("vLLM is not in it any more", got=str(target))
    is_cpu = found["accelerator"] is None
    return VllmRuntime(python, found["vllm"], found["torch"] or "none", is_cpu, "made")


def _take(target: Path) -> None:
    """Make `target` ours and absent: what a killed maker left goes, or an older environment of
    ours; what is somebody else's stays.

    Raises:
        SetupError: somebody else's files are there.
    """
    is_ours = _mark(target).exists() or (target / STAMP).exists()
    if target.exists() and any(target.iterdir()) and not is_ours:
        raise SetupError(
            "the folder holds something else than an environment of vLLM made by this command",
            got=str(target),
            expected="an empty folder, or none",
            fix="Choose another by --path.",
        )
    _mark(target).parent.mkdir(parents=True, exist_ok=True)
    _mark(target).touch()
    if target.exists():
        (target / STAMP).unlink(missing_ok=True)  # from here on it is not whole
        shutil.rmtree(target)


def _mark(target: Path) -> Path:
    """Is there while `target` is being made, outside of what may be removed."""
    return _work(target) / "begun"


def _work(target: Path) -> Path:
    """Where the making is logged."""
    return target.parent / f".{target.name}"


def _stamp(target: Path, recipe: Recipe) -> None:
    """Call the environment whole."""
    aside = target / f".{STAMP}"
    with aside.open("w", encoding="utf-8") as file:
        json.dump({"requirements": list(recipe.requirements)}, file)
        file.flush()
        os.fsync(file.fileno())
    aside.replace(target / STAMP)
    _mark(target).unlink()


def _check_space(target: Path, recipe: Recipe) -> None:
    free = shutil.disk_usage(target.parent).free / 1e9
    if free < recipe.disk_gb:
        raise SetupError(
            "the disk is too small for vLLM",
            got=f"{free:.1f} GB free in {target.parent}",
            expected=f"{recipe.disk_gb:g} GB",
            fix="Free space, choose another folder by --path, or set ART_HOME.",
        )


def _is_reachable(url: str) -> bool:
    """True if `url` answers within `_INDEX_SECONDS`, name resolution included."""
    answer: SimpleQueue[bool] = SimpleQueue()

    def ask() -> None:
        try:
            with urllib.request.urlopen(f"{url}/torch/", timeout=_INDEX_SECONDS) as page:
                answer.put(page.status == 200)
        except (OSError, ValueError):
            answer.put(False)

    # A socket timeout does not bound the resolution of names, so the thread is left behind.
    threading.Thread(target=ask, name="art-index-probe", daemon=True).start()
    try:
        return answer.get(timeout=_INDEX_SECONDS)
    except Empty:
        return False


def _wrong_torch(recipe: Recipe, why: str) -> SetupError:
    return SetupError(
        f"no torch without CUDA is to be had ({why.strip()[-200:]})",
        got=recipe.torch,
        expected="a CPU build",
        fix=f"Give pip an index that has it, such as {TORCH_CPU_INDEX} (PIP_EXTRA_INDEX_URL).",
    )
