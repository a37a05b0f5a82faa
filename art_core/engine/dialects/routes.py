"""HTTP routes of the other shapes: `/v1/responses`, `/v1/completions`, Anthropic's `/v1/messages`.

In: requests of those APIs' own clients. Out: their answers, of the same calls as chat completions.
A caller's fault at `/v1/messages` comes in Anthropic's error shape; what the door or the server has
to say, in OpenAI's: both clients go by the status.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from art_core.engine.answers import Answers
from art_core.engine.api_errors import ApiError, error_headers
from art_core.engine.dialects import messages_request, responses_request, text_completions
from art_core.engine.dialects.chat_parts import chat_parts
from art_core.engine.dialects.messages_answer import error_of, message_events, message_of
from art_core.engine.dialects.responses_answer import response_events, response_of
from art_core.engine.event_stream import EventStream, unless_gone
from art_core.engine.request_body import read_json, rollout_of
from art_core.errors import ContextOverflow

_Handler = Callable[[Request], Awaitable[Response]]


def dialect_routes(service: Answers, *, max_body_bytes: int) -> list[Route]:
    """The routes.

    Args:
        max_body_bytes: larger bodies are refused with 413.
    """

    async def responses(request: Request) -> Response:
        body = await read_json(request, max_body_bytes)
        asked = responses_request.chat_request(body)
        if asked.get("stream"):
            stream = service.stream(_with_usage(asked), rollout_id=rollout_of(request))
            return await EventStream.open(response_events(body, chat_parts(stream)))
        completion = await _completion(service, request, asked)
        if completion is None:
            return _gone()
        return JSONResponse(response_of(body, completion))

    async def completions(request: Request) -> Response:
        body = await read_json(request, max_body_bytes)
        asked = text_completions.chat_request(body)
        if asked.get("stream"):
            stream = service.stream(asked, rollout_id=rollout_of(request))
            return await EventStream.open(text_completions.text_events(chat_parts(stream)))
        completion = await _completion(service, request, asked)
        if completion is None:
            return _gone()
        return JSONResponse(text_completions.text_of(completion))

    async def messages(request: Request) -> Response:
        asked = messages_request.chat_request(await read_json(request, max_body_bytes))
        if asked.get("stream"):
            stream = service.stream(_with_usage(asked), rollout_id=rollout_of(request))
            return await EventStream.open(message_events(chat_parts(stream)))
        completion = await _completion(service, request, asked)
        return _gone() if completion is None else JSONResponse(message_of(completion))

    async def count_tokens(request: Request) -> Response:
        asked = messages_request.count_request(await read_json(request, max_body_bytes))
        counted = service.tokenize(asked, rollout_id=rollout_of(request))
        return JSONResponse({"input_tokens": counted["count"]})

    return [
        Route("/v1/responses", responses, methods=["POST"]),
        Route("/v1/completions", completions, methods=["POST"]),
        Route("/v1/messages", _in_their_shape(messages), methods=["POST"]),
        Route("/v1/messages/count_tokens", _in_their_shape(count_tokens), methods=["POST"]),
    ]


async def _completion(
    service: Answers, request: Request, asked: dict[str, Any]
) -> dict[str, Any] | None:
    """The chat completion; None if the client has gone."""
    return await unless_gone(
        request.receive, service.complete(asked, rollout_id=rollout_of(request))
    )


def _gone() -> Response:
    return Response(status_code=499)


def _with_usage(asked: dict[str, Any]) -> dict[str, Any]:
    return {**asked, "stream_options": {"include_usage": True}}


def _in_their_shape(handler: _Handler) -> _Handler:
    async def shaped(request: Request) -> Response:
        try:
            return await handler(request)
        except (ApiError, ContextOverflow) as error:
            status, body = error_of(error)
            return JSONResponse(body, status, error_headers(error))

    return shaped
