"""HTTP routes in OpenAI's shape: chat completions and models; and vLLM's `/tokenize`.

In: requests of any OpenAI client. Out: OpenAI's responses with extras, which clients keep:

- `system_fingerprint` is the record id, `choices[].art_record_id` repeats it
- `art_policy` is who answered ("name@3", or the base model), `art_sampling` the settings that
  shaped the distribution, `art_drift` why token-in failed (left out if it did not)
- with `return_token_ids: true`: `prompt_token_ids` (in a stream: in its first chunk) and
  `choices[].token_ids`
- a model's card says `max_model_len`, and in `art_profile` what the model can do

The header `x-art-rollout` names the rollout that a call belongs to.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Coroutine
from contextlib import aclosing, suppress
from typing import Any, Protocol

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from art_core.engine.api_errors import ApiError, error_response
from art_core.engine.bodies import parts_of
from art_core.engine.chat_service import ChatService
from art_core.engine.messages import strict_loads
from art_core.engine.model_registry import ModelRegistry, Served
from art_core.errors import ARTError

__all__ = ["ChatService", "ModelRegistry", "Served", "create_app"]

ROLLOUT_HEADER = "x-art-rollout"
_MAX_ROLLOUT_ID = 200
_STREAM_HEADERS = {"cache-control": "no-cache", "x-accel-buffering": "no"}


class Answers(Protocol):
    """What the routes are answered out of, such as a `ChatService`, whose methods these are."""

    async def complete(self, body: object, *, rollout_id: str | None = None) -> dict[str, Any]: ...

    def stream(
        self, body: object, *, rollout_id: str | None = None
    ) -> AsyncGenerator[bytes, None]: ...

    def list_models(self) -> dict[str, Any]: ...

    def model(self, name: str) -> dict[str, Any]: ...

    def tokenize(self, body: object, *, rollout_id: str | None = None) -> dict[str, Any]: ...


def create_app(service: Answers, *, max_body_bytes: int = 16 * 2**20) -> Starlette:
    """The ASGI app that serves `service`.

    Args:
        max_body_bytes: larger bodies are refused with 413, without being read to their end.
    """
    return Starlette(
        routes=openai_routes(service, max_body_bytes=max_body_bytes),
        exception_handlers={HTTPException: _no_route, ARTError: _fault, Exception: _fault},
    )


def openai_routes(
    service: Answers, *, max_body_bytes: int = 16 * 2**20, json_only: bool = False
) -> list[Route]:
    """The routes alone, for an app that has others too; as `create_app`.

    Args:
        json_only: bodies have to be called JSON; what a web page can send without asking first,
            is not.
    """

    async def body_of(request: Request) -> Any:
        raw = await _read(request, max_body_bytes)
        kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
        if json_only and kind != "application/json":
            raise ApiError(
                "the content type of a request", got=kind, expected="application/json", status=415
            )
        return _parse(raw)

    async def chat_completions(request: Request) -> Response:
        body = await body_of(request)
        rollout_id = _rollout_id(request)
        if isinstance(body, dict) and body.get("stream"):
            return await _EventStream.open(service.stream(body, rollout_id=rollout_id))
        completion = await _unless_gone(
            request.receive, service.complete(body, rollout_id=rollout_id)
        )
        return Response(status_code=499) if completion is None else JSONResponse(completion)

    async def models(request: Request) -> Response:
        return JSONResponse(service.list_models())

    async def model(request: Request) -> Response:
        return JSONResponse(service.model(request.path_params["name"]))

    async def tokenize(request: Request) -> Response:
        body = await body_of(request)
        return JSONResponse(service.tokenize(body, rollout_id=_rollout_id(request)))

    async def health(request: Request) -> Response:
        return JSONResponse({"status": "ok"})

    return [
        Route("/v1/chat/completions", chat_completions, methods=["POST"]),
        Route("/v1/models", models),
        Route("/v1/models/{name:path}", model),
        Route("/tokenize", tokenize, methods=["POST"]),
        Route("/health", health),
    ]


async def _fault(request: Request, error: Exception) -> Response:
    return _refusal(error)


async def _no_route(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)  # what it is registered for
    return _refusal(
        ApiError(
            f"{request.method} {request.url.path}: {error.detail}",
            expected="POST /v1/chat/completions or /tokenize, GET /v1/models or /health",
            status=error.status_code,
        )
    )


def _refusal(error: Exception) -> Response:
    status, body = error_response(error)
    return JSONResponse(body, status)


async def _read(request: Request, limit: int) -> bytes:
    """The body, never more than `limit` bytes of it."""
    encoding = request.headers.get("content-encoding", "identity")
    if encoding != "identity":
        raise ApiError(
            "compressed bodies are not taken", got=encoding, expected="identity", status=415
        )
    declared = request.headers.get("content-length", "0")
    parts: list[bytes] = []
    size = int(declared) if declared.isdigit() else 0
    if size <= limit:
        size = 0
        async for part in parts_of(request):
            size += len(part)
            if size > limit:
                break
            parts.append(part)
    if size > limit:
        raise ApiError(
            "the body is too large",
            got=f"{size} bytes or more",
            expected=f"at most {limit}",
            status=413,
        )
    return b"".join(parts)


def _parse(raw: bytes) -> Any:
    """Strict JSON in UTF-8, without half characters; of a key given twice the last one counts."""
    try:
        body = strict_loads(raw.decode("utf-8"))
    except UnicodeDecodeError as error:
        raise ApiError(f"the body is not UTF-8 ({error})") from error
    except UnicodeEncodeError as error:
        raise ApiError(f"a string in the body is half a character ({error})") from error
    except ValueError as error:
        raise ApiError(f"the body is not JSON ({error})") from error
    return body


def _rollout_id(request: Request) -> str | None:
    value = request.headers.get(ROLLOUT_HEADER)
    if value is not None and not 0 < len(value) <= _MAX_ROLLOUT_ID:
        raise ApiError(
            f"the header {ROLLOUT_HEADER} has a wrong length",
            got=len(value),
            expected=f"1 to {_MAX_ROLLOUT_ID} characters",
        )
    return value


async def _gone(receive: Receive) -> None:
    """Return when the client has gone away."""
    while (await receive())["type"] != "http.disconnect":
        pass


async def _unless_gone(
    receive: Receive, work: Coroutine[Any, Any, dict[str, Any]]
) -> dict[str, Any] | None:
    """The result of `work`; None, and `work` cancelled, if the client goes away before."""
    working = asyncio.ensure_future(work)
    leaving = asyncio.ensure_future(_gone(receive))
    try:
        await asyncio.wait({working, leaving}, return_when=asyncio.FIRST_COMPLETED)
        return await working if working.done() else None
    finally:
        for task in (working, leaving):
            task.cancel()
        await asyncio.gather(working, leaving, return_exceptions=True)


class _EventStream(Response):
    """Server-sent events; the source is closed when the client goes away."""

    media_type = "text/event-stream"

    def __init__(self, first: bytes, source: AsyncGenerator[bytes, None]) -> None:
        self._first, self._source = first, source
        self.status_code, self.background = 200, None
        self.init_headers(_STREAM_HEADERS)

    @classmethod
    async def open(cls, source: AsyncGenerator[bytes, None]) -> _EventStream:
        """Wait for the first event, so that a fault before it is an HTTP status."""
        return cls(await anext(source), source)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        sending = asyncio.ensure_future(self._send(send))
        leaving = asyncio.ensure_future(_gone(receive))
        try:
            await asyncio.wait({sending, leaving}, return_when=asyncio.FIRST_COMPLETED)
            if sending.done():
                await sending
        finally:
            for task in (sending, leaving):
                task.cancel()
            with suppress(asyncio.CancelledError):
                await asyncio.gather(sending, leaving, return_exceptions=True)

    async def _send(self, send: Send) -> None:
        async with aclosing(self._source) as source:
            await send(
                {
                    "type": "http.response.start",
                    "status": self.status_code,
                    "headers": self.raw_headers,
                }
            )
            await send(_part(self._first))
            async for part in source:
                await send(_part(part))
            await send({"type": "http.response.body", "body": b"", "more_body": False})


def _part(body: bytes) -> dict[str, Any]:
    return {"type": "http.response.body", "body": body, "more_body": True}
