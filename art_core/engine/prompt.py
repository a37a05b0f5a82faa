"""Token-in: the prompt of a request, in which the policy's own words are the ids it sampled.

In: messages, tools, and the records of what was sampled before. Out: prompt ids. An assistant
message equal to a recorded one enters as its recorded ids; only the text between is tokenised.
So the prompt of a call extends prompt + sample of the call before whenever messages were only
appended. Where the template itself rewrites history (it drops thinking, say), the template is
followed and the drift is named.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from art_core.calls import Ids
from art_core.engine.api_errors import ApiError
from art_core.engine.base import Tokenizer
from art_core.engine.history import History, Match
from art_core.engine.messages import template_messages
from art_core.records import TokenRecord

_CACHED_TEXTS = 1024
_REWROTE = "template rewrote history"

_Plain = list[dict[str, Any]]
_Tools = Sequence[dict[str, Any]] | None


@dataclass(frozen=True, eq=False)
class PromptBuild:
    """A prompt, and how much of it is recorded."""

    ids: Ids
    """[P] int32."""
    text: str
    """What `ids` say, special tokens spelled out."""
    reused: int
    """How many of `ids` were sampled in earlier calls and entered as recorded."""
    drift: str | None
    """Why the prompt does not extend an earlier call whose messages it extends; None: it does."""


class PromptBuilder:
    """Builds prompts for one base model; texts that come again are tokenised once.

    Not thread-safe.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._encoded: OrderedDict[str, Ids] = OrderedDict()
        self._opening_text: str | None = None

    def build(
        self, messages: Sequence[dict[str, Any]], tools: _Tools, history: History
    ) -> PromptBuild:
        """The prompt for an answer to `messages`.

        Raises:
            ApiError: the messages can't be rendered.
        """
        plain = template_messages(messages)
        match = history.match(plain, tools)
        known = [i for i, candidates in enumerate(match.candidates) if candidates]
        kept, between = self._around_kept(plain, tools, match, known)
        head = _head(match)
        parts: list[Ids] = []
        texts: list[str] = []
        reused = size = 0
        ended: TokenRecord | None = None
        for i, text in zip([*kept, None], between, strict=True):
            new_text = text if ended is None else self._after(ended, text)
            parts.append(self._encode(new_text))
            texts.append(new_text)
            size += len(parts[-1])
            if i is None:
                break
            ended = _choose(match, i, head, size)
            parts.append(ended.sampled_ids)
            texts.append(self._tokenizer.decode(ended.sampled_ids.tolist()))
            size += len(ended.sampled_ids)
            reused += len(ended.sampled_ids)
        ids = np.concatenate(parts)
        return PromptBuild(ids, "".join(texts), reused, _drift(ids, head, kept, known))

    def _around_kept(
        self, plain: _Plain, tools: _Tools, match: Match, known: list[int]
    ) -> tuple[list[int], list[str]]:
        """Those of `known` that the template leaves as they were sampled, and the text around."""
        if known:
            raws = {i: self._raw(match.candidates[i][0]) for i in known}
            between = self._between(plain, tools, known)
            if between is not None and self._shows(plain, tools, raws, between):
                return known, between
            kept = [i for i in known if self._keeps(plain, tools, i, raws[i])]
            between = self._between(plain, tools, kept) if kept else None
            if between is not None:
                return kept, between
        return [], [self._tokenizer.render(plain, tools=tools)]

    def _shows(
        self, plain: _Plain, tools: _Tools, raws: dict[int, str], between: list[str]
    ) -> bool:
        """True if the template shows every message of `raws` as exactly that text."""
        shown = [
            {"role": "assistant", "content": raws[i]} if i in raws else message
            for i, message in enumerate(plain)
        ]
        after = zip(raws.values(), between[1:], strict=True)
        return self._render(shown, tools) == between[0] + "".join(r + text for r, text in after)

    def _keeps(self, plain: _Plain, tools: _Tools, i: int, raw: str) -> bool:
        """True if the template shows message `i` as `raw`, but for white space."""
        between = self._between(plain, tools, [i])
        shown = self._render(
            [*plain[:i], {"role": "assistant", "content": raw}, *plain[i + 1 :]], tools
        )
        if between is None or shown is None:
            return False
        before, after = between
        before = before.removesuffix(self._opening())
        if not (shown.startswith(before) and shown.endswith(after)):
            return False
        middle = shown[len(before) : len(shown) - len(after)]
        return _squeezed(middle) in (_squeezed(raw), _squeezed(self._opening() + raw))

    def _between(self, plain: _Plain, tools: _Tools, places: list[int]) -> list[str] | None:
        """The rendered text around the messages at `places`, len(places) + 1 pieces.

        None if the template does not show stand-ins for them, each once and in order.
        """
        marks = [f"\ue000{i}\ue001" for i in places]
        shown = list(plain)
        for i, mark in zip(places, marks, strict=True):
            shown[i] = {"role": "assistant", "content": mark}
        rest = self._render(shown, tools)
        if rest is None:
            return None
        pieces = []
        for mark in marks:
            piece, found, rest = rest.partition(mark)
            if not found or mark in rest:
                return None
            pieces.append(piece + self._opening())
        return [*pieces, rest]

    def _render(self, plain: _Plain, tools: _Tools) -> str | None:
        """The rendered text; None if the template refuses the stand-ins."""
        try:
            return self._tokenizer.render(plain, tools=tools)
        except ApiError:
            return None

    def _opening(self) -> str:
        """What the template writes for a new answer but not for one in history ("<think>")."""
        if self._opening_text is None:
            user = [{"role": "user", "content": "q"}]
            mark = "\ue000\ue001"
            turn = [*user, {"role": "assistant", "content": mark}]
            before = self._tokenizer.render(turn, add_generation_prompt=False).split(mark)[0]
            prompt = self._tokenizer.render(user)
            self._opening_text = prompt[len(before) :] if prompt.startswith(before) else ""
        return self._opening_text

    def _raw(self, record: TokenRecord) -> str:
        """The text that was sampled, without the token that ended the turn."""
        ids = record.sampled_ids.tolist()
        if ids and ids[-1] in self._tokenizer.eos_ids:
            ids.pop()
        return self._tokenizer.decode(ids)

    def _after(self, record: TokenRecord, text: str) -> str:
        """`text` without the end of turn that `record` already has in its ids.

        A sample that was cut has none, and the template's end of turn stays.
        """
        ids = record.sampled_ids.tolist()
        if ids and ids[-1] in self._tokenizer.eos_ids:
            return text.removeprefix(self._tokenizer.decode(ids[-1:]))
        return text

    def _encode(self, text: str) -> Ids:
        ids = self._encoded.get(text)
        if ids is None:
            ids = np.asarray(self._tokenizer.encode(text), np.int32)
            self._encoded[text] = ids
            if len(self._encoded) > _CACHED_TEXTS:
                self._encoded.popitem(last=False)
        else:
            self._encoded.move_to_end(text)
        return ids


