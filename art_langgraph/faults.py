"""Whose fault ended a rollout: the policy's, which trains, or the infrastructure's, which does not.

In: the exception that ended a graph. Out: how the rollout ended, and whether the policy did it.
Dropping the policy's faults would be survivor bias; training on others' faults would be noise.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Iterator
from dataclasses import dataclass

import openai
from langchain_core.exceptions import ContextOverflowError
from langgraph.errors import GraphRecursionError, NodeCancelledError, NodeTimeoutError

from art_core.errors import ARTError, ContextOverflow
from art_core.trajectories import Ended

_NETWORK = frozenset(
    {
        "aiohttp.client_exceptions.ClientConnectionError",
        "httpx.TransportError",
        "httpx2.TransportError",
        "requests.exceptions.ConnectionError",
        "requests.exceptions.Timeout",
    }
)
"""Network errors of libraries that a tool may use, by name: they need not be installed."""


@dataclass(frozen=True)
class Verdict:
    """How a rollout ended, and whose doing it was."""

    ended: Ended
    by_policy: bool


def judge(error: BaseException, *, answered: bool) -> Verdict:
    """Judge the exception that ended a rollout.

    Args:
        error: as it left the graph; its causes count too.
        answered: True if the policy had answered a call before. An exception without that is no
            answer to anything the policy said.
    """
    causes = list(chain(error))
    if any(isinstance(e, GraphRecursionError) for e in causes):
        return Verdict("recursion_limit", by_policy=True)
    if any(_is_overflow(e) for e in causes):
        return Verdict("context_overflow", by_policy=True)
    if any(isinstance(e, asyncio.CancelledError | NodeCancelledError) for e in causes):
        return Verdict("cancelled", by_policy=False)
    if any(_is_infrastructure(e) for e in causes):
        return Verdict("error", by_policy=False)
    return Verdict("error", by_policy=answered)


def _is_overflow(error: BaseException) -> bool:
    if isinstance(error, ContextOverflow | ContextOverflowError):
        return True
    return isinstance(error, openai.APIError) and error.code == "context_length_exceeded"


def _is_infrastructure(error: BaseException) -> bool:
    if isinstance(error, ARTError | openai.APIError | NodeTimeoutError):
        return True
    if isinstance(error, ConnectionError | TimeoutError | socket.gaierror):
        return True
    return any(f"{c.__module__}.{c.__qualname__}" in _NETWORK for c in type(error).__mro__)


def chain(error: BaseException | None) -> Iterator[BaseException]:
    """The exception, what it came from, and the parts of groups."""
    seen: set[int] = set()
    following: BaseException | None = error
    while following is not None and id(following) not in seen:
        seen.add(id(following))
        yield following
        if isinstance(following, BaseExceptionGroup):
            for part in following.exceptions:
                yield from chain(part)
        cause = following.__cause__
        suppressed = following.__suppress_context__
        following = cause if cause is not None or suppressed else following.__context__
