"""Policies on a GPU: our layers and Unsloth's, weights of 16 and of 4 bits, moments of 32 and 8."""

from __future__ import annotations

from functools import partial

import pytest

pytest.importorskip("torch", reason="art-langgraph[train] is not installed")

import torch

from art_core.nn.lora import LoraModel
from tests.core.policy_conformance import Policy, PolicyConformance

pytestmark = pytest.mark.gpu

_on_gpu = partial(LoraModel.load, dtype=torch.bfloat16, device="cuda")
_NATS, _GRADIENT = 0.2, 5e-2
"""bfloat16 is noise of 2^-8 of logits that reach 10."""


class TestOwnIn16Bits(PolicyConformance):
    @pytest.fixture
    def policy(self) -> Policy:
        return Policy(_on_gpu, torch.float32, _NATS, _GRADIENT, resumes_exactly=False)


class TestOwnIn4Bits(PolicyConformance):
    """QLoRA, the moments in 8 bits."""

    @pytest.fixture
    def policy(self) -> Policy:
        pytest.importorskip("bitsandbytes", reason="art-langgraph[gpu] is not installed")
        load = partial(_on_gpu, four_bit=True)
        return Policy(load, torch.float32, _NATS, _GRADIENT, "adamw_8bit", resumes_exactly=False)


class TestUnslothIn16Bits(PolicyConformance):
    @pytest.fixture
    def policy(self) -> Policy:
        pytest.importorskip("unsloth", reason="Unsloth is not installed")
        load = partial(_on_gpu, layers="unsloth")
        return Policy(load, torch.float32, _NATS, _GRADIENT, resumes_exactly=False)


class TestUnslothIn4Bits(PolicyConformance):
    @pytest.fixture
    def policy(self) -> Policy:
        pytest.importorskip("unsloth", reason="Unsloth is not installed")
        load = partial(_on_gpu, layers="unsloth", four_bit=True)
        return Policy(load, torch.float32, _NATS, _GRADIENT, resumes_exactly=False)
