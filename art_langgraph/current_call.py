"""The route of the chat-model call being made, held in the context that makes it.

In: a route, set by `ChatArt` around the moment at which a request is sent. Out: the same route, for
the transport that sends it (`current_route`).
"""

from __future__ import annotations

import json
import traceback
from collections.abc import AsyncGenerator, AsyncIterator, Generator, Iterator
from contextlib import aclosing, closing, contextmanager
from contextvars import ContextVar
from typing import Any, TypeVar, cast

import openai
from langchain_core.exceptions import ContextOverflowError
from langchain_openai.chat_models.base import OpenAIContextOverflowError

from art_core.errors import EngineError
from art_core.route import Route

_T = TypeVar("_T")
_ROUTE: ContextVar[Route | None] = ContextVar("art_route", default=None)
_END = object()


def current_route() -> Route | None:
    """The route of the call being made here; None if none is."""
    return _ROUTE.get()


@contextmanager
def routed(route: Route) -> Iterator[None]:
    """What is sent inside goes along `route`; a context overflow becomes LangChain's own error.

    ChatOpenAI looks for the overflow's code in the message; it stands beside it.

    Raises:
        EngineError: the answer is no JSON, whatever its headers say.
    """
    token = _ROUTE.set(route)
    try:
        yield
    except (openai.APIConnectionError, openai.AuthenticationError) as error:
        _explain(error, route)
        raise
    except openai.BadRequestError as error:
        if error.code != "context_length_exceeded" or isinstance(error, ContextOverflowError):
            raise
        raise OpenAIContextOverflowError(
            error.message, response=error.response, body=error.body
        ) from error
    except json.JSONDecodeError as error:
        if not _in_body(error):
            raise
        raise EngineError(
            "the server's answer is no JSON",
            got=error.doc[:100],
            fix=f"See that {route.target.base_url} is the address of a model server.",
        ) from error
    finally:
        _ROUTE.reset(token)


def _in_body(error: json.JSONDecodeError) -> bool:
    """True if it was the response's body; OpenAI's client reads arguments of tools as JSON too."""
    frames = traceback.walk_tb(error.__traceback__)
    return any(frame.f_globals["__name__"].startswith("httpx") for frame, _ in frames)


def _explain(error: openai.APIConnectionError | openai.AuthenticationError, route: Route) -> None:
    """Say which server it was, why it failed, and what to do about it."""
    where = route.target.base_url
    if isinstance(error, openai.AuthenticationError):
        error.message = (
            f"{where} refuses the key ({error.message}). The key is ART_API_KEY, or in a rollout "
            "its model's inference_api_key."
        )
    else:
        error.message = (
            f"{where} did not answer ({_root_of(error)}). See that the server runs and that the "
            "address is right."
        )
    error.args = (error.message,)


def _root_of(error: BaseException) -> str:
    """What an error came from: OpenAI's own says no more than "Connection error."."""
    while error.__cause__ is not None:
        error = error.__cause__
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__


def routed_at_start(route: Route, items: Iterator[_T]) -> Iterator[_T]:
    """`items`, the first of them made under `route`: that is when the request is sent.

    A generator must not hold a ContextVar over a yield, as its consumer shares the context.
    """
    with closing(cast(Generator[_T, None, None], items)):
        with routed(route):
            first: Any = next(items, _END)
        if first is not _END:
            yield first
            yield from items


async def arouted_at_start(route: Route, items: AsyncIterator[_T]) -> AsyncIterator[_T]:
    """As `routed_at_start`."""
    async with aclosing(cast(AsyncGenerator[_T, None], items)):
        with routed(route):
            first: Any = await anext(items, _END)
        if first is not _END:
            yield first
            async for item in items:
                yield item
