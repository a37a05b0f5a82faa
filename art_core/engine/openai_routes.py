"""HTTP routes in OpenAI's shape: chat completions and models; and vLLM's `/tokenize`.

In: requests of any OpenAI client. Out: OpenAI's responses with extras, which clients keep:

- `system_fingerprint` is the record id, `choices[].art_record_id` repeats it
- `art_policy` is who answered ("name@3", or the base model), `art_sampling` the settings that
  shaped the distribution, `art_drift` why token-in failed (left out if it did not)
- with `return_token_ids: true`: `prompt_token_ids` (in a stream: in its first chunk) and
  `choices[].token_ids`
- `choices[].stop_reason` is the stop string that ended the answer, if one did
- a model's card says `max_model_len`, and in `art_profile` what the model can do

The header `x-art-rollout` names the rollout that a call belongs to. Other shapes of the same calls
are in `dialects`.
"""

from __future__ import annotations

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from art_core.engine.answers import Answers
from art_core.engine.api_errors import ApiError, error_headers, error_response
from art_core.engine.chat_service import ChatService
from art_core.engine.dialects.routes import dialect_routes
from art_core.engine.door import MAX_BODY_BYTES
from art_core.engine.event_stream import EventStream, unless_gone
from art_core.engine.model_registry import ModelRegistry, Served
from art_core.engine.request_body import read_json, rollout_of
from art_core.errors import ARTError

__all__ = ["ChatService", "ModelRegistry", "Served", "create_app"]


def create_app(service: Answers, *, max_body_bytes: int = MAX_BODY_BYTES) -> Starlette:
    """The ASGI app that serves `service`.

    Args:
        max_body_bytes: larger bodies are refused with 413, without being read to their end.
    """
    return Starlette(
        routes=openai_routes(service, max_body_bytes=max_body_bytes),
        exception_handlers={HTTPException: _no_route, ARTError: _fault, Exception: _fault},
    )


def openai_routes(service: Answers, *, max_body_bytes: int = MAX_BODY_BYTES) -> list[Route]:
    """The routes alone, for an app that has others too; as `create_app`."""

    async def chat_completions(request: Request) -> Response:
        body = await read_json(request, max_body_bytes)
        rollout_id = rollout_of(request)
        if isinstance(body, dict) and body.get("stream"):
            return await EventStream.open(service.stream(body, rollout_id=rollout_id))
        completion = await unless_gone(
            request.receive, service.complete(body, rollout_id=rollout_id)
        )
        return Response(status_code=499) if completion is None else JSONResponse(completion)

    async def models(request: Request) -> Response:
        return JSONResponse(service.list_models())

    async def model(request: Request) -> Response:
        return JSONResponse(service.model(request.path_params["name"]))

    async def tokenize(request: Request) -> Response:
        body = await read_json(request, max_body_bytes)
        return JSONResponse(service.tokenize(body, rollout_id=rollout_of(request)))

    async def health(request: Request) -> Response:
        return JSONResponse({"status": "ok"})

    return [
        Route("/v1/chat/completions", chat_completions, methods=["POST"]),
        Route("/v1/models", models),
        Route("/v1/models/{name:path}", model),
        Route("/tokenize", tokenize, methods=["POST"]),
        *dialect_routes(service, max_body_bytes=max_body_bytes),
        Route("/health", health),
    ]


async def _fault(request: Request, error: Exception) -> Response:
    return _refusal(error)


async def _no_route(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)  # what it is registered for
    return _refusal(
        ApiError(
            f"{request.method} {request.url.path}: {error.detail}",
            expected="POST /v1/chat/completions, /v1/completions, /v1/responses, /v1/messages or "
            "/tokenize, GET /v1/models or /health",
            status=error.status_code,
        )
    )


def _refusal(error: Exception) -> Response:
    status, body = error_response(error)
    return JSONResponse(body, status, error_headers(error))
