"""Which base model a folder holds, so that an adapter of another one is told from its own.

In: a folder in Hugging Face's format, and the name it is known by. Out: `BaseIdentity`, which is
kept in a file beside each adapter (in peft's own files there is no place for it); and whether an
adapter fits. No tensor is read whole, no torch.
"""

from __future__ import annotations

import hashlib
import json
import logging
import re
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from art_core.errors import BaseModelError, CheckpointError

_log = logging.getLogger(__name__)

FILE = "base_model.json"
"""Beside an adapter's weights."""
_SAMPLE = 64
"""Bytes of each tensor's beginning and end that count."""
_SNAPSHOT = re.compile(r"[0-9a-f]{40}")
_ON_HUB = re.compile(r"\w[\w.-]*/\w[\w.-]*", re.ASCII)
"""A folder's relative path may look the same."""


@dataclass(frozen=True)
class BaseIdentity:
    """A base model."""

    name: str
    """On the hub, or of its folder."""
    sha256: str | None
    """Of its tensors' names, shapes and some of their bytes, however they are cut into files. None:
    its weights are not in safetensors files."""

    def write(self, adapter: Path) -> None:
        """Keep it in the adapter's folder."""
        (adapter / FILE).write_text(json.dumps(asdict(self)), "utf-8")


def identify(folder: Path, name: str | None = None) -> BaseIdentity:
    """The base model in `folder`.

    Args:
        name: that it was asked for by; None: that of its folder.

    Raises:
        BaseModelError: a file of its weights is damaged.
    """
    return BaseIdentity(name or _name(folder), _sha256(folder))


def named_base(adapter: Path) -> str:
    """The base model that an adapter's folder names.

    Raises:
        CheckpointError: it names none.
    """
    kept = _kept(adapter)
    if "name" not in kept and (adapter / "adapter_config.json").exists():
        kept = {"name": _settings(adapter).get("base_model_name_or_path")}
    if not isinstance(kept.get("name"), str):
        raise CheckpointError(
            "an adapter does not say which base model it is of",
            got=str(adapter),
            expected=f"{FILE} or adapter_config.json in it",
            fix="Name the base model.",
        )
    return str(kept["name"])


def _settings(adapter: Path) -> dict[str, Any]:
    try:
        found = json.loads((adapter / "adapter_config.json").read_text("utf-8"))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def check_base(adapter: Path, named: str | None, base: BaseIdentity) -> None:
    """See that the adapter in a folder was trained on `base`.

    Args:
        named: what its settings say it was trained on: a name, or a folder of any machine.

    Raises:
        CheckpointError: it was trained on another one. Where only a folder's name speaks against
            it, that is told.
    """
    kept = _kept(adapter)
    theirs, sha256 = kept.get("name") or named, kept.get("sha256")
    if None not in (sha256, base.sha256):
        if sha256 != base.sha256:
            raise _other(adapter, f"{theirs} ({str(sha256)[:12]}...)", base)
        return
    if theirs is None or _last(theirs) == _last(base.name):
        return
    if all(_ON_HUB.fullmatch(name) and not Path(name).is_dir() for name in (theirs, base.name)):
        raise _other(adapter, theirs, base)
    _log.warning("adapter %s says that it was trained on %s, not on %s", adapter, theirs, base.name)


def _other(adapter: Path, theirs: str, base: BaseIdentity) -> CheckpointError:
    sha256 = f" ({base.sha256[:12]}...)" if base.sha256 and "(" in theirs else ""
    return CheckpointError(
        f"adapter {adapter} was trained on another base model",
        got=theirs,
        expected=base.name + sha256,
        fix="Set base_model to the one that it was trained on.",
    )


def _kept(adapter: Path) -> dict[str, Any]:
    """What `BaseIdentity.write` wrote; nothing where another program saved the adapter."""
    try:
        kept = json.loads((adapter / FILE).read_text("utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise CheckpointError(
            f"a file of an adapter can't be read ({error})",
            got=str(adapter / FILE),
            fix="Choose another step.",
        ) from error
    return kept if isinstance(kept, dict) else {}


def _name(folder: Path) -> str:
    """Of a model's folder; the hub's cache has the name two levels above a commit's folder."""
    owner = folder.parent.parent.name
    if _SNAPSHOT.fullmatch(folder.name) and owner.startswith("models--"):
        return owner.removeprefix("models--").replace("--", "/")
    return folder.name


def _last(name: str) -> str:
    return re.split(r"[/\\]", name.rstrip("/\\"))[-1].casefold()


def _sha256(folder: Path) -> str | None:
    parts: dict[str, bytes] = {}
    for path in sorted(folder.glob("*.safetensors")):
        if not path.name.startswith("consolidated"):  # the same weights in Mistral's own format
            parts |= _samples(path)
    if not parts:
        return None
    digest = hashlib.sha256()
    for name in sorted(parts):
        digest.update(name.encode() + b"\0" + parts[name])
    return digest.hexdigest()


def _samples(path: Path) -> dict[str, bytes]:
    """Of each tensor in a safetensors file, shape and bytes that tell it from others.

    Raises:
        BaseModelError: it is cut, or no such file.
    """
    try:
        return _read_samples(path)
    except (OSError, ValueError, KeyError, TypeError, AttributeError, OverflowError) as error:
        raise BaseModelError(
            f"a file of the base model can't be read ({error})",
            got=str(path),
            expected="a whole safetensors file",
            fix="Fetch the model again.",
        ) from error


def _read_samples(path: Path) -> dict[str, bytes]:
    with path.open("rb") as file:
        size = int.from_bytes(file.read(8), "little")
        if 8 + size > path.stat().st_size:
            raise ValueError("it is cut")
        header: dict[str, Any] = json.loads(file.read(size))
        found = {}
        for name, entry in header.items():
            if name == "__metadata__":
                continue
            start, end = (8 + size + offset for offset in entry["data_offsets"])
            file.seek(start)
            begins = file.read(min(_SAMPLE, end - start))
            file.seek(max(start, end - _SAMPLE))
            ends = file.read(end - max(start, end - _SAMPLE))
            what = json.dumps([entry["dtype"], entry["shape"]]).encode()
            found[name] = what + begins + ends
    return found
