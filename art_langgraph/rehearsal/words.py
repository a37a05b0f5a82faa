"""A tokenizer for rehearsals: pieces of words, about as many as a real model's tokens.

In: any text. Out: ids and back without loss. The vocabulary is made up as texts come, so that token
limits and lengths are roughly those of a real tokenizer, with no file to load. Implements
`engine.base.Tokenizer`.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Sequence

from art_core.engine.chat_template import ChatTemplate, hermes_chatml
from art_core.engine.tokenizer import TemplatedTokenizer

_SPECIAL = ("<|im_start|>", "<|im_end|>")
_PIECE = re.compile(r"<\|im_start\|>|<\|im_end\|>| ?[^\W\d]{1,8}|\d{1,3}|[^\w\s]{1,3}|\s|.", re.S)


class WordTokenizer(TemplatedTokenizer):
    """Ids in the order in which pieces were first met. Thread-safe."""

    def __init__(self) -> None:
        self._pieces: list[str] = [*_SPECIAL]
        self._ids = {piece: i for i, piece in enumerate(_SPECIAL)}
        self._lock = threading.Lock()
        self._template = ChatTemplate(hermes_chatml())
        self.vocab_size = len(_SPECIAL)
        self.special_ids = frozenset(range(len(_SPECIAL)))
        self.eos_ids = frozenset({self._ids["<|im_end|>"]})

    def encode(self, text: str) -> list[int]:
        """Ids of `text`."""
        with self._lock:
            return [self._id(piece) for piece in _PIECE.findall(text)]

    def decode(self, ids: Sequence[int], *, skip_special: bool = False) -> str:
        """Text of `ids`."""
        kept = (i for i in ids if not (skip_special and i in self.special_ids))
        return "".join(self._pieces[i] for i in kept)

    def token_bytes(self, token_id: int) -> bytes:
        """Bytes that `token_id` stands for."""
        return self._pieces[token_id].encode("utf-8", "surrogatepass")

    def _id(self, piece: str) -> int:
        found = self._ids.get(piece)
        if found is None:
            found = self._ids[piece] = len(self._pieces)
            self._pieces.append(piece)
            self.vocab_size += 1
        return found
