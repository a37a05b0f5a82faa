"""A door into a vLLM server for calls in token ids; runs inside vLLM's process, as ASGI middleware.

In: `POST /art/generate`, a JSON head and raw int32 prompt ids. Out: frames of raw ids and float32
logprobs, and a JSON end that says how the call ended. It stands for itself: vLLM's environment has
no art_core, so that this folder, not the package, is on its path (`--middleware
art_token_door.TokenDoor`). Every other path goes on to vLLM, once the key was told: vLLM itself
asks for it under /v1 alone, and not where it sleeps, or runs what it is told by RPC. vLLM's own
token endpoint needs 163 bytes of JSON a logprob, which halves what the server can answer; this one
needs 8.
"""

from __future__ import annotations

import array
import asyncio
import hmac
import json
import os
import struct
from collections.abc import AsyncIterator, Awaitable, Callable, MutableMapping
from contextlib import aclosing, suppress
from typing import Any

PATH = "/art/generate"
VERSION = 1
"""Of this protocol; `GET /art/version` says it."""

HEAD = struct.Struct("<I")
"""Bytes of JSON that follow, then the ids."""
FRAME = struct.Struct("<BI")
"""Kind of the frame, and how many tokens, or bytes of JSON, it has."""
TOKENS, END = 0, 1

_Message = MutableMapping[str, Any]
_Receive = Callable[[], Awaitable[_Message]]
_Send = Callable[[_Message], Awaitable[None]]
_App = Callable[[_Message, _Receive, _Send], Awaitable[None]]


class TokenDoor:
    """Answers `PATH` from the engine behind the app, and leaves the rest to the app; to those who
    have the key."""

    def __init__(self, app: _App) -> None:
        self._app = app

    async def __call__(self, scope: _Message, receive: _Receive, send: _Send) -> None:
        if scope["type"] == "lifespan":  # the server's own
            await self._app(scope, receive, send)
        elif not _has_key(scope["headers"]):
            await _refuse(scope["type"], send)
        elif scope["type"] == "http" and scope["path"] == "/art/version":
            await _answer(send, 200, {"door": VERSION})
        elif scope["type"] == "http" and scope["path"] == PATH:
            await _serve(scope["app"].state, receive, send)
        else:
            await self._app(scope, receive, send)


def _has_key(headers: list[tuple[bytes, bytes]]) -> bool:
    """The key is the one that vLLM has; every user of the machine can reach its port."""
    key = os.environ.get("VLLM_API_KEY")
    told = dict(headers).get(b"authorization", b"")
    return not key or hmac.compare_digest(told, b"Bearer " + key.encode())


async def _refuse(kind: str, send: _Send) -> None:
    if kind == "websocket":
        await send({"type": "websocket.close", "code": 1008})
    else:
        await _answer(send, 401, {"error": "Unauthorized", "message": "wrong API key or none"})


