"""A text that a regular expression of a JSON schema matches.

In: a pattern, and texts that may fit already. Out: one that fits, or None. Texts are put together
from the pattern's own parts, as short as they may be, and tried: so look-arounds and references,
which are skipped, can only lead to None.
"""

from __future__ import annotations

import re
import string
from collections.abc import Iterable, Iterator
from contextlib import suppress

from art_langgraph.rehearsal.bounded_search import first_match

_LETTERS = string.ascii_lowercase + string.digits + string.ascii_uppercase + string.punctuation
_NOTHING = frozenset("AZzbBG")
"""Escapes that match a place, not a letter."""
_CONTROLS = {"n": "\n", "t": "\t", "r": "\r", "f": "\f", "v": "\v", "0": "\0"}
_COUNT = re.compile(r"\{(\d+)(,?)(\d*)\}")
_GROUP = re.compile(r"\?(?:P?<(?![=!])\w+>|[a-z-]*:)")
_MORE = (0, 1, 2, 4, 8, 16, 32)
"""How often more than it must be a part is repeated that may be."""
_LONGEST = 10_000
"""Letters of a text that is made up; a pattern that wants more is not solved."""


def text_matching(
    pattern: str, texts: Iterable[str] = (), *, shortest: int = 0, longest: int | None = None
) -> str | None:
    """The first of `texts` that fits, or one made up; None if there is none to be found.

    Args:
        pattern: as in JSON schema: it may match anywhere in the text.
        texts: tried first.
        shortest: letters that it has at least.
        longest: letters that it has at most.
    """
    fitting = [
        text
        for text in (*texts, *_made(pattern))
        if shortest <= len(text) <= (longest or len(text))
    ]
    try:
        return first_match(re.sub(r"\(\?<(?![=!])", "(?P<", pattern), fitting)
    except (re.error, OverflowError, RecursionError):
        return None  # it is no pattern here, or wants too much


def _made(pattern: str) -> Iterator[str]:
    """Texts that fit, if nothing in the pattern was skipped, each longer than the one before."""
    with suppress(re.error, IndexError, ValueError, OverflowError, RecursionError):
        for more in _MORE:  # until it ends too early, or wants too much
            yield _Maker(pattern, more).alternatives()


class _Maker:
    """Reads a pattern from left to right, and writes what it matches."""

    def __init__(self, pattern: str, more: int) -> None:
        self._pattern, self._at, self._more = pattern, 0, more

    def alternatives(self) -> str:
        """Up to the end of a group or of the pattern; the first alternative counts."""
        found = self._sequence()
        while self._next() == "|":
            self._at += 1
            self._sequence()
        return found

    def _sequence(self) -> str:
        found = ""
        while self._next() not in ("", "|", ")"):
            found += self._part()
        return found

    def _part(self) -> str:
        """An atom, as often as its quantifier wants it."""
        atom = self._atom()
        least, most = self._quantifier()
        times = max(least, min(self._more, most))
        if len(atom) * times > _LONGEST:
            raise ValueError("too long")
        return atom * times

    def _quantifier(self) -> tuple[int, int]:
        sign, least, most = self._next(), 1, 1
        if sign in ("*", "+", "?") and sign:
            least, most = int(sign == "+"), 1 if sign == "?" else max(_MORE)
            self._at += 1
        elif found := _COUNT.match(self._pattern, self._at):
            least = int(found[1])
            most = int(found[3]) if found[3] else max(_MORE) if found[2] else least
            self._at = found.end()
        else:
            return 1, 1
        if self._next() in ("?", "+") and self._next():
            self._at += 1
        return least, most

    def _atom(self) -> str:
        letter, start = self._take(), self._at - 1
        if letter == "(":
            return self._group()
        if letter == "[":
            self._at += self._next() == "^"
            self._at += self._next() == "]"  # right there it is a letter
            while self._take() != "]":
                self._at += self._pattern[self._at - 1] == "\\"
            return _letter_of(self._pattern[start : self._at])
        if letter == "\\":
            return self._escape()
        if letter == ".":
            return "a"
        return "" if letter in "^$" else letter

    def _group(self) -> str:
        looks = self._next() == "?"
        if looks and (named := _GROUP.match(self._pattern, self._at)):
            self._at, looks = named.end(), False
        found = self.alternatives()
        self._at += 1
        return "" if looks else found

    def _escape(self) -> str:
        letter = self._take()
        if letter in _NOTHING:
            return ""
        if letter in _CONTROLS:
            return _CONTROLS[letter]
        if letter in "xu":
            size = 2 if letter == "x" else 4
            self._at += size
            return chr(int(self._pattern[self._at - size : self._at], 16))
        return _letter_of(f"\\{letter}") if letter in "dDwWsS" else letter

    def _next(self) -> str:
        return self._pattern[self._at : self._at + 1]

    def _take(self) -> str:
        self._at += 1
        return self._pattern[self._at - 1]


def _letter_of(kind: str) -> str:
    """A letter of a class such as [a-f], [^ ] or \\d."""
    known = re.compile(kind)
    return next((letter for letter in (*_LETTERS, " ") if known.fullmatch(letter)), "")