def build_prompt(
    tokenizer: Tokenizer,
    messages: Sequence[dict[str, Any]],
    tools: _Tools,
    history: Sequence[TokenRecord] = (),
) -> PromptBuild:
    """`PromptBuilder.build` for a single prompt, from the records of the rollout so far."""
    return PromptBuilder(tokenizer).build(messages, tools, History(history))


def _head(match: Match) -> Ids:
    """Prompt + sample of the call that this one goes on from; empty if there is none."""
    if match.ancestor is None:
        return np.empty(0, np.int32)
    record = match.ancestor[1]
    return np.concatenate([record.prompt_ids, record.sampled_ids])


def _choose(match: Match, i: int, head: Ids, size: int) -> TokenRecord:
    """Of several equal records the one whose ids stand at `size` in the ancestor's."""
    candidates = match.candidates[i]
    if match.ancestor is not None and i == match.ancestor[0]:
        return match.ancestor[1]
    for record in candidates:
        end = size + len(record.sampled_ids)
        if np.array_equal(head[size:end], record.sampled_ids):
            return record
    return candidates[0]


def _drift(ids: Ids, head: Ids, kept: list[int], known: list[int]) -> str | None:
    if np.array_equal(ids[: len(head)], head):
        return None
    return _REWROTE if kept != known else "history was rendered differently in an earlier call"


def _squeezed(text: str) -> str:
    return "".join(text.split())
