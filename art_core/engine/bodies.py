"""A request's body, part by part, from a client that goes on sending.

In: a request. Out: parts as they come. A client that stops half-way is not waited for: its
connection, and what was made ready for its request, would be held for as long as it likes.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

from starlette.requests import Request

from art_core.engine.api_errors import ApiError

PAUSE_SECONDS = 60.0
"""Longest pause between two parts."""


async def parts_of(request: Request, *, pause: float | None = None) -> AsyncIterator[bytes]:
    """The body.

    Args:
        pause: seconds; None: `PAUSE_SECONDS`.

    Raises:
        ApiError: 408, nothing came for so long.
    """
    longest = PAUSE_SECONDS if pause is None else pause
    stream = request.stream()
    while True:
        try:
            async with asyncio.timeout(longest):
                part = await anext(stream)
        except StopAsyncIteration:
            return
        except TimeoutError as error:
            raise ApiError(
                "the body of the request did not come to its end",
                got=f"nothing for {longest:g} s",
                fix="Send it again.",
                status=408,
            ) from error
        yield part
