"""The small files of a base model: config, chat template, special tokens. No weights.

In: a folder, or a name on the hub. Out: `ModelFiles`. A name is looked for where models are kept,
in the hub's cache, then on the hub, from which the small files alone are fetched; all of it bounded
in time. Left out: what the files mean.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from art_core.errors import BaseModelError
from art_core.nn import hub
from art_core.nn.base_model import kept_folder

_TOKEN_NAMES = ("bos_token", "eos_token", "pad_token", "unk_token")


@dataclass(frozen=True)
class ModelFiles:
    """What a model's folder says of it."""

    folder: Path
    config: Mapping[str, Any]
    template: str | None
    """Its own chat template; None: it has none."""
    special_tokens: frozenset[str]
    """Texts of added tokens; empty where no file lists them."""
    names: Mapping[str, str]
    """What the template may use: "bos_token" and its like."""
    weight_bytes: int | None
    """Of the weight files; None: they are not here."""

    @property
    def is_chatml(self) -> bool:
        """True if turns are marked as our own template marks them."""
        return {"<|im_start|>", "<|im_end|>"} <= self.special_tokens


def find_model(name: str, *, home: Path | None = None, say: Callable[[str], None]) -> Path:
    """The folder with the small files of the base model `name`.

    Raises:
        BaseModelError: it is not to be had; the message says where it was looked for.
    """
    path = Path(name).expanduser()
    if name and path.is_dir():
        return path.resolve()
    kept = kept_folder(name, home=home)
    if kept is not None and kept.is_dir():
        return kept
    found = hub.cached(name)
    if found is not None and (found / "config.json").is_file():
        return found
    reason = "it is no folder, and no name on the hub" if "\\" in name or not name else None
    reason = reason or hub.why_unavailable(name)
    if reason is None:
        say(f"fetching the small files of {name} from the hub")
        try:
            return hub.fetch_description(name)
        except Exception as error:  # noqa: BLE001 - the hub client raises many kinds
            reason = f"{type(error).__name__}: {error}"
    raise BaseModelError(
        f"the base model is not to be had (the hub's cache: not there; the hub: {reason})",
        got=name,
        fix="Check the name and the network, or name a folder with its config.json, chat template "
        "and tokenizer.",
    )


def read_model(folder: Path) -> ModelFiles:
    """What is in `folder`.

    Raises:
        BaseModelError: there is no config, or a file is damaged.
    """
    config = _json(folder / "config.json")
    if config is None:
        raise BaseModelError(
            "the folder holds no base model",
            got=str(folder),
            expected="config.json, and a tokenizer beside it",
            fix="Name the folder of a model in Hugging Face's format.",
        )
    tokenizer = _json(folder / "tokenizer_config.json") or {}
    weights = [*folder.glob("*.safetensors")]
    return ModelFiles(
        folder=folder,
        config=config,
        template=_template(folder, tokenizer),
        special_tokens=_special_tokens(folder, tokenizer),
        names=_names(tokenizer),
        weight_bytes=sum(file.stat().st_size for file in weights) if weights else None,
    )


def _template(folder: Path, tokenizer: Mapping[str, Any]) -> str | None:
    file = folder / "chat_template.jinja"
    if file.is_file():
        return _text(file)
    older = _json(folder / "chat_template.json") or {}
    found = older.get("chat_template") or tokenizer.get("chat_template")
    if isinstance(found, list):  # by name; the one for tools is taken where there are tools
        by_name = {str(each.get("name")): each.get("template") for each in found}
        found = by_name.get("tool_use") or by_name.get("default")
    return found if isinstance(found, str) and found else None


def _special_tokens(folder: Path, tokenizer: Mapping[str, Any]) -> frozenset[str]:
    listed = (tokenizer.get("added_tokens_decoder") or {}).values()
    if not listed:
        listed = (_json(folder / "tokenizer.json") or {}).get("added_tokens") or ()
    return frozenset(str(token.get("content", "")) for token in listed) - {""}


def _names(tokenizer: Mapping[str, Any]) -> dict[str, str]:
    found = {}
    for name in _TOKEN_NAMES:
        token = tokenizer.get(name)
        text = token.get("content") if isinstance(token, dict) else token
        if isinstance(text, str):
            found[name] = text
    return found


def _json(file: Path) -> dict[str, Any] | None:
    if not file.is_file():
        return None
    try:
        value = json.loads(_text(file))
    except ValueError as error:
        raise _damaged(file, error, "JSON") from error
    if not isinstance(value, dict):
        raise _damaged(file, f"a {type(value).__name__}", "a JSON object")
    return value


def _text(file: Path) -> str:
    try:
        return file.read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise _damaged(file, error, "text in UTF-8") from error


def _damaged(file: Path, found: object, expected: str) -> BaseModelError:
    return BaseModelError(
        f"a file can't be read ({found})",
        got=str(file),
        expected=expected,
        fix="Download the model again, or name a folder that is whole.",
    )
