"""Token-in: the prompt of a request, in which the policy's own words are the ids it sampled.

In: messages, tools, and the records of what was sampled before. Out: prompt ids. A request that
goes on from a recorded call begins with that call's prompt and sample, id by id, and only the text
after it is tokenised; any other assistant message equal to a recorded one enters as its recorded
ids. Where the template itself rewrites history (it drops thinking, say), the template is followed
and the drift is named.
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

_Plain = list[dict[str, Any]]
_Tools = Sequence[dict[str, Any]] | None
_Parts = list[tuple[Ids, bool]]
"""Ids in order, and whether they are recorded."""


@dataclass(frozen=True, eq=False)
class PromptBuild:
    """A prompt, and how much of it is recorded."""

    ids: Ids
    """[P] int32."""
    text: str
    """What `ids` say, special tokens spelled out."""
    reused: int
    """How many of `ids` come from records and were not tokenised."""
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
        parts = self._going_on(plain, tools, match) or self._piece_by_piece(plain, tools, match)
        ids = np.concatenate([part for part, _ in parts])
        return PromptBuild(
            ids=ids,
            text=self._tokenizer.decode(ids.tolist()),
            reused=sum(len(part) for part, is_recorded in parts if is_recorded),
            drift=self._drift(ids, plain, tools, match),
        )

    def plain(self, prompt: str | Sequence[int]) -> PromptBuild:
        """A prompt that is there already, as text or ids; nothing is put in front.

        Raises:
            ApiError: an id that the base model does not have.
        """
        tokenizer = self._tokenizer
        ids = tokenizer.encode(prompt) if isinstance(prompt, str) else list(prompt)
        wrong = next((i for i in ids if not 0 <= i < tokenizer.vocab_size), None)
        if wrong is not None:
            raise ApiError(
                "a token id of the prompt is unknown",
                got=wrong,
                expected=f"0 to {tokenizer.vocab_size - 1}",
                param="prompt",
            )
        return PromptBuild(np.array(ids, np.int32), tokenizer.decode(ids), reused=0, drift=None)

    def _going_on(self, plain: _Plain, tools: _Tools, match: Match) -> _Parts | None:
        """The ancestor's ids and what comes after them; None if the template does not go on so."""
        if match.ancestor is None:
            return None
        at, record = match.ancestor
        after = [i for i in range(at + 1, len(plain)) if match.candidates[i]]
        chosen = {at: record, **{i: match.candidates[i][0] for i in after}}
        kept, between = self._around_kept(plain, tools, chosen)
        if (
            not kept
            or kept[0] != at
            or between[0] != self._tokenizer.render(plain[:at], tools=tools)
        ):
            return self._behind_a_call(plain, tools, at, record)
        parts = self._joined({i: chosen[i] for i in kept}, ["", *between[1:]])
        return [(record.prompt_ids, True), *parts]

    def _behind_a_call(
        self, plain: _Plain, tools: _Tools, at: int, record: TokenRecord
    ) -> _Parts | None:
        """The ancestor's ids and what the template writes behind the call that it is.

        For templates that take no stand-in for a call, since its result follows (GPT-OSS). None if
        it is no call, or the template shows less of it than was sampled.
        """
        message = template_messages([record.message])[0]
        if "tool_calls" not in message:
            return None
        shown = self._render([*plain[:at], message, *plain[at + 1 :]], tools)
        before = self._render(plain[:at], tools)
        if shown is None or before is None or not shown.startswith(before):
            return None
        rest = shown[len(before) :]
        ends = [self._tokenizer.decode([i]) for i in self._tokenizer.eos_ids]
        end = min((place for text in ends if (place := rest.find(text)) >= 0), default=-1)
        said = [call["function"]["name"] for call in message["tool_calls"]]
        said.append(message.get("reasoning_content", ""))
        if end < 0 or any(part not in rest[:end] for part in said):
            return None
        return [(record.prompt_ids, True), *self._joined({at: record}, ["", rest[end:]])]

    def _piece_by_piece(self, plain: _Plain, tools: _Tools, match: Match) -> _Parts:
        """Every message that is recorded as its ids, every other as text."""
        chosen = {i: records[0] for i, records in enumerate(match.candidates) if records}
        kept, between = self._around_kept(plain, tools, chosen)
        return self._joined({i: chosen[i] for i in kept}, between)

    def _joined(self, records: dict[int, TokenRecord], between: list[str]) -> _Parts:
        """Tokenised text and recorded ids in turn."""
        parts: _Parts = [(self._encode(between[0]), False)]
        for record, text in zip(records.values(), between[1:], strict=True):
            parts.append((record.sampled_ids, True))
            parts.append((self._encode(self._after(record, text)), False))
        return parts

    def _around_kept(
        self, plain: _Plain, tools: _Tools, chosen: dict[int, TokenRecord]
    ) -> tuple[list[int], list[str]]:
        """Those of `chosen` that the template leaves as they were sampled, and the text around."""
        if not chosen:
            return [], [self._tokenizer.render(plain, tools=tools)]
        raws = {i: self._raw(record) for i, record in chosen.items()}
        between = self._between(plain, tools, list(raws))
        if between is not None and self._shows(plain, tools, raws, between):
            return list(raws), between
        kept = [i for i in raws if self._keeps(plain, tools, i, raws[i])]
        between = self._between(plain, tools, kept)
        return self._around_kept(plain, tools, {}) if between is None else (kept, between)

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

    def _drift(self, ids: Ids, plain: _Plain, tools: _Tools, match: Match) -> str | None:
        if match.ancestor is None:
            return None
        at, record = match.ancestor
        head = np.concatenate([record.prompt_ids, record.sampled_ids])
        if np.array_equal(ids[: len(head)], head):
            return None
        if self._between(plain, tools, [at]) is None:
            return "template does not show messages one by one"
        return "template rewrote history"

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


def _squeezed(text: str) -> str:
    return "".join(text.split())
