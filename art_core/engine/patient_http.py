"""HTTP on one connection, with an end to patience: uvicorn's own protocol, and two timers.

In: bytes of a client. Out: requests, as uvicorn gives them to the app; a connection is cut that
does not get to the end of a request's headers, or on which nobody takes what is sent. Without it a
few clients that do neither hold sockets, and half-sent answers, for ever. Left out: bodies, whose
time is the door's.
"""

from __future__ import annotations

import asyncio
from typing import Literal

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol


class PatientHTTP(H11Protocol):
    """Made by uvicorn, one for each connection."""

    head_seconds = 20.0
    """For a request's headers, from its first byte; of a new connection, from its beginning."""
    stall_seconds = 120.0
    """For a client that takes nothing while its answer waits."""

    _head: asyncio.TimerHandle | None = None
    _stall: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as uvicorn has it
        """Begin to wait for a request."""
        super().connection_made(transport)
        self._head = self.loop.call_later(self.head_seconds, transport.abort)

    def data_received(self, data: bytes) -> None:
        """Stop waiting once its headers are there; wait again if another has only begun."""
        super().data_received(data)
        if self.conn.their_state is not h11.IDLE:
            self._stop("_head")
        elif self._head is None:
            self._head = self.loop.call_later(self.head_seconds, self.transport.abort)

    def connection_lost(self, exc: Exception | None) -> None:
        """The end, for both timers too."""
        self._stop("_head")
        self._stop("_stall")
        super().connection_lost(exc)

    def pause_writing(self) -> None:
        """What was written waits to be taken."""
        super().pause_writing()
        if self._stall is None:
            self._stall = self.loop.call_later(self.stall_seconds, self.transport.abort)

    def resume_writing(self) -> None:
        """It was taken."""
        self._stop("_stall")
        super().resume_writing()

    def _stop(self, name: Literal["_head", "_stall"]) -> None:
        timer: asyncio.TimerHandle | None = getattr(self, name)
        if timer is not None:
            timer.cancel()
            setattr(self, name, None)
