"""vLLM behind our endpoint: it conforms as the embedded engine does."""

from __future__ import annotations

import pytest

from tests.conformance.conftest import VllmHouse
from tests.engine.conformance import Conformance, Served
from tests.engine.house import Plain

pytestmark = [pytest.mark.vllm, pytest.mark.model]


class TestVllm(Conformance):
    """On SmolLM2, a CPU build of vLLM in float32."""

    @pytest.fixture
    def served(self, house: VllmHouse, plain: Plain) -> Served:
        return house.served(plain)
