"""Stop strings: ends a sequence at the token that completes one of them.

In: token ids, one at a time. Out: whether a stop string now stands in the text. The text is
decoded from the last few tokens only.
"""

from __future__ import annotations

from collections.abc import Sequence

from art_core.engine.base import Tokenizer


class StopStrings:
    """Watches one sequence.

    Args:
        stops: non-empty strings.
    """

    def __init__(self, tokenizer: Tokenizer, stops: Sequence[str]) -> None:
        self._tokenizer = tokenizer
        self._stops = tuple(stops)
        self._ids: list[int] = []
        # A token spells at least one byte, so no stop string spans more tokens than its bytes.
        self._span = max(len(s.encode()) for s in stops) + 1

    def push(self, token: int) -> bool:
        """Add a token; True if a stop string is complete."""
        self._ids.append(token)
        text = self._tokenizer.decode(self._ids[-self._span :])
        return any(stop in text for stop in self._stops)
