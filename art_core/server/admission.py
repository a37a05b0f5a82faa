"""Who may call next: a bound on calls under way, a queue for each model, and turns between them.

In: calls as they come, with the model they ask for. Out: each is let in at once, in its turn, or
refused with 429 and when to come again. One model's five hundred calls do not keep another's five
waiting: the queues are served round about. To be used on one event loop.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict, deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from art_core.engine.api_errors import ApiError

RETRY_SECONDS = 2
"""After which a refused call may come again."""


class Admission:
    """Lets calls in.

    Args:
        running: calls under way at most; those that are held while a step is trained are of them.
        waiting: calls that wait for a turn at most, of all models.
    """

    def __init__(self, *, running: int = 512, waiting: int = 4096) -> None:
        self._most, self._room = running, waiting
        self._running = 0
        self._queues: OrderedDict[str, deque[asyncio.Future[None]]] = OrderedDict()

    @property
    def running(self) -> int:
        """Calls under way."""
        return self._running

    @property
    def waiting(self) -> int:
        """Calls that wait for a turn."""
        return sum(map(len, self._queues.values()))

    @asynccontextmanager
    async def turn(self, model: str) -> AsyncIterator[None]:
        """Within it a call of `model` is under way.

        Raises:
            ApiError: 429, too many wait.
        """
        await self.enter(model)
        try:
            yield
        finally:
            self.leave()

    async def enter(self, model: str) -> None:
        """Wait for a turn of `model`, and take it; `leave` gives it back. Cancelled, none is taken.

        Raises:
            ApiError: as `turn`.
        """
        if self._running < self._most and not self._queues:
            self._running += 1
        else:
            await self._wait(model)

    def leave(self) -> None:
        """A call that entered has ended."""
        self._running -= 1
        self._next()

    async def _wait(self, model: str) -> None:
        if self.waiting >= self._room:
            raise ApiError(
                "the server has too many calls waiting",
                got=self.waiting,
                expected=f"at most {self._room}",
                fix=f"Come again in {RETRY_SECONDS} s; gather with less concurrency.",
                code="rate_limit_exceeded",
                status=429,
                retry_after=RETRY_SECONDS,
            )
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._queues.setdefault(model, deque()).append(turn)
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():  # it was let in, and leaves
                self.leave()
            else:
                self._give_up(model, turn)
            raise

    def _next(self) -> None:
        """Let in whose turn it is: the first of the model that was served longest ago."""
        while self._queues and self._running < self._most:
            model, queue = next(iter(self._queues.items()))
            turn = queue.popleft()
            if queue:
                self._queues.move_to_end(model)
            else:
                del self._queues[model]
            if not turn.done():
                self._running += 1
                turn.set_result(None)

    def _give_up(self, model: str, turn: asyncio.Future[None]) -> None:
        queue = self._queues.get(model)
        if queue is not None and turn in queue:
            queue.remove(turn)
            if not queue:
                del self._queues[model]
