"""`plural`: a count and its noun, as English has it."""

from __future__ import annotations


def plural(count: int, word: str) -> str:
    """ "1 call", "2,000 calls"."""
    return f"{count:,} {word}" + ("" if count == 1 else "s")
