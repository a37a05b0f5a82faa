"""Find a base model by name, and fetch it if need be.

In: the name of a model on the hub, or a folder. Out: a folder in Hugging Face format that has been
checked. Safe to call from several processes at once. It leaves out loading the model: nothing heavy
is imported unless a packaged model has to be converted.
"""

from __future__ import annotations

import re
import tempfile
from functools import partial
from importlib.util import find_spec
from pathlib import Path

import platformdirs

from art_core.config import environment
from art_core.errors import BaseModelError
from art_core.nn import hub
from art_core.nn.model_folder import BaseModelInfo, inspect_base_model
from art_core.nn.packaged import SMOLLM2_135M, PackagedModel, convert_gguf, fetch_gguf
from art_core.sealed import find_damage, remove_leftovers, write_sealed
from art_core.sole_maker import Progress, silent, sole_maker

__all__ = [
    "BaseModelInfo",
    "inspect_base_model",
    "kept_folder",
    "models_home",
    "resolve_base_model",
]

PACKAGED = (SMOLLM2_135M,)
"""Models that can be had without a hub."""

LOCK_SECONDS = 3600.0
"""Longest wait for another process that is fetching the same model."""

_CONVERTERS = ("torch", "transformers", "gguf")
_REPOSITORY = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?", re.ASCII)


def resolve_base_model(
    name: str,
    *,
    home: Path | None = None,
    progress: Progress | None = None,
    packaged: tuple[PackagedModel, ...] = PACKAGED,
) -> Path:
    """The folder of the base model `name`, fetched now if it is not on this machine.

    A folder is checked and returned. A model that can be had as a package is looked for where an
    earlier call kept it, in the hub's cache, on the hub, then in the package index; what was found
    once is used again, so that a run goes on with the weights it began with. Any other name is
    looked for in the hub's cache and on the hub.

    Args:
        name: "owner/name" on the hub, or a path. "SmolLM2-135M-Instruct" may go without owner.
        home: where converted models are kept; None means `ART_HOME`, else the user's cache folder.
        progress: is told, in a line each, what takes time.
        packaged: the models that can be had as packages.

    Raises:
        BaseModelError: the name is unknown, the folder is not whole, or nothing could be fetched;
            the message says what was tried.
    """
    say = progress or silent
    for model in packaged:
        if name in (model.name, model.folder) and not Path(name).is_dir():
            return _resolve_packaged(model, models_home(home), say)
    path = Path(name).expanduser()
    if name and path.is_dir():
        return inspect_base_model(path.resolve()).path
    if _REPOSITORY.fullmatch(name) is None:
        raise BaseModelError(
            "no base model there",
            got=name,
            expected='a folder, or a name on the hub like "Qwen/Qwen2.5-0.5B-Instruct"',
            fix="Check the path.",
        )
    found = _from_hub(name, say)
    if isinstance(found, Path):
        return found
    raise BaseModelError(
        f"the base model is not to be had ({found})",
        got=name,
        fix="Check the name and the network, or pass the folder of a model that you have. "
        f"{SMOLLM2_135M.name!r} needs no hub.",
    )


def kept_folder(name: str, *, home: Path | None = None) -> Path | None:
    """Where a model that can be had as a package is kept, there or not; None for any other."""
    for model in PACKAGED:
        if name in (model.name, model.folder):
            return models_home(home) / model.folder
    return None


def _from_hub(name: str, say: Progress) -> Path | str:
    """A snapshot of `name`, from the cache if it is whole there, else from the hub; or why not."""
    tried = ["the hub's cache: not there"]
    if (snapshot := hub.cached(name)) is not None:
        try:
            return inspect_base_model(snapshot).path
        except BaseModelError as error:
            tried = [f"the hub's cache: {error}"]
    reason = hub.why_unavailable(name)
    if reason is None:
        say(f"fetching {name} from the hub")
        try:
            return inspect_base_model(hub.fetch(name)).path
        except Exception as error:  # noqa: BLE001 - the hub client raises many kinds
            reason = f"{type(error).__name__}: {error}"
    return "; ".join([*tried, f"the hub: {reason}"])


def _resolve_packaged(model: PackagedModel, models: Path, say: Progress) -> Path:
    """A packaged model: as kept by an earlier call, else from the hub, else from its package."""
    folder = models / model.folder
    if folder.is_dir() and find_damage(folder) is None:
        return folder
    found = _from_hub(model.name, say)
    if isinstance(found, Path):
        return found
    say(f"taking {model.name} from its package ({found})")
    try:
        models.mkdir(parents=True, exist_ok=True)
        with sole_maker(
            folder, "fetching the same model", say, BaseModelError, seconds=LOCK_SECONDS
        ):
            return _make(model, folder, say)
    except OSError as error:
        raise BaseModelError(
            f"a base model can't be kept ({error})",
            got=str(folder),
            expected="1 GB of space in a folder that may be written",
            fix="Free some space, or set ART_HOME to another folder.",
        ) from error


def _make(model: PackagedModel, folder: Path, say: Progress) -> Path:
    """Fetch and convert `model` into `folder`; the caller is the only one to write there."""
    remove_leftovers(folder)
    if folder.is_dir():
        damage = find_damage(folder)
        if damage is None:  # another process made it while this one waited
            return folder
        say(f"{folder} is damaged ({damage}), so it is made again")
    missing = [name for name in _CONVERTERS if find_spec(name) is None]
    if missing:
        raise BaseModelError(
            "a packaged base model can't be converted here",
            got=model.name,
            expected=f"the packages {', '.join(missing)}",
            fix="Run: pip install 'art-langgraph[train]'",
        )
    with tempfile.TemporaryDirectory(
        dir=folder.parent, prefix=f".tmp-{folder.name}-", ignore_cleanup_errors=True
    ) as work:
        gguf = fetch_gguf(model, Path(work), say)
        say(f"converting {gguf.name}")
        write_sealed(folder, partial(convert_gguf, gguf, digits_alone=model.digits_alone))
    return inspect_base_model(folder).path


def models_home(home: Path | None = None) -> Path:
    """Where models are kept: in `home`, else `ART_HOME`, else the user's cache folder."""
    base = home or environment().home
    return (base or platformdirs.user_cache_path("art-langgraph", appauthor=False)) / "models"
