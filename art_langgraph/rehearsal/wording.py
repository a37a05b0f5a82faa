"""The few phrases that findings share.

In: plays, names, counts. Out: text.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from art_core.calls import Origin
from art_core.plural import plural
from art_langgraph.rehearsal.observer import Asked
from art_langgraph.rehearsal.played import Play

_SHOWN = 5


def counted(part: int, total: int, word: str) -> str:
    """ "all 5 rollouts", "2 of 5 rollouts"."""
    if part == total:
        return f"all {plural(total, word)}" if total > 1 else f"the {word}"
    return f"{part} of {plural(total, word)}"


def manners(plays: Sequence[Play]) -> str:
    """ " (brief, clumsy)"; nothing where real sampling played."""
    names = dict.fromkeys(play.manner for play in plays if play.manner != "sampled")
    return f" ({', '.join(names)})" if 0 < len(names) < 4 else ""


def listed(names: Iterable[object]) -> str:
    """Names, a few of them."""
    texts = [str(name) for name in names]
    more = f" and {len(texts) - _SHOWN} more" if len(texts) > _SHOWN else ""
    return ", ".join(texts[:_SHOWN]) + more


def place(node: object) -> str:
    """A node as people call it."""
    return "outside a node" if node is None else str(node)


def asker(origin: Origin) -> str:
    """Node and role that a call came from."""
    return place(origin.node) + (f" ({origin.role})" if origin.role else "")


def described(asked: Asked) -> str:
    """ "ChatOpenAI gpt-4o at api.openai.com"."""
    where = f" at {asked.base_url}" if asked.base_url else ""
    return " ".join(filter(None, [asked.kind, asked.model])) + where


def shortened(text: str, length: int = 80) -> str:
    """One line of a text, its beginning and its end."""
    line = " ".join(text.split())
    if len(line) <= length:
        return line
    head = length * 2 // 3
    return f"{line[:head]} ... {line[-(length - head - 5) :]}"
