"""All models of the server under one OpenAI surface: a call goes to the base model that knows it.

In: the chat services of the bases that are loaded, asked for at each call. Out: the same methods as
one of them (`engine.openai_routes.Answers`).
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from typing import Any

from art_core.engine.api_errors import ApiError, error_response
from art_core.engine.chat_service import ChatService
from art_core.engine.chat_wire import KEEP_ALIVE, event
from art_core.errors import ARTError
from art_core.server.admission import Admission


class ServedModels:
    """Answers by the "model" of a request, each call in its turn.

    Args:
        keep_alive: seconds of waiting for a turn after which a stream is sent a comment.
    """

    def __init__(
        self,
        services: Callable[[], Sequence[ChatService]],
        admission: Admission,
        *,
        keep_alive: float = 10.0,
    ) -> None:
        self._services, self._admission = services, admission
        self._keep_alive = keep_alive

    async def complete(self, body: object, *, rollout_id: str | None = None) -> dict[str, Any]:
        """As `ChatService.complete`.

        Raises:
            ApiError: also 429, too many calls wait.
        """
        service = self._of(_model(body))
        async with self._admission.turn(str(_model(body))):
            return await service.complete(body, rollout_id=rollout_id)

    async def stream(
        self, body: object, *, rollout_id: str | None = None
    ) -> AsyncGenerator[bytes, None]:
        """As `ChatService.stream`; `ApiError` as `complete`. While it waits for its turn, and so
        has nothing to say, comments keep the connection alive.
        """
        service = self._of(_model(body))
        entering = asyncio.ensure_future(self._admission.enter(str(_model(body))))
        is_open = False
        try:
            while not (await asyncio.wait({entering}, timeout=self._keep_alive))[0]:
                is_open = True
                yield KEEP_ALIVE
            await entering
            async with aclosing(service.stream(body, rollout_id=rollout_id)) as events:
                async for one in events:
                    yield one
        except ARTError as error:
            if not is_open:
                raise
            yield event(error_response(error)[1])
        finally:
            is_in = not entering.cancel() and not entering.cancelled()
            if is_in and entering.exception() is None:
                self._admission.leave()

    def list_models(self) -> dict[str, Any]:
        """As `ChatService.list_models`."""
        cards = [card for service in self._services() for card in service.list_models()["data"]]
        return {"object": "list", "data": cards}

    def model(self, name: str) -> dict[str, Any]:
        """As `ChatService.model`."""
        return self._of(name).model(name)

    def tokenize(self, body: object, *, rollout_id: str | None = None) -> dict[str, Any]:
        """As `ChatService.tokenize`."""
        return self._of(_model(body)).tokenize(body, rollout_id=rollout_id)

    def _of(self, name: object) -> ChatService:
        services = self._services()
        if not services:
            raise ApiError(
                "no model is served yet",
                fix="Register one: await model.register(art.HttpBackend(url)).",
                code="model_not_found",
                status=404,
            )
        if not isinstance(name, str):
            return services[0]  # which says what is wrong with the request
        for service in services:
            try:
                service.models.resolve(name)
            except ApiError:
                continue
            return service
        there = [one for service in services for one in service.models.names()]
        raise ApiError(
            f"The model {name!r} does not exist. Served here: {', '.join(there)}",
            param="model",
            code="model_not_found",
            status=404,
        )


def _model(body: object) -> object:
    return body.get("model") if isinstance(body, dict) else None
