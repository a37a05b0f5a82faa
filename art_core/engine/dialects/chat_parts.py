"""The stream of a chat completion, read back for those who tell it in another shape.

In: the events that the service sends. Out: their JSON, part by part; a None where it only kept the
connection alive. A fault within the stream is raised.
"""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing
from typing import Any

from art_core.engine.chat_wire import DONE, KEEP_ALIVE


class BrokenStream(Exception):
    """The stream ended by a fault; `error` is OpenAI's error object."""

    def __init__(self, error: Mapping[str, Any]) -> None:
        super().__init__(error.get("message"))
        self.error = error


async def chat_parts(
    stream: AsyncGenerator[bytes, None],
) -> AsyncGenerator[dict[str, Any] | None, None]:
    """The parts of `stream`, which is closed with this generator.

    Raises:
        BrokenStream: the call broke off; what was given before is all of it.
    """
    async with aclosing(stream) as events:
        async for event in events:
            if event == DONE:
                return
            if event == KEEP_ALIVE:
                yield None
                continue
            part: dict[str, Any] = json.loads(event.removeprefix(b"data: "))
            if "error" in part:
                raise BrokenStream(part["error"])
            yield part


def named_event(kind: str, data: Mapping[str, Any]) -> bytes:
    """One server-sent event with a name: a line of ASCII JSON."""
    told = json.dumps({"type": kind, **data}, separators=(",", ":"), allow_nan=False)
    return f"event: {kind}\ndata: {told}\n\n".encode("ascii")
