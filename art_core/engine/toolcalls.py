"""Tool calls parsed out of a text as it comes, in the form that the model writes them.

In: text in any portions. Out: text and calls in order; arguments as they were written. Whatever is
not a whole call stays text, so nothing is said that was not sampled, and a broken call takes no
good one with it. White space that touches a call is dropped; texts before and after calls are
joined by a line break.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from art_core.engine.detokenize import overlap
from art_core.engine.forms.calls import SPACE, Block, Event, ToolCall
from art_core.engine.forms.table import HERMES, CallForm


class ToolCallParser:
    """Splits a text into plain text and calls; the pieces' sequence does not depend on how the
    text was cut. Text is given out as soon as it can't be part of a call.

    Args:
        limit: ignore everything after this many calls; None means no limit.
        form: how calls are written.
        tools: those that may be called, with their parameters' schemas.
    """

    def __init__(
        self,
        limit: int | None = None,
        form: CallForm = HERMES,
        tools: Mapping[str, Mapping[str, Any]] | None = None,
    ) -> None:
        self.calls = 0
        self._limit, self._form, self._tools = limit, form, tools or {}
        self._buffer = ""
        self._block: Block | None = None
        self._space = ""
        self._after_call = False
        self._has_text = False

    @property
    def tokens(self) -> frozenset[str]:
        """As `AnswerParser.tokens`."""
        return self._form.tokens

    @property
    def has_limit(self) -> bool:
        """As `AnswerParser.has_limit`."""
        return self._limit is not None

    def push(self, text: str) -> list[Event]:
        """What `text` completes."""
        self._buffer += text
        return [*self._events(is_last=False)]

    def finish(self) -> list[Event]:
        """What still waits, at the end of the text; an unfinished call is text."""
        events = [*self._events(is_last=True)]
        if self._space and not self._after_call:
            events.append(self._space)
        self._space = ""
        return events

    @property
    def is_full(self) -> bool:
        """True if `limit` calls were found."""
        return self._limit is not None and self.calls >= self._limit

    def _events(self, *, is_last: bool) -> Iterator[Event]:
        while not self.is_full:
            if self._block is None:
                yield from self._text_before_a_call(is_last=is_last)
                if self._block is None:
                    return
            read = self._block.read(self._buffer, is_last=is_last)
            if read is None:
                return
            self._buffer = self._buffer[read.end :]
            if read.is_over:
                self._block = None
            if isinstance(read.event, ToolCall):
                self._space, self._after_call = "", True
                self.calls += 1
                yield read.event
            elif read.event:
                yield from self._text(read.event)

    def _text_before_a_call(self, *, is_last: bool) -> Iterator[str]:
        """Text up to the next mark, if there is one; then a block is open."""
        buffer, form = self._buffer, self._form
        at, mark = min(
            ((at, mark) for mark in form.marks if (at := buffer.find(mark)) >= 0), default=(-1, "")
        )
        held = 0 if is_last else max(overlap(buffer, mark) for mark in form.marks)
        end = at if at >= 0 else len(buffer) - held
        yield from self._text(buffer[:end])
        if at >= 0:
            self._block = form.opened(mark, self._tools)
            end += 0 if mark in form.bare else len(mark)
        self._buffer = buffer[end:]

    def _text(self, text: str) -> Iterator[str]:
        """`text` less the white space at its end, which waits for what follows it."""
        text = self._space + text
        if self._after_call:
            text = text.lstrip(SPACE + self._form.joint)
        body = text.rstrip(SPACE)
        self._space = text[len(body) :]
        if body:
            joint = "\n" if self._after_call and self._has_text else ""
            self._after_call, self._has_text = False, True
            yield joint + body


def parse_tool_calls(text: str, form: CallForm = HERMES) -> tuple[str, list[ToolCall]]:
    """(plain text, calls) of a whole text."""
    parser = ToolCallParser(form=form)
    events = [*parser.push(text), *parser.finish()]
    calls = [event for event in events if isinstance(event, ToolCall)]
    return "".join(event for event in events if isinstance(event, str)), calls