async def _serve(state: Any, receive: _Receive, send: _Send) -> None:
    """Answer one call; a client that leaves cancels it."""
    body = await _body(receive)
    if body is None:
        return
    work = asyncio.create_task(_generate(state, body, send))
    left = asyncio.create_task(_disconnect(receive))
    try:
        await asyncio.wait({work, left}, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in (work, left):
            task.cancel()
        with suppress(asyncio.CancelledError):
            await work


async def _generate(state: Any, body: bytes, send: _Send) -> None:
    """Frames of one call. A fault before the first is an HTTP status, later one is in the end."""
    is_open = False

    async def put(data: bytes) -> None:
        nonlocal is_open
        if not is_open:
            is_open = True
            await _start(send, 200, b"application/octet-stream")
        await send({"type": "http.response.body", "body": data, "more_body": True})

    try:
        async for data in _frames(state, body):
            await put(data)
    except Exception as error:  # noqa: BLE001 - the edge: told to the caller, who raises it
        status, told = _fault(error)
        if not is_open:
            await _answer(send, status, told)
            return
        await put(_end(told))
    await send({"type": "http.response.body", "body": b""})


async def _frames(state: Any, body: bytes) -> AsyncIterator[bytes]:
    head, ids = _read(body)
    from vllm import SamplingParams
    from vllm.inputs import tokens_input
    from vllm.sampling_params import RequestOutputKind, StructuredOutputsParams

    settings = head["sampling"]
    if (lark := settings.pop("grammar", None)) is not None:
        settings["structured_outputs"] = StructuredOutputsParams(grammar=lark)
    if (bias := settings.get("logit_bias")) is not None:  # the keys of JSON are texts
        settings["logit_bias"] = {int(token): value for token, value in bias.items()}
    kind = RequestOutputKind.DELTA if head["stream"] else RequestOutputKind.FINAL_ONLY
    params = SamplingParams(output_kind=kind, detokenize=False, flat_logprobs=True, **settings)
    outputs = state.engine_client.generate(
        tokens_input(ids.tolist()),
        params,
        head["request_id"],
        lora_request=_adapter(state, head["adapter"]),
    )
    cached, reason = 0, None
    async with aclosing(outputs):
        async for output in outputs:
            cached = max(cached, output.num_cached_tokens or 0)
            choice = output.outputs[0]
            if params.prompt_logprobs is not None:  # a scoring: what is sampled is of no interest
                yield _tokens(ids[1:], output.prompt_logprobs.logprobs)
            elif len(choice.token_ids):
                yield _tokens(choice.token_ids, choice.logprobs.logprobs)
            reason = choice.finish_reason or reason
    yield _end({"finish_reason": reason, "cached_tokens": cached})


def _read(body: bytes) -> tuple[dict[str, Any], array.array[int]]:
    """A call's head and its prompt ids.

    Raises:
        ValueError: it is cut, or lacks a part.
    """
    if len(body) < HEAD.size:
        raise ValueError(f"a body of {len(body)} bytes has no head")
    (size,) = HEAD.unpack_from(body)
    head = json.loads(body[HEAD.size : HEAD.size + size])
    parts = ("sampling", "stream", "request_id", "adapter")
    if lacks := [part for part in parts if not isinstance(head, dict) or part not in head]:
        raise ValueError(f"the head lacks {', '.join(lacks)}")
    return head, array.array("i", body[HEAD.size + size :])


def _adapter(state: Any, name: str | None) -> Any:
    """The adapter that was loaded under `name`; None is the base model."""
    if name is None:
        return None
    known = state.openai_serving_models.lora_requests
    if name not in known:
        raise LookupError(f"no adapter {name!r} is loaded; there are {sorted(known)}")
    return known[name]


def _tokens(ids: Any, logprobs: Any) -> bytes:
    if len(ids) != len(logprobs):
        raise RuntimeError(f"{len(ids)} ids with {len(logprobs)} logprobs")
    numbers = array.array("i", ids).tobytes() + array.array("f", logprobs).tobytes()
    return FRAME.pack(TOKENS, len(ids)) + numbers


def _end(told: dict[str, Any]) -> bytes:
    text = json.dumps(told).encode()
    return FRAME.pack(END, len(text)) + text


def _fault(error: Exception) -> tuple[int, dict[str, Any]]:
    kinds = {kind.__name__ for kind in type(error).__mro__}
    refused = kinds & {"ValueError", "VLLMClientError"}  # the latter is the former no more in 0.32
    status = 404 if isinstance(error, LookupError) else 400 if refused else 500
    kind = type(error).__name__
    return status, {"error": kind, "message": str(error) or kind}


async def _body(receive: _Receive) -> bytes | None:
    """None: the client left before its request was whole."""
    parts = []
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            return None
        parts.append(message.get("body", b""))
        if not message.get("more_body", False):
            return b"".join(parts)


async def _disconnect(receive: _Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def _answer(send: _Send, status: int, told: dict[str, Any]) -> None:
    await _start(send, status, b"application/json")
    await send({"type": "http.response.body", "body": json.dumps(told).encode()})


async def _start(send: _Send, status: int, kind: bytes) -> None:
    headers = [(b"content-type", kind)]
    await send({"type": "http.response.start", "status": status, "headers": headers})
