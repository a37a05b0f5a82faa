"""Whose fault ended a rollout."""

from __future__ import annotations

import asyncio
import socket
from typing import Any

import httpx2
import openai
import pytest
from langchain_core.exceptions import OutputParserException
from langgraph.errors import GraphRecursionError, NodeCancelledError, NodeTimeoutError

from art_core.errors import CaptureError, ContextOverflow, EngineError
from art_langgraph.faults import Verdict, judge

REQUEST = httpx2.Request("POST", "http://127.0.0.1/v1/chat/completions")


def status(code: int, said: str | None = None) -> openai.APIStatusError:
    response = httpx2.Response(code, request=REQUEST)
    kinds: dict[int, Any] = {400: openai.BadRequestError, 500: openai.InternalServerError}
    error: openai.APIStatusError = kinds[code]("said", response=response, body={"code": said})
    return error


@pytest.mark.parametrize(
    ("error", "ended"),
    [
        (GraphRecursionError("25"), "recursion_limit"),
        (status(400, "context_length_exceeded"), "context_overflow"),
        (ContextOverflow("too long"), "context_overflow"),
        (OutputParserException("not json"), "error"),
        (KeyError("city"), "error"),
        (FileNotFoundError("a.txt"), "error"),
        (RecursionError(), "error"),
    ],
)
def test_faults_of_the_policy(error: BaseException, ended: Any) -> None:
    assert judge(error, answered=True) == Verdict(ended, by_policy=True)


@pytest.mark.parametrize(
    ("error", "ended"),
    [
        (status(500), "error"),
        (status(400), "error"),
        (openai.APIConnectionError(request=REQUEST), "error"),
        (openai.APITimeoutError(request=REQUEST), "error"),
        (httpx2.ConnectError("refused"), "error"),
        (ConnectionResetError(), "error"),
        (TimeoutError(), "error"),
        (socket.gaierror(), "error"),
        (NodeTimeoutError("node", 1.0, kind="run", run_timeout=1.0), "error"),
        (CaptureError("lost"), "error"),
        (EngineError("closed"), "error"),
        (asyncio.CancelledError(), "cancelled"),
        (NodeCancelledError("node"), "cancelled"),
    ],
)
def test_faults_of_the_infrastructure(error: BaseException, ended: Any) -> None:
    assert judge(error, answered=True) == Verdict(ended, by_policy=False)


def test_a_network_error_of_a_library_that_is_not_installed_is_known_by_name() -> None:
    kind = type("ConnectionError", (OSError,), {"__module__": "requests.exceptions"})
    below = type("ProxyError", (kind,), {"__module__": "requests.exceptions"})
    assert not judge(below(), answered=True).by_policy


def test_nothing_said_nothing_done() -> None:
    assert judge(KeyError("typo"), answered=False) == Verdict("error", by_policy=False)
    assert judge(GraphRecursionError(), answered=False).by_policy


@pytest.mark.parametrize("explicit", [True, False])
def test_causes_count(explicit: bool) -> None:
    def fails() -> None:
        try:
            raise ConnectionResetError
        except ConnectionResetError as error:
            if explicit:
                raise ValueError("tool failed") from error
            raise ValueError("tool failed")  # noqa: B904  # the other way to chain

    with pytest.raises(ValueError, match="tool failed") as raised:
        fails()
    assert not judge(raised.value, answered=True).by_policy


def test_a_cause_that_was_hidden_does_not_count() -> None:
    error = ValueError("bad input")
    error.__context__, error.__suppress_context__ = ConnectionResetError(), True
    assert judge(error, answered=True).by_policy


def test_groups_are_looked_into() -> None:
    group = ExceptionGroup("several", [ValueError(), ExceptionGroup("inner", [TimeoutError()])])
    assert not judge(group, answered=True).by_policy
