"""Fixtures of the tests of `art_langgraph`: no provider's environment, a skilled model, a scope."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from art_core.capture import Scope, Target, open_scope
from tests.langgraph.skilled_model import skilled_server

_SAID_BY_ENVIRONMENT = (
    "OPENAI_API_KEY", "OPENAI_BASE_URL", "OPENAI_API_BASE", "OPENAI_PROXY",
    "ART_BASE_URL", "ART_MODEL", "ART_API_KEY",
)  # fmt: skip


@pytest.fixture(autouse=True)
def bare_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """No key and no address of anybody: what an import on a fresh machine sees."""
    for name in _SAID_BY_ENVIRONMENT:
        monkeypatch.delenv(name, raising=False)


@pytest.fixture(scope="module")
def server() -> Iterator[Target]:
    """Where a model that knows its tools and schemas answers; it is not trained."""
    with skilled_server() as target:
        yield target


@pytest.fixture
def scope(server: Target) -> Iterator[Scope]:
    """A rollout around the test, whose calls `server` answers."""
    with open_scope(None, {None: server}) as opened:
        yield opened
