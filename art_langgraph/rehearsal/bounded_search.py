"""Which of some texts a regular expression of somebody else matches, within bounded time.

In: a pattern and texts. Out: the first text that fits, or None; also where that would take too
long. A pattern that may try one text in very many ways (`(a+)+$`, `(a|a){30}`, `\\w*\\w*\\w*!`) is
searched for in a process of its own, since Python's matching can't be stopped in this one.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Sequence

_SECONDS = 2.0
"""That a search may take; most of it is for the process to begin on a busy machine."""
_PROGRAM = """
import json, re, sys
pattern, texts = json.load(sys.stdin)
known = re.compile(pattern)
print(next((i for i, text in enumerate(texts) if known.search(text)), -1))
"""
_too_slow: set[str] = set()
"""Patterns that have run out of their time, and are not tried again."""


def first_match(pattern: str, texts: Sequence[str]) -> str | None:
    """The first of `texts` that `pattern`, of Python's `re`, matches anywhere.

    Raises:
        re.error: it is no pattern.
    """
    known = re.compile(pattern)
    if is_simple(pattern):
        return next((text for text in texts if known.search(text)), None)
    if pattern in _too_slow:
        return None
    try:
        done = subprocess.run(
            [sys.executable, "-I", "-S", "-W", "ignore", "-c", _PROGRAM],
            input=json.dumps([pattern, list(texts)]),
            capture_output=True,
            text=True,
            timeout=_SECONDS,
            check=False,  # it may run out of memory: then nothing was found
        )
    except subprocess.TimeoutExpired:
        _too_slow.add(pattern)
        return None
    place = -1 if done.returncode else int(done.stdout)
    return None if place < 0 else texts[place]


def is_simple(pattern: str) -> bool:
    """True if matching takes at most time quadratic in the text: one repetition of varying length,
    and none of a group or of what a group has matched.
    """
    plain = re.sub(r"\\[1-9]|\(\?P=", "()*", pattern)  # a reference
    plain = re.sub(r"\\.", "e", plain, flags=re.DOTALL)
    plain = re.sub(r"\[\^?\]?[^\]]*\]", "c", plain)
    plain = plain.replace("(?", "(")
    varying = re.findall(r"[*+?]|\{\d*,\d*\}", plain)
    return len(varying) <= 1 and not re.search(r"\)[*+?{]", plain)
