"""The one rule for names of models, projects and splits: each is a folder and part of a URL.

In: a name the user gave. Out: the same name, or a `ConfigError` that states the rule. A name means
the same folder on every system, so what any common file system forbids or changes is refused.
"""

from __future__ import annotations

import re
import unicodedata

from art_core.errors import ConfigError

MAX_BYTES = 128
"""Longest name in UTF-8; file systems count bytes (limit 255) and Windows the whole path (260)."""

_RULE = f"1 to {MAX_BYTES} bytes of UTF-8 that name a folder on Linux, macOS and Windows alike"
_FORBIDDEN = re.compile(r'[<>:"/\\|?*@]')  # "@" parts a model's name from its step
_DEVICES = re.compile(r"(con|prn|aux|nul|conin\$|conout\$|(com|lpt)[0-9¹²³])", re.IGNORECASE)


def check_name(kind: str, name: str) -> str:
    """Return `name` if it may name a `kind` ("model", "project", "split", ...).

    Raises:
        ConfigError: says what is wrong with it.
    """
    reason = _fault(name)
    if reason is None:
        return name
    raise ConfigError(
        f"the {kind} name {reason}", got=name, expected=_RULE, fix=f"Choose another {kind} name."
    )


def same_folder(left: str, right: str) -> bool:
    """True if some file system would give both names one folder (case and accents aside)."""
    return _folded(left) == _folded(right)


def _fault(name: object) -> str | None:
    if not isinstance(name, str):
        return f"is a {type(name).__name__}, not text"
    if not name:
        return "is empty"
    if odd := next((c for c in name if _invisible(c)), None):
        return f"holds the invisible character U+{ord(odd):04X}"
    if found := _FORBIDDEN.search(name):
        return f"holds {found[0]!r}, which is kept for other uses"
    if name[0] in ". " or name[-1] in ". ":
        return "begins or ends with a dot or a blank"
    if _DEVICES.fullmatch(name.partition(".")[0].rstrip(" ")):
        return "is the name of a Windows device"
    if unicodedata.normalize("NFC", name) != name:
        return "has accents in decomposed form (use Unicode form NFC)"
    if (size := len(name.encode())) > MAX_BYTES:
        return f"has {size} bytes, more than {MAX_BYTES}"
    return None


def _invisible(character: str) -> bool:
    """Control, format and surrogate characters, and every blank but the plain one."""
    category = unicodedata.category(character)
    return category in {"Cc", "Cf", "Cs", "Zl", "Zp"} or (category == "Zs" and character != " ")


def _folded(name: str) -> str:
    return unicodedata.normalize("NFC", unicodedata.normalize("NFD", name).casefold())
