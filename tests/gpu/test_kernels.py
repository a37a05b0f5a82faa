"""The kernels between products, against their definitions in float64."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch", reason="art-langgraph[train] is not installed")

import torch
from torch import Tensor

from art_core.nn.rows import Score, register
from art_core.nn.tree_row import TreeRow

pytestmark = pytest.mark.gpu

ROUNDED = 5e-3
"""||out - ref|| / ||ref|| of bfloat16 results: one rounding is 2^-9."""


def draw(*shape: int, seed: int = 0) -> Tensor:
    generator = torch.Generator("cuda").manual_seed(seed)
    x = torch.randn(shape, generator=generator, device="cuda", dtype=torch.bfloat16)
    return x.requires_grad_()


def distance(got: Tensor, want: Tensor) -> float:
    got, want = got.detach().double(), want.detach()
    return float((got - want).norm() / want.norm())


@pytest.mark.parametrize(("heads", "width"), [(16, 128), (3, 80), (2, 8)])
def test_rotate(heads: int, width: int) -> None:
    """x cos + (-x2, x1) sin, as arXiv:2104.09864 with the halves of a head as its pairs."""
    from art_core.nn.kernels import rotate

    x = draw(1, 77, heads, width)
    angle = torch.rand(1, 77, width // 2, device="cuda").repeat(1, 1, 2) * 6
    cos, sin = angle.cos().bfloat16(), angle.sin().bfloat16()
    out = rotate(x, cos, sin)
    grad = torch.randn_like(out)
    (dx,) = torch.autograd.grad(out, x, grad)

    exact = x.detach().double().requires_grad_()
    a, b = exact.chunk(2, dim=-1)
    turned = torch.cat([-b, a], dim=-1)
    want = exact * cos.double()[:, :, None] + turned * sin.double()[:, :, None]
    (expected,) = torch.autograd.grad(want, exact, grad.double())
    assert distance(out, want) < ROUNDED
    assert distance(dx, expected) < ROUNDED


def test_gated() -> None:
    from art_core.nn.kernels import gated

    gate, up = draw(1, 1234, 77), draw(1, 1234, 77, seed=1)
    out = gated(gate, up)
    grad = torch.randn_like(out)
    gradients = torch.autograd.grad(out, (gate, up), grad)

    exact = [x.detach().double().requires_grad_() for x in (gate, up)]
    want = torch.nn.functional.silu(exact[0]) * exact[1]
    expected = torch.autograd.grad(want, exact, grad.double())
    assert distance(out, want) < ROUNDED
    for got, wanted in zip(gradients, expected, strict=True):
        assert distance(got, wanted) < ROUNDED


class Plainly:
    """One sequence of 39, without compiling anything."""

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, score: Score) -> Tensor:
        row = TreeRow(np.array([0]), np.array([39]), np.array([39]), np.arange(39))
        return row.in_rectangles(q, k, v, score)


def test_blocks_of_a_qwen3_are_fused_and_answer_as_before() -> None:
    from transformers import Qwen3Config, Qwen3ForCausalLM

    from art_core.nn.fused_layers import use_fused_layers
    from art_core.nn.fused_norm import use_fused_norms

    config = Qwen3Config(
        vocab_size=500,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
    )
    torch.manual_seed(0)
    model: Any = Qwen3ForCausalLM(config)
    model = model.to(torch.bfloat16).to("cuda").eval()
    ids = torch.arange(1, 40, device="cuda")[None]
    before = model(input_ids=ids).logits.detach().float()
    assert use_fused_norms(model) == 2 * 4 + 1
    model.set_attn_implementation(register())
    assert use_fused_layers(model) == 2 * 2
    after = model(input_ids=ids, position_ids=ids - 1, art_row=Plainly()).logits.detach().float()
    assert float((after - before).norm() / before.norm()) < 0.02
