"""Text out of sampled ids, as it comes: half characters and half stop strings are held back.

In: ids in any portions. Out: text whose joined pieces are the same for every way of cutting.
"""

from __future__ import annotations

import codecs
from collections.abc import Collection, Iterable, Sequence

from art_core.engine.base import Tokenizer


class StreamDecoder:
    """Ids to text, special tokens left out. Broken UTF-8 becomes U+FFFD.

    Args:
        shown: special tokens that are text all the same.
    """

    def __init__(self, tokenizer: Tokenizer, shown: Collection[str] = ()) -> None:
        self._tokenizer = tokenizer
        self._shown = {token.encode() for token in shown}
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, ids: Iterable[int]) -> str:
        """Text that `ids` complete; the bytes of an unfinished character wait."""
        special, token_bytes = self._tokenizer.special_ids, self._tokenizer.token_bytes
        parts = [token_bytes(i) for i in ids if i not in special or token_bytes(i) in self._shown]
        return self._utf8.decode(b"".join(parts))

    def flush(self) -> str:
        """What still waits, at the end of the stream."""
        return self._utf8.decode(b"", final=True)


class StopStrings:
    """Cuts a text before the stop string that is complete first; holds back what may begin one."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stops)
        self._held = ""
        self.matched: str | None = None
        """The stop string that was found."""

    def push(self, text: str) -> str:
        """Text that is certainly before any stop string. After a match nothing comes."""
        if not self._stops or self.matched is not None:
            return "" if self.matched is not None else text
        self._held += text
        found = [
            (at + len(stop), at, stop) for stop in self._stops if (at := self._held.find(stop)) >= 0
        ]
        if found:
            _, at, self.matched = min(found)
            before, self._held = self._held[:at], ""
            return before
        keep = max(overlap(self._held, stop) for stop in self._stops)
        cut = len(self._held) - keep
        free, self._held = self._held[:cut], self._held[cut:]
        return free

    def flush(self) -> str:
        """What still waits, at the end of the stream."""
        held, self._held = self._held, ""
        return held


def overlap(text: str, mark: str) -> int:
    """Length of the longest end of `text` that is a proper beginning of `mark`."""
    for size in range(min(len(text), len(mark) - 1), 0, -1):
        if mark.startswith(text[-size:]):
            return size
    return 0
