"""The chat completions of an OpenAI client, without its rewriting of request and answer.

In: a payload that is JSON already, as LangChain makes it. Out: what the client's own resource
gives, with its headers, errors, retries and timeouts, by the same code; but the answer, and each
event of a stream, is the JSON that came. Left out are two steps. The client looks up the type of
each field of each message, to rename what has another name on the wire; in chat completions nothing
has, and its encoder knows pydantic models and dates. And it makes objects of the answer, which
LangChain turns into dicts again. Both together are half of the time that a call takes.
"""

from __future__ import annotations

from collections.abc import Mapping
from inspect import signature
from typing import Any

from openai import AsyncStream, NotGiven, Omit, RequestOptions, Stream
from openai.resources.chat.completions import AsyncCompletions, Completions

_PATH = "/chat/completions"
_OPTIONS = {"extra_headers": "headers", "extra_query": "params", "extra_body": "extra_json"}
"""Arguments of `create` that are no part of the body, and the client's own names for them."""
_KNOWN = frozenset(signature(Completions.create).parameters) - {"self"}
_NEEDED = frozenset(("model", "messages"))


class ReadyCompletions(Completions):
    """Of a sync client."""

    def create(self, **payload: Any) -> Any:
        """As `Completions.create`, with plain JSON as its answer."""
        if not _is_plain(payload):
            return super().create(**payload)
        body, options = _parted(payload)
        return self._client.post(
            _PATH,
            body=body,
            options=options,
            cast_to=object,
            stream=bool(body.get("stream")),
            stream_cls=Stream[object],
        )


class AsyncReadyCompletions(AsyncCompletions):
    """Of an async client."""

    async def create(self, **payload: Any) -> Any:
        """As `AsyncCompletions.create`, with plain JSON as its answer."""
        if not _is_plain(payload):
            return await super().create(**payload)
        body, options = _parted(payload)
        return await self._client.post(
            _PATH,
            body=body,
            options=options,
            cast_to=object,
            stream=bool(body.get("stream")),
            stream_cls=AsyncStream[object],
        )


def _is_plain(payload: Mapping[str, Any]) -> bool:
    """False for what the client refuses: it says so itself."""
    known = payload.keys() <= _KNOWN and payload.keys() >= _NEEDED
    return known and not isinstance(payload.get("response_format"), type)


def _parted(payload: Mapping[str, Any]) -> tuple[dict[str, Any], RequestOptions]:
    """The body, and how it is sent."""
    body = {k: v for k, v in payload.items() if not isinstance(v, NotGiven | Omit)}
    options: dict[str, Any] = {}
    for given, name in _OPTIONS.items():
        if (value := body.pop(given, None)) is not None:
            options[name] = value
    if "timeout" in body:
        options["timeout"] = body.pop("timeout")
    return body, RequestOptions(**options)  # type: ignore[typeddict-item]  # its names, from above
