"""ChatArt passes LangChain's standard tests over vLLM and SmolLM2-135M.

What needs more skill than a model of that size has is marked so; `test_standard` runs it.
"""

from __future__ import annotations

import pytest

from art_core.capture import Target
from tests.conformance.conftest import VllmHouse
from tests.langgraph.standard import ChatArtIntegration
from tests.langgraph.test_standard_embedded import BEYOND, CALLS_WHOLE, WHY

pytestmark = [pytest.mark.vllm, pytest.mark.model]


class TestVllmStandard(ChatArtIntegration):
    """A trained policy of a real small model."""

    OTHER_MODEL = "other@5"

    @pytest.fixture
    def target(self, house: VllmHouse) -> Target:
        return Target(house.base.base_url, "none", "agent@2")

    @pytest.fixture(autouse=True)
    def within_its_skill(self, request: pytest.FixtureRequest) -> None:
        """What it can't do is not tried; what it can is kept short."""
        test: str = request.node.originalname
        if test in BEYOND:
            pytest.xfail(WHY)
        self.MAX_TOKENS = CALLS_WHOLE.get(test, 8)
