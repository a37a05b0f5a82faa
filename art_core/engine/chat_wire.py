"""The JSON of chat completions: OpenAI's shapes and our extras beside them.

In: answers as they are assembled. Out: plain dicts for the body of a response or the events of a
stream. The extras (`art_policy`, `art_sampling`, `art_record_id`, `prompt_token_ids`,
`token_ids`) are documented in `openai_routes`.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from art_core.calls import Ids, Sampling
from art_core.engine.answer import Answer, Piece
from art_core.engine.base import Tokenizer

DONE = b"data: [DONE]\n\n"
KEEP_ALIVE = b": held\n\n"
"""A comment of a stream: it keeps proxies and clients from giving up on a waiting call."""


@dataclass(frozen=True, eq=False)
class Envelope:
    """What is the same in every part of one response."""

    record_id: str
    model: str
    """The name that was asked for."""
    policy: str
    sampling: Sampling
    """Of choice 0; other choices differ in the seed."""
    created: int
    """Seconds since the epoch."""
    prompt_ids: Ids
    logprobs: bool
    return_token_ids: bool
    tokenizer: Tokenizer
    drift: str | None

    def completion(self, answers: Sequence[Answer]) -> dict[str, Any]:
        """The body of an unstreamed response."""
        body = self._head("chat.completion")
        body["art_sampling"] = asdict(self.sampling)
        if self.return_token_ids:
            body["prompt_token_ids"] = self.prompt_ids.tolist()
        body["choices"] = [
            self._choice(i, answer.ids, answer.logprobs, answer.finish_reason)
            | {"message": answer.message}
            | _stop_reason(answer.stopped_by)
            for i, answer in enumerate(answers)
        ]
        body["usage"] = self.usage(answers)
        return body

    def first(self, count: int) -> list[dict[str, Any]]:
        """The chunks that open the streams of `count` choices."""
        chunks = []
        for i in range(count):
            chunk = self._chunk(i, {"role": "assistant", "content": ""}, [], [], None)
            chunk["art_sampling"] = asdict(self.sampling)
            if self.return_token_ids and i == 0:
                chunk["prompt_token_ids"] = self.prompt_ids.tolist()
            chunks.append(chunk)
        return chunks

    def chunks(self, index: int, piece: Piece) -> list[dict[str, Any]]:
        """The chunks of one piece of choice `index`; every id is in exactly one of them."""
        delta: dict[str, Any] = {}
        if piece.thought:
            delta["reasoning_content"] = piece.thought
        if piece.text:
            delta["content"] = piece.text
        if piece.calls:
            delta["tool_calls"] = piece.calls
        is_shown = bool(piece.ids) and (self.logprobs or self.return_token_ids)
        chunks = []
        if delta or is_shown:
            chunks.append(self._chunk(index, delta, piece.ids, piece.logprobs, None))
        if piece.finish_reason is not None:
            chunk = self._chunk(index, {}, [], [], piece.finish_reason)
            chunk["choices"][0] |= _stop_reason(piece.stopped_by)
            chunks.append(chunk)
        return chunks

    def last(self, answers: Sequence[Answer]) -> dict[str, Any]:
        """The chunk that carries the usage of a stream."""
        return {**self._head("chat.completion.chunk"), "choices": [], "usage": self.usage(answers)}

    def usage(self, answers: Sequence[Answer]) -> dict[str, Any]:
        """Tokens read and sampled; prompt positions taken from a cache are told apart."""
        prompt, sampled = len(self.prompt_ids), sum(len(answer.ids) for answer in answers)
        return {
            "prompt_tokens": prompt,
            "completion_tokens": sampled,
            "total_tokens": prompt + sampled,
            "prompt_tokens_details": {
                "cached_tokens": min(answer.cached_tokens for answer in answers)
            },
        }

    def _head(self, kind: str) -> dict[str, Any]:
        head: dict[str, Any] = {
            "id": f"chatcmpl-{self.record_id}",
            "object": kind,
            "created": self.created,
            "model": self.model,
            "system_fingerprint": self.record_id,
            "art_policy": self.policy,
        }
        if self.drift is not None:
            head["art_drift"] = self.drift
        return head

    def _chunk(
        self,
        index: int,
        delta: dict[str, Any],
        ids: Sequence[int],
        logprobs: Sequence[float],
        finish_reason: str | None,
    ) -> dict[str, Any]:
        choice = self._choice(index, ids, logprobs, finish_reason)
        choice["delta"] = delta
        if not ids:
            choice["logprobs"] = None
            choice.pop("token_ids", None)
        return {**self._head("chat.completion.chunk"), "choices": [choice]}

    def _choice(
        self, index: int, ids: Sequence[int], logprobs: Sequence[float], finish_reason: str | None
    ) -> dict[str, Any]:
        choice: dict[str, Any] = {
            "index": index,
            "finish_reason": finish_reason,
            "logprobs": self._logprobs(ids, logprobs) if self.logprobs else None,
            "art_record_id": self.record_id,
        }
        if self.return_token_ids:
            choice["token_ids"] = list(ids)
        return choice

    def _logprobs(self, ids: Sequence[int], logprobs: Sequence[float]) -> dict[str, Any]:
        content = []
        for token_id, logprob in zip(ids, logprobs, strict=True):
            token = self.tokenizer.token_bytes(token_id)
            content.append(
                {
                    "token": token.decode("utf-8", "replace"),
                    "bytes": list(token),
                    "logprob": logprob,
                    "top_logprobs": [],
                }
            )
        return {"content": content, "refusal": None}


def _stop_reason(stop: str | None) -> dict[str, str]:
    return {} if stop is None else {"stop_reason": stop}


def event(data: dict[str, Any]) -> bytes:
    """One server-sent event: a single line of ASCII JSON."""
    return b"data: %b\n\n" % json.dumps(data, separators=(",", ":"), allow_nan=False).encode()
