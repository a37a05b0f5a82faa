"""An engine whose answers come from a function: for tests, rehearsals and load tests. No torch.

In: the prompt, as ids and as text. Out: the script's text as ids with constant logprobs, in
several deltas. It honours max_tokens, stop strings and cancellation; a grammar is the script's
own business.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable
from pathlib import Path
from typing import TypeAlias

from art_core.engine.base import AdapterRef, Delta, FinishReason, GenerateRequest, Tokenizer
from art_core.engine.detokenize import StopStrings, StreamDecoder
from art_core.engine.tokenizer import ByteTokenizer
from art_core.errors import EngineError

Script: TypeAlias = Callable[[str, GenerateRequest], str]
"""(prompt text, request) -> the answer's text, without its end-of-turn token."""

LOGPROB = -0.1
"""Natural-log probability that every scripted token is said to have."""


class ScriptedEngine:
    """Implements `base.Engine`.

    Args:
        script: writes the answers; called once a request, on the caller's event loop.
        tokenizer: bytes with ChatML specials if None.
        context_length: prompt and sample together, in tokens.
        delta_tokens: tokens in one delta.
        delay: seconds before each delta.
    """

    def __init__(
        self,
        script: Script,
        *,
        tokenizer: Tokenizer | None = None,
        base_model: str = "scripted",
        context_length: int = 32_768,
        delta_tokens: int = 16,
        delay: float = 0.0,
    ) -> None:
        self.base_model = base_model
        self.context_length = context_length
        self.tokenizer: Tokenizer = tokenizer or ByteTokenizer()
        self.running = 0
        """Requests being answered now."""
        self.cancelled = 0
        """Requests whose iterator was closed before the end."""
        self._script = script
        self._delta_tokens = delta_tokens
        self.delay = delay
        self._adapters: dict[AdapterRef, Path] = {}
        self._is_closed = False

    async def generate(self, request: GenerateRequest) -> AsyncGenerator[Delta, None]:
        """Stream the script's answer.

        Raises:
            EngineError: closed, an unknown adapter, or the script raised.
        """
        self._check(request)
        ids, is_cut = self._answer(request)
        self.running += 1
        is_done = False
        try:
            for start in range(0, max(1, len(ids)), self._delta_tokens):
                await asyncio.sleep(self.delay)
                if self._is_closed:
                    raise EngineError("the engine was closed during a call")
                part = ids[start : start + self._delta_tokens]
                is_done = start + self._delta_tokens >= len(ids)
                reason: FinishReason = "length" if is_cut else "stop"
                yield Delta(part, [LOGPROB] * len(part), reason if is_done else None)
        finally:
            self.running -= 1
            if not is_done:
                self.cancelled += 1

    async def load_adapter(self, adapter: AdapterRef, path: Path) -> None:
        """Know `adapter`; the file is not read."""
        self._adapters[adapter] = path

    async def unload_adapter(self, adapter: AdapterRef) -> None:
        """Forget `adapter`; unknown ones are ignored."""
        self._adapters.pop(adapter, None)

    def adapters(self) -> list[AdapterRef]:
        """The adapters that can be asked for."""
        return list(self._adapters)

    async def close(self) -> None:
        """Stop; running calls end with an EngineError."""
        self._is_closed = True

    def _check(self, request: GenerateRequest) -> None:
        if self._is_closed:
            raise EngineError("the engine is closed", fix="Make a new one.")
        if request.adapter is not None and request.adapter not in self._adapters:
            raise EngineError(
                "the engine does not know the adapter",
                got=str(request.adapter),
                expected=f"one of {[str(adapter) for adapter in self._adapters]}",
                fix="Load it first.",
            )

    def _answer(self, request: GenerateRequest) -> tuple[list[int], bool]:
        """(ids, True if they were cut by a token limit)."""
        prompt = self.tokenizer.decode(request.prompt_ids.tolist())
        try:
            text = self._script(prompt, request)
        except Exception as error:
            raise EngineError(f"the script failed ({error!r})") from error
        ids = [*self.tokenizer.encode(text), min(self.tokenizer.eos_ids)]
        room = self.context_length - len(request.prompt_ids)
        limit = min(room, request.sampling.max_tokens or room)
        stopped = self._until_stop(ids, request.sampling.stop)
        return (stopped, False) if len(stopped) <= limit else (ids[:limit], True)

    def _until_stop(self, ids: list[int], stop: tuple[str, ...]) -> list[int]:
        """`ids` up to and with the token that completes a stop string."""
        if not stop:
            return ids
        decoder, stops = StreamDecoder(self.tokenizer), StopStrings(stop)
        for count, token_id in enumerate(ids, start=1):
            stops.push(decoder.push([token_id]))
            if stops.matched is not None:
                return ids[:count]
        return ids
