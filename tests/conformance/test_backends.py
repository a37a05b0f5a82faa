"""Both backends are held to backend_conformance.py: in this process, and through a server."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

pytest.importorskip("torch", reason="art-langgraph[train] is not installed")
pytest.importorskip("fastapi", reason="art-langgraph[server] is not installed")

import art_core as art
from tests.conformance.backend_conformance import BackendConformance, Make
from tests.core.small_run import small_model
from tests.server.server_process import ServerProcess


@pytest.fixture(scope="module")
def server(tiny_llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    with ServerProcess(tmp_path_factory.mktemp("server"), tiny_llama) as process:
        yield process


class TestLocalBackend(BackendConformance):
    @pytest.fixture
    async def backend(self, tmp_path: Path) -> AsyncIterator[art.Backend]:
        async with art.LocalBackend(show_progress=False) as found:
            yield found

    @pytest.fixture
    def make(self, tiny_llama: Path, tmp_path: Path) -> Make:
        return lambda name: small_model(tiny_llama, tmp_path, name=name)


class TestHttpBackend(BackendConformance):
    @pytest.fixture
    async def backend(self, server: ServerProcess) -> AsyncIterator[art.Backend]:
        async with server.backend() as found:
            yield found

    @pytest.fixture
    def make(self, server: ServerProcess, tiny_llama: Path) -> Make:
        return lambda name: server.model(tiny_llama, name=name)
