"""One choice of a call, assembled from the tokens that the engine samples.

In: the engine's deltas. Out: pieces for a stream, and at the end the message, the ids and the
finish reason. Streamed and unstreamed answers go the same way, so they can't differ. No I/O.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import isfinite
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

from art_core.engine.base import Delta, Tokenizer
from art_core.engine.detokenize import StopStrings, StreamDecoder
from art_core.engine.forms.calls import Event, Thought, ToolCall
from art_core.errors import EngineError

if TYPE_CHECKING:
    from art_core.engine.forms.answer_form import AnswerForm

AnswerEnd: TypeAlias = Literal["stop", "length", "tool_calls"]


@dataclass
class Piece:
    """What one delta added. Text may lag behind the ids, never the other way round."""

    ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    text: str = ""
    thought: str = ""
    calls: list[dict[str, Any]] = field(default_factory=list)
    """Tool calls in OpenAI's shape, with their `index`."""
    finish_reason: AnswerEnd | None = None
    stopped_by: str | None = None
    """The stop string that ended the answer; None: none did."""


class Answer:
    """Assembles one choice.

    Args:
        call_id_prefix: tool calls get the ids "<prefix>_0", "<prefix>_1", ...
        stop: stop strings; they are cut from the text, their ids stay.
        min_tokens: stop strings do not count in the text of that many tokens.
        tools: those that may be called, in OpenAI's shape; none: calls are text.
        tool_limit: how many tool calls are read, None all; at the limit the answer ends.
        prompt: the end of what is answered, as text: it may have opened a thought.
        form: how it is read; None: as the base model writes.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        call_id_prefix: str,
        stop: Sequence[str] = (),
        min_tokens: int = 0,
        tools: Sequence[Mapping[str, Any]] = (),
        tool_limit: int | None = None,
        prompt: str = "",
        form: AnswerForm | None = None,
    ) -> None:
        self.ids: list[int] = []
        self.logprobs: list[float] = []
        self.finish_reason: AnswerEnd | None = None
        self.cached_tokens = 0
        self._parser = (form or tokenizer.form).parser(tools, limit=tool_limit, prompt=prompt)
        self._decoder = StreamDecoder(tokenizer, shown=self._parser.tokens)
        self._stops = StopStrings(stop)
        self._min_tokens = min_tokens
        self._may_end_early = bool(stop) or self._parser.has_limit
        self.is_watched = bool(stop) or (bool(tools) and tool_limit is not None)
        """The engine has to give it out token by token, so that it can be stopped where the caller
        wants its end. Where a template alone takes one call, the model itself ends behind it."""
        self._prefix = call_id_prefix
        self._text: list[str] = []
        self._thought: list[str] = []
        self._calls: list[dict[str, Any]] = []

    def take(self, delta: Delta) -> Piece:
        """Add what was sampled; tokens after the end are dropped.

        Raises:
            EngineError: the engine cancelled the call, or sent an id without a finite logprob.
        """
        if len(delta.ids) != len(delta.logprobs) or not all(map(isfinite, delta.logprobs)):
            raise EngineError(
                "the engine's ids and logprobs don't fit",
                got=(list(delta.ids), list(delta.logprobs)),
                expected="one finite logprob for each id",
            )
        piece = Piece()
        size = 1 if self._may_end_early else max(1, len(delta.ids))
        for start in range(0, len(delta.ids), size):
            part = slice(start, start + size)
            self._push(piece, delta.ids[part], delta.logprobs[part])
            if self._is_ended:
                self._finish(piece, "stop")
                return piece
        if delta.finish_reason == "cancelled":
            raise EngineError("the engine cancelled the call")
        if delta.finish_reason is not None:
            self.cached_tokens = delta.cached_tokens
            self._finish(piece, delta.finish_reason)
        return piece

    @property
    def message(self) -> dict[str, Any]:
        """The assistant message so far, in OpenAI's shape."""
        text = "".join(self._text)
        message: dict[str, Any] = {"role": "assistant", "content": text}
        if self._thought:
            message["reasoning_content"] = "".join(self._thought)
        if self._calls:
            message["content"] = text or None
            message["tool_calls"] = [
                {key: value for key, value in call.items() if key != "index"}
                for call in self._calls
            ]
        return message

    @property
    def stopped_by(self) -> str | None:
        """The stop string that ended the answer; None: none did."""
        return self._stops.matched

    @property
    def _is_ended(self) -> bool:
        return self._stops.matched is not None or self._parser.is_full

    def _push(self, piece: Piece, ids: Sequence[int], logprobs: Sequence[float]) -> None:
        self.ids += ids
        self.logprobs += logprobs
        piece.ids += ids
        piece.logprobs += logprobs
        text = self._decoder.push(ids)
        self._say(piece, self._stops.push(text) if len(self.ids) >= self._min_tokens else text)

    def _say(self, piece: Piece, text: str) -> None:
        self._add(piece, self._parser.push(text))

    def _finish(self, piece: Piece, reason: Literal["stop", "length"]) -> None:
        if not self._is_ended:
            self._say(piece, self._stops.push(self._decoder.flush()))
        if not self._is_ended:
            self._say(piece, self._stops.flush())
        self._add(piece, self._parser.finish())
        is_call = reason == "stop" and bool(self._calls)
        self.finish_reason = piece.finish_reason = "tool_calls" if is_call else reason
        piece.stopped_by = self.stopped_by

    def _add(self, piece: Piece, events: Sequence[Event]) -> None:
        for event in events:
            if isinstance(event, ToolCall):
                call = {
                    "index": len(self._calls),
                    "id": f"{self._prefix}_{len(self._calls)}",
                    "type": "function",
                    "function": {"name": event.name, "arguments": event.arguments},
                }
                self._calls.append(call)
                piece.calls.append(call)
            elif isinstance(event, Thought):
                self._thought.append(event.text)
                piece.thought += event.text
            elif event:
                self._text.append(event)
                piece.text += event
