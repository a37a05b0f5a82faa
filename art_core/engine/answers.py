"""The seam between HTTP and what answers: bodies of chat completions in, bodies and events out."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from typing import Any, Protocol


class Answers(Protocol):
    """What the routes are answered out of, such as a `ChatService`, whose methods these are."""

    async def complete(self, body: object, *, rollout_id: str | None = None) -> dict[str, Any]: ...

    def stream(
        self, body: object, *, rollout_id: str | None = None
    ) -> AsyncGenerator[bytes, None]: ...

    def list_models(self) -> dict[str, Any]: ...

    def model(self, name: str) -> dict[str, Any]: ...

    def tokenize(self, body: object, *, rollout_id: str | None = None) -> dict[str, Any]: ...
