"""Thoughts that stand before an answer, parted from it as the text comes.

In: text in any portions. Out: the same as thoughts and text. Thoughts stand at the beginning,
between two marks; the first of them is in the prompt already where the template opens it. White
space around the marks is dropped. A thought that does not end is a thought to its end.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from art_core.engine.detokenize import overlap
from art_core.engine.forms.calls import SPACE, Event, Thought


@dataclass(frozen=True)
class ThoughtForm:
    """What thoughts stand between."""

    open: str
    close: str


class ThoughtParser:
    """Of one answer.

    Args:
        is_open: the prompt ends with the first mark.
    """

    def __init__(self, form: ThoughtForm, *, is_open: bool) -> None:
        self._form = form
        self._where: Literal["before", "in", "behind", "answer"] = "in" if is_open else "before"
        self._held = ""
        self._has_thought = False

    def push(self, text: str) -> list[Event]:
        """What `text` completes."""
        self._held += text
        events: list[Event] = []
        if self._where == "before":
            self._begin()
        if self._where == "in":
            events += self._think(is_last=False)
        if self._where == "behind":
            self._held = self._held.lstrip(SPACE)
            self._where = "answer" if self._held else "behind"
        if self._where == "answer" and self._held:
            events.append(self._held)
            self._held = ""
        return events

    def finish(self) -> list[Event]:
        """What still waits, at the end of the text."""
        if self._where == "in":
            return self._think(is_last=True)
        held, self._held = self._held, ""
        return [held] if held and self._where != "behind" else []

    def _begin(self) -> None:
        """See whether a thought comes first."""
        begun = self._held.lstrip(SPACE)
        if begun.startswith(self._form.open):
            self._where, self._held = "in", begun.removeprefix(self._form.open)
        elif not self._form.open.startswith(begun):
            self._where = "answer"

    def _think(self, *, is_last: bool) -> list[Event]:
        """Give out the thought as far as it is certain."""
        if not self._has_thought:
            self._held = self._held.lstrip(SPACE)
        thought, mark, rest = self._held.partition(self._form.close)
        if mark:
            self._where, self._held = "behind", rest
        else:
            kept = 0 if is_last else overlap(thought, self._form.close)
            certain = thought[: len(thought) - kept]
            self._held = "" if is_last else thought[len(certain.rstrip(SPACE)) :]
            thought = certain
        thought = thought.rstrip(SPACE)
        self._has_thought = self._has_thought or bool(thought)
        return [Thought(thought)] if thought else []
