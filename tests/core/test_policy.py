"""The policy that a trainer learns on, on a processor: see policy_conformance.py."""

from __future__ import annotations

import pytest

pytest.importorskip("torch", reason="art-langgraph[train] is not installed")

import torch

from art_core.nn.lora import LoraModel
from tests.core.policy_conformance import Policy, PolicyConformance


class TestFloat32(PolicyConformance):
    """DESIGN section 8: at most 2e-4 nats off."""

    @pytest.fixture
    def policy(self) -> Policy:
        return Policy(LoraModel.load, torch.float64, nats=2e-4, gradient=1e-4)
