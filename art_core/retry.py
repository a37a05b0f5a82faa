"""`retry`: try a function again when it fails, waiting longer each time.

In: a function or coroutine function. Out: one of the same signature. Only `Exception`s are retried,
never a cancellation or Ctrl-C. A rollout that succeeds at a later attempt is credited with the
calls of that attempt, not with those of the failed ones.
"""

from __future__ import annotations

import asyncio
import functools
import inspect
import math
import time
from collections.abc import Awaitable, Callable
from typing import ParamSpec, TypeVar, cast

from art_core.capture import current_scope
from art_core.errors import ConfigError
from art_core.trajectories import Trajectory

P = ParamSpec("P")
T = TypeVar("T")


def retry(
    max_attempts: int = 3,
    delay: float = 0.25,
    backoff_factor: float = 2.0,
    exceptions: tuple[type[Exception], ...] = (Exception,),
    on_retry: Callable[[Exception, int], None] | None = None,
) -> Callable[[Callable[P, T]], Callable[P, T]]:
    """A decorator: `@art.retry()`, `@art.retry(max_attempts=5, exceptions=(httpx.HTTPError,))`.

    Args:
        max_attempts: calls in all, the first included.
        delay: seconds before the second attempt.
        backoff_factor: each later wait is this many times the one before.
        exceptions: what is worth another attempt. After the last attempt it is raised as it is.
        on_retry: called with the exception and the number of the attempt that raised it, from 1.

    Raises:
        ConfigError: an argument can't work.
    """
    if type(max_attempts) is not int or max_attempts < 1:
        raise ConfigError(
            "max_attempts of retry",
            got=max_attempts,
            expected="a whole number from 1 on",
            fix="Write the decorator with parentheses: @art.retry().",
        )
    for name, value in (("delay", delay), ("backoff_factor", backoff_factor)):
        if not 0 <= value < math.inf:
            raise ConfigError(f"{name} of retry", got=value, expected="a number from 0 on")
    for kind in exceptions:
        if not issubclass(kind, Exception):
            raise ConfigError(
                "exceptions of retry",
                got=kind,
                expected="subclasses of Exception; a cancellation or Ctrl-C is never retried",
            )

    def decorate(function: Callable[P, T]) -> Callable[P, T]:
        if inspect.iscoroutinefunction(function):
            return cast(Callable[P, T], _coroutine(function))  # T is its coroutine

        @functools.wraps(function)
        def wrapper(*args: P.args, **kwargs: P.kwargs) -> T:
            for attempt in range(1, max_attempts):
                try:
                    return function(*args, **kwargs)
                except exceptions as error:
                    time.sleep(after(error, attempt))
            return function(*args, **kwargs)

        return wrapper

    def _coroutine(function: Callable[P, Awaitable[object]]) -> Callable[P, Awaitable[object]]:
        @functools.wraps(function)
        async def wrapper(*args: P.args, **kwargs: P.kwargs) -> object:
            for attempt in range(1, max_attempts):
                earlier = _calls_so_far()
                try:
                    return _credited(await function(*args, **kwargs), earlier)
                except exceptions as error:
                    await asyncio.sleep(after(error, attempt))
            earlier = _calls_so_far()
            return _credited(await function(*args, **kwargs), earlier)

        return wrapper

    def after(error: Exception, attempt: int) -> float:
        """Tell of a failed attempt; seconds to wait before the next."""
        if on_retry is not None:
            on_retry(error, attempt)
        return delay * backoff_factor ** (attempt - 1)

    return decorate


def _calls_so_far() -> set[tuple[str, int]]:
    scope = current_scope()
    return {call.key for call in scope.calls} if scope is not None else set()


def _credited(result: object, earlier: set[tuple[str, int]]) -> object:
    """`result`; if it is a trajectory, without the calls made before its attempt."""
    scope = current_scope()
    if isinstance(result, Trajectory) and not result.calls and earlier and scope is not None:
        result.calls = [call for call in scope.calls if call.key not in earlier]
    return result
