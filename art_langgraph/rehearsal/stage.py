"""Where a scripted rehearsal is played: the real endpoint over an engine that an actor speaks for.

In: chat completions over loopback HTTP, from any client. Out: the actor's answers, with token ids
and records as in training. Everything on the way is the real thing; only the model is made up.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping
from contextvars import ContextVar
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from art_core.capture import Target
from art_core.config import SamplingConfig
from art_core.engine.base import AdapterRef, GenerateRequest
from art_core.engine.chat_service import ChatService
from art_core.engine.model_registry import ModelRegistry
from art_core.engine.openai_routes import create_app
from art_core.engine.scripted import ScriptedEngine
from art_core.engine.serving import LoopbackServer
from art_core.records import RecordStore
from art_langgraph.rehearsal.actor import Actor
from art_langgraph.rehearsal.words import WordTokenizer

NAME = "rehearsal"
"""Served name of the scripted policy."""
_CONTEXT = 1_000_000
"""Tokens: no prompt is refused here; how long they are is a finding of its own."""

_ASKED: ContextVar[tuple[Mapping[str, Any], str | None] | None] = ContextVar("asked", default=None)


class ScriptedStage:
    """A running endpoint; use it as a context manager."""

    def __init__(self) -> None:
        self._actor = Actor()
        self._playing: str | None = None
        self.engine = ScriptedEngine(
            self._speak, tokenizer=WordTokenizer(), base_model="scripted", context_length=_CONTEXT
        )
        self.records = RecordStore(None)
        self._registry = ModelRegistry("scripted")
        self._server = LoopbackServer(
            create_app(_Service(self, self.engine, self.records, self._registry))
        )

    def __enter__(self) -> Self:
        self._server.start()
        self._registry.publish(NAME, 0)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._server.stop()
        self.records.close()

    @property
    def playing(self) -> str | None:
        """The rollout that calls of clients which name none belong to."""
        return self._playing

    def open(self, rollout: str) -> None:
        """From now on such calls belong to `rollout`."""
        self._playing = rollout

    @property
    def base_url(self) -> str:
        """Ends in "/v1"; known once it runs."""
        return self._server.base_url

    async def prepare(self) -> None:
        """Make the policy servable."""
        await self.engine.load_adapter(AdapterRef(NAME, 0), Path())

    def target(self, *_: object, **__: object) -> Target:
        """Where a rollout's calls go: a policy in training."""
        return Target(self.base_url, "local", NAME, sampling=SamplingConfig(), trains=True)

    def _speak(self, prompt: str, request: GenerateRequest) -> str:
        asked = _ASKED.get()
        assert asked is not None
        return self._actor.answer(*asked)


class _Service(ChatService):
    """Lets the actor see the whole request, and answers under whatever name a client uses."""

    def __init__(self, stage: ScriptedStage, *parts: Any) -> None:
        super().__init__(*parts)
        self._stage = stage

    async def complete(self, body: object, *, rollout_id: str | None = None) -> dict[str, Any]:
        return await super().complete(self._told(body, rollout_id), rollout_id=rollout_id)

    async def stream(
        self, body: object, *, rollout_id: str | None = None
    ) -> AsyncGenerator[bytes, None]:
        async for data in super().stream(self._told(body, rollout_id), rollout_id=rollout_id):
            yield data

    def _told(self, body: object, rollout_id: str | None) -> object:
        if not isinstance(body, dict):
            return body
        _ASKED.set((body, rollout_id or self._stage.playing))
        return body if body.get("model") in self.models.names() else {**body, "model": NAME}
