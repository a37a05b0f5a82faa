"""Answers in channels, as GPT-OSS writes them (OpenAI's harmony form).

An answer is a row of messages, each a head (`<|channel|>analysis<|message|>`) and a body up to a
mark that ends it. In: text with these marks, in any portions. Out: bodies of the channel "analysis"
are thoughts, those addressed to `functions.NAME` calls, all others text. A call whose body is no
JSON object stays text, head and all.
"""

from __future__ import annotations

import re

from art_core.engine.detokenize import overlap
from art_core.engine.forms.calls import SPACE, Event, Thought, ToolCall, json_object

MESSAGE = "<|message|>"
_ENDS = ("<|end|>", "<|call|>", "<|return|>", "<|start|>")
TOKENS = frozenset({MESSAGE, *_ENDS, "<|channel|>", "<|constrain|>"})
_CHANNEL = re.compile(r"<\|channel\|>\s*(\w+)")
_ADDRESS = re.compile(r"\bto=functions\.([\w.-]+)")
_MARK = re.compile("|".join(re.escape(token) for token in sorted(TOKENS)))


class HarmonyParser:
    """Of one answer.

    Args:
        limit: ignore everything after this many calls; 0: calls are text; None: no limit.
    """

    def __init__(self, limit: int | None = None) -> None:
        self._limit = limit
        self._calls = 0
        self._buffer = ""
        self._head: str | None = None
        """Of the message that is being read; None: it is not whole."""
        self._has_text = self._has_body = False

    @property
    def tokens(self) -> frozenset[str]:
        """As `AnswerParser.tokens`."""
        return TOKENS

    @property
    def has_limit(self) -> bool:
        """As `AnswerParser.has_limit`."""
        return bool(self._limit)

    @property
    def is_full(self) -> bool:
        """As `AnswerParser.is_full`."""
        return bool(self._limit) and self._calls >= (self._limit or 0)

    def push(self, text: str) -> list[Event]:
        """What `text` completes."""
        self._buffer += text
        return self._events(is_last=False)

    def finish(self) -> list[Event]:
        """What still waits, at the end of the text."""
        return self._events(is_last=True)

    def _events(self, *, is_last: bool) -> list[Event]:
        events: list[Event] = []
        while not self.is_full and self._buffer:
            if self._head is None:
                head, mark, rest = self._buffer.partition(MESSAGE)
                if not mark:
                    return events + (self._rest() if is_last else [])
                before, _, self._head = head.rpartition("<|start|>")
                self._buffer, self._has_body = rest, False
                if (text := _MARK.split(before, maxsplit=1)[0]).strip(SPACE):
                    events += self._text(text)
                    self._has_body = False
            if not self._body(events, is_last=is_last):
                return events
        return events

    def _body(self, events: list[Event], *, is_last: bool) -> bool:
        """Read on in the body; False if more is needed."""
        assert self._head is not None
        at, mark = min(
            ((at, mark) for mark in _ENDS if (at := self._buffer.find(mark)) >= 0),
            default=(-1, ""),
        )
        is_whole = at >= 0 or is_last
        if at < 0:
            at = len(self._buffer) if is_last else len(self._buffer) - self._held()
        is_call = _ADDRESS.search(self._head) is not None and self._limit != 0
        if is_call and not is_whole:
            return False
        body, self._buffer = self._buffer[:at], self._buffer[at + len(mark) :]
        events += self._call(self._head, body) if is_call else self._said(self._head, body)
        if is_whole:
            self._head = None
            self._buffer = ("<|start|>" if mark == "<|start|>" else "") + self._buffer
        return is_whole

    def _held(self) -> int:
        """Letters at the end that a mark may begin with."""
        return max(overlap(self._buffer, mark) for mark in _ENDS)

    def _call(self, head: str, body: str) -> list[Event]:
        name = _ADDRESS.search(head)
        if name is None or json_object(body) is None:
            return self._text(_MARK.sub("", head).strip() + " " + body)
        self._calls += 1
        return [ToolCall(name[1], body.strip(SPACE))]

    def _said(self, head: str, body: str) -> list[Event]:
        channel = _CHANNEL.search(head)
        if not body:
            return []
        if channel is not None and channel[1] == "analysis":
            return [Thought(body)]
        return self._text(body)

    def _text(self, body: str) -> list[Event]:
        """A message's text; that of the one before is a line of its own."""
        joint = "\n" if self._has_text and not self._has_body else ""
        self._has_text = self._has_body = True
        return [joint + body]

    def _rest(self) -> list[Event]:
        """What no mark gives a body: text up to a mark, or what follows a channel's name."""
        text, self._buffer = self._buffer, ""
        channel = _CHANNEL.match(text)
        text = _MARK.split(text[channel.end() :] if channel else text, maxsplit=1)[0]
        if not text.strip(SPACE) or _ADDRESS.search(text):
            return []
        if channel is not None and channel[1] == "analysis":
            return [Thought(text.lstrip(SPACE))]
        return self._text(text.lstrip(SPACE) if channel else text)
