"""Where in the user's own files something went wrong.

In: an exception. Out: its place or its traceback, without the frames of ours and of libraries that
stand between the command and the user's code.
"""

from __future__ import annotations

import sysconfig
import traceback
from pathlib import Path

import art_core
import art_langgraph
from art_langgraph.faults import chain

_OURS = tuple(str(Path(p.__path__[0]).resolve()) for p in (art_core, art_langgraph))
_PYTHONS = (str(Path(sysconfig.get_path("stdlib")).resolve()), "<frozen ")


def place_of(error: BaseException) -> str:
    """ " (agent.py:41 in plan)": the innermost frame in the user's files; "" if there is none."""
    for seen in chain(error):
        frames = [f for f in traceback.extract_tb(seen.__traceback__) if _is_theirs(f.filename)]
        if frames:
            last = frames[-1]
            return f" ({Path(last.filename).name}:{last.lineno} in {last.name})"
    return ""


def named(error: BaseException, length: int = 300) -> str:
    """Kind and message of an exception, in one line."""
    text = " ".join(f"{type(error).__name__}: {error}".split())
    return text if len(text) <= length else f"{text[: length - 3]}..."


def their_traceback(error: BaseException) -> str:
    """The traceback as Python prints it, of the user's own frames and the one that raised."""
    told = traceback.TracebackException.from_exception(error)
    _drop_ours(told, set())
    return "".join(told.format())


def is_theirs(error: BaseException) -> bool:
    """True if the exception passed through the user's files, or is about how they are written."""
    if isinstance(error, SyntaxError):
        return True
    frames = traceback.extract_tb(error.__traceback__)
    return any(_is_theirs(frame.filename) for frame in frames)


def _drop_ours(told: traceback.TracebackException, seen: set[int]) -> None:
    if id(told) in seen:
        return
    seen.add(id(told))
    kept = [f for f in told.stack if not f.filename.startswith((*_OURS, "<frozen importlib"))]
    theirs = [place for place, frame in enumerate(kept) if _is_theirs(frame.filename)]
    if theirs:
        last = kept[theirs[-1] + 1 :][-1:]  # where it came from in a library
        kept = [kept[place] for place in theirs] + last
    told.stack = traceback.StackSummary.from_list(kept)
    for other in (told.__cause__, told.__context__):
        if other is not None:
            _drop_ours(other, seen)


def _is_theirs(filename: str) -> bool:
    if filename.startswith(_PYTHONS) or "site-packages" in filename:
        return False
    return not str(Path(filename).resolve()).startswith((*_OURS, *_PYTHONS))
