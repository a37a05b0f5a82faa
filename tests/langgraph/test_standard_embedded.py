"""ChatArt passes LangChain's standard tests over the embedded engine and SmolLM2-135M.

What needs more skill than a model of that size has is marked so; `test_standard` runs it.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from langchain_core.language_models import BaseChatModel

pytest.importorskip("torch", reason="art-langgraph[train] is not installed")

from art_core.capture import Target
from tests.engine.house import House, write_adapters
from tests.langgraph.standard import ChatArtIntegration

pytestmark = pytest.mark.model


@pytest.fixture(scope="module")
def house(smollm2: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[House]:
    adapters = write_adapters(smollm2, tmp_path_factory.mktemp("adapters"), scale=0.02)
    made = House(smollm2, adapters)
    yield made
    made.close()


class TestEmbedded(ChatArtIntegration):
    """A trained policy of a real small model."""

    OTHER_MODEL = "base"
    METHOD = "function_calling"
    MAX_TOKENS = 64

    @pytest.fixture
    def target(self, house: House) -> Target:
        return Target(house.server.base_url, "none", "agent@2")
