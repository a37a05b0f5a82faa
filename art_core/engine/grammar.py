"""Grammars for forced answers: JSON by a schema, and tool calls as the chat template writes them.

In: JSON schemas, tools. Out: a `Grammar` (llguidance's Lark dialect) for the request, and a
`GrammarMatcher` that says token by token what may come next. No torch; llguidance is imported
when the first grammar is made.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import numpy as np
import numpy.typing as npt

from art_core.engine.api_errors import ApiError
from art_core.engine.base import Grammar, Tokenizer
from art_core.engine.forms.spelling import Speller
from art_core.errors import EngineError

if TYPE_CHECKING:
    from llguidance import LLTokenizer

_SPELLING = {
    "whitespace_flexible": False,
    "item_separator": ", ",
    "key_separator": ": ",
    "coerce_one_of": True,
}
"""One line with single spaces, as `tojson` of a chat template writes JSON. `oneOf` is read as
`anyOf`."""


def json_grammar(
    schema: dict[str, Any], spell: Speller | None = None, *, param: str = "response_format"
) -> Grammar:
    """Answers that are JSON by `schema`.

    Args:
        spell: how the model that answers writes; None: as Hermes, without special tokens.

    Raises:
        ApiError: the schema can't be enforced; the message names the keyword.
    """
    spell = spell or Speller()
    rules = [*spell.start("answer"), f"answer: {spell.json('value')}", f"value: {_json(schema)}"]
    return _checked("json_schema", "\n".join([*rules, ""]), param)


def tool_call_grammar(
    tools: Sequence[dict[str, Any]],
    spell: Speller | None = None,
    *,
    several: bool,
    or_json: dict[str, Any] | None = None,
    param: str = "tools",
) -> Grammar:
    """Answers that are calls of `tools` (OpenAI's shape) and nothing else.

    Args:
        tools: those that may be called, at least one.
        spell: as in `json_grammar`.
        several: allow more than one call; else it is exactly one.
        or_json: instead of calls, JSON by this schema is fine too.

    Raises:
        ApiError: a parameters schema can't be enforced; the message names the keyword. Or calls in
            the model's form can't be forced.
    """
    spell = spell or Speller()
    rules = spell.calls(
        tools, several, arguments=lambda schema: _json(_closed(schema)), value=_json
    )
    if or_json is None:
        start = spell.start("calls")
    else:
        start = spell.start("(calls | answer)")
        rules += [f"answer: {spell.json('value')}", f"value: {_json(or_json)}"]
    kind = "tool_call" if or_json is None else "json_schema"
    return _checked(kind, "\n".join([*start, *rules, ""]), param)


class GrammarMatcher:
    """Follows one sequence through a grammar. Not thread-safe; make one for each sequence.

    Args:
        grammar: what is allowed.
        tokenizer: that of the model whose tokens are masked.

    Raises:
        EngineError: the grammar can't be used.
    """

    def __init__(self, grammar: Grammar, tokenizer: Tokenizer) -> None:
        from llguidance import LLMatcher

        self._vocab_size = tokenizer.vocab_size
        self._matcher = LLMatcher(
            _token_trie(tokenizer), LLMatcher.grammar_from_lark(grammar.lark), log_level=0
        )
        self._check()

    def mask(self) -> npt.NDArray[np.bool_]:
        """[vocab_size] True where a token may come next; at least one is True.

        A model may have more logits than the tokenizer has tokens; those are never allowed.
        Where the answer may end, the ids that end a turn are allowed.
        """
        bits = np.frombuffer(self._matcher.compute_bitmask(), np.uint8)
        self._check()
        return np.unpackbits(bits, count=self._vocab_size, bitorder="little").astype(np.bool_)

    def advance(self, token_id: int) -> None:
        """Take the token that was sampled.

        Raises:
            EngineError: the mask did not allow it.
        """
        if not self._matcher.consume_token(token_id):
            raise EngineError(
                "a token was sampled that the grammar does not allow",
                got=token_id,
                fix="Mask the logits with GrammarMatcher.mask() before sampling.",
            )

    @property
    def finished(self) -> bool:
        """True if nothing but the end of the turn can follow."""
        return self._matcher.is_stopped()

    def _check(self) -> None:
        if self._matcher.is_error():
            raise EngineError(f"the grammar can't be followed ({self._matcher.get_error()})")


def _closed(parameters: dict[str, Any]) -> dict[str, Any]:
    """A tool takes the parameters it lists and no others, unless its schema says so."""
    if parameters.keys() <= {"type", "title", "description"}:
        parameters = {**parameters, "properties": {}}
    if "properties" not in parameters:
        return {"type": "object", **parameters}
    return {"type": "object", "additionalProperties": False, **parameters}


def _json(schema: dict[str, Any]) -> str:
    return "%json " + json.dumps({**schema, "x-guidance": _SPELLING})


def _checked(kind: str, lark: str, param: str) -> Grammar:
    from llguidance import LLMatcher

    fault = LLMatcher.validate_grammar(LLMatcher.grammar_from_lark(lark))
    if fault:
        raise ApiError(
            f"the JSON schema can't be enforced: {_reason(fault)}",
            fix="Leave that part out of the schema, or check it in your own code.",
            param=param,
        )
    return Grammar(kind=kind, lark=lark)


def _reason(fault: str) -> str:
    """llguidance's complaint without the source lines it quotes."""
    text = re.split(r"\n\s*\d+ \|", fault, maxsplit=1)[0]
    text = re.sub(r"^at \d+\(\d+\): ", "", text).removeprefix("failed to compile JSON schema: ")
    return " ".join(text.split())


class _Wrapped:
    """What llguidance wants to see of a tokenizer."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.eos_token_id = min(tokenizer.eos_ids)
        self.bos_token_id = None
        self.tokens = [tokenizer.token_bytes(i) for i in range(tokenizer.vocab_size)]
        self.special_token_ids = sorted(tokenizer.special_ids | tokenizer.eos_ids)
        self._encode = tokenizer.encode

    def __call__(self, text: str) -> list[int]:
        return self._encode(text)


_tries: WeakKeyDictionary[Tokenizer, LLTokenizer] = WeakKeyDictionary()


def _token_trie(tokenizer: Tokenizer) -> LLTokenizer:
    """The tokenizer as llguidance knows it; built once."""
    trie = _tries.get(tokenizer)
    if trie is None:
        from llguidance import LLTokenizer, TokenizerWrapper

        trie = LLTokenizer(
            TokenizerWrapper(_Wrapped(tokenizer)), eos_token=sorted(tokenizer.eos_ids)
        )
        _tries[tokenizer] = trie
    return trie
