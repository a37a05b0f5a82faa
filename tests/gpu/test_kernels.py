"""The kernels between products, against their definitions in float64."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch", reason="art-langgraph[train] is not installed")

import torch
from torch import Tensor

from art_core.nn.rows import Score, register
from art_core.nn.tree_row import TreeRow

pytestmark = pytest.mark.gpu

ROUNDED = {torch.bfloat16: 6e-3, torch.float32: 5e-6}
"""||out - ref|| / ||ref||: one rounding is 2^-9 and 2^-24, exp in float32 somewhat more."""


def draw(*shape: int, dtype: torch.dtype) -> Tensor:
    generator = torch.Generator("cuda").manual_seed(0)
    return torch.randn(shape, generator=generator, device="cuda").to(dtype).requires_grad_()


def distance(got: Tensor, want: Tensor) -> float:
    got, want = got.detach().double(), want.detach()
    return float((got - want).norm() / want.norm())


@pytest.mark.parametrize("dtype", list(ROUNDED), ids=str)
@pytest.mark.parametrize(
    ("queries", "keys", "width", "normed"),
    [(16, 8, 128, True), (16, 8, 128, False), (3, 1, 80, True), (2, 2, 8, False)],
)
def test_turned_heads(
    queries: int, keys: int, width: int, normed: bool, dtype: torch.dtype
) -> None:
    """x cos + (-x2, x1) sin, as arXiv:2104.09864 with the halves of a head as its pairs."""
    from art_core.nn.kernels import Heads, turned_heads

    n, epsilon = 77, 1e-3
    x = draw(n, (queries + 2 * keys) * width, dtype=dtype)
    angle = torch.rand(n, width // 2, device="cuda").repeat(1, 2) * 6
    cos, sin = angle.cos().to(dtype), angle.sin().to(dtype)
    norms = tuple(torch.rand(2, width, device="cuda").to(dtype) + 0.5)
    of = Heads(queries, keys, width, norms if normed else None, epsilon)
    out = turned_heads(x, cos, sin, of)
    grads = [torch.randn_like(part) for part in out]
    (dx,) = torch.autograd.grad(out, x, grads)

    def turned(part: Tensor, weight: Tensor) -> Tensor:
        if normed:
            squares = part.square().mean(-1, keepdim=True)
            part = part * torch.rsqrt(squares + epsilon) * weight.double()
        a, b = part.chunk(2, dim=-1)
        return part * cos.double()[:, None] + torch.cat([-b, a], dim=-1) * sin.double()[:, None]

    exact = x.detach().double().requires_grad_()
    q, k, v = exact.view(n, -1, width).split([queries, keys, keys], dim=1)
    want = [part.transpose(0, 1)[None] for part in (turned(q, norms[0]), turned(k, norms[1]), v)]
    (expected,) = torch.autograd.grad(want, exact, [grad.double() for grad in grads])
    for got, wanted in zip((*out, dx), (*want, expected), strict=True):
        assert distance(got, wanted) < ROUNDED[dtype]


@pytest.mark.parametrize("dtype", list(ROUNDED), ids=str)
@pytest.mark.parametrize("width", [77, 3072])
def test_gated(width: int, dtype: torch.dtype) -> None:
    from art_core.nn.kernels import gated

    x = draw(1234, 2 * width, dtype=dtype)
    out = gated(x)
    grad = torch.randn_like(out)
    (dx,) = torch.autograd.grad(out, x, grad)

    exact = x.detach().double().requires_grad_()
    gate, up = exact.chunk(2, dim=-1)
    want = torch.nn.functional.silu(gate) * up
    (expected,) = torch.autograd.grad(want, exact, grad.double())
    assert distance(out, want) < ROUNDED[dtype]
    assert distance(dx, expected) < ROUNDED[dtype]


@pytest.mark.parametrize("dtype", list(ROUNDED), ids=str)
@pytest.mark.parametrize(("scale", "cap"), [(1.0, None), (0.7, 5.0)])
def test_measure(scale: float, cap: float | None, dtype: torch.dtype) -> None:
    """log p of a target and the entropy, with the gradients that autograd gives in float64."""
    from art_core.nn.head_kernel import measure

    raw = (draw(5, 20_011, dtype=torch.float32).detach() * 3).to(dtype)
    temperature = torch.tensor([1.0, 0.7, 2.0, 1.0, 1.0], device="cuda")
    target = torch.tensor([5, 20_010, 2048, 0, 7], device="cuda")

    exact = raw.double().requires_grad_()
    z = exact * scale if cap is None else torch.tanh(exact * scale / cap) * cap
    log_p = torch.log_softmax(z / temperature.double()[:, None], dim=-1)
    entropy = -(log_p.exp() * log_p).sum(-1)
    logprob = log_p.gather(1, target[:, None])[:, 0]
    (falling,) = torch.autograd.grad(logprob.sum(), exact, retain_graph=True)
    (spreading,) = torch.autograd.grad(entropy.sum(), exact)

    got = measure(raw, target, temperature, scale, cap, needs_logprob=True, needs_entropy=True)
    assert distance(got[0], logprob) < ROUNDED[torch.float32]
    assert distance(got[1], entropy) < ROUNDED[torch.float32]
    for mine, theirs in zip(got[2:], (falling, spreading), strict=True):
        assert mine is not None
        assert distance(mine, theirs) < ROUNDED[dtype]


class Plainly:
    """One sequence of 39, without compiling anything."""

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, score: Score) -> Tensor:
        row = TreeRow(np.array([0]), np.array([39]), np.array([39]), np.arange(39))
        return row.in_rectangles(q, k, v, score)


@pytest.mark.parametrize(
    ("dtype", "apart"), [(torch.bfloat16, 0.02), (torch.float32, 1e-5)], ids=str
)
def test_blocks_of_a_qwen3_are_fused_and_answer_as_before(dtype: torch.dtype, apart: float) -> None:
    """Logits, and the gradients of all of a LoRA's matrices, beside transformers and peft."""
    import peft
    from transformers import Qwen3Config, Qwen3ForCausalLM

    from art_core.nn.fused_layers import use_fused_layers
    from art_core.nn.fused_lora import use_fused_lora
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
    model = model.to(dtype).to("cuda").eval()
    ids = torch.arange(1, 40, device="cuda")[None]
    torch.manual_seed(0)
    twin = copy.deepcopy(model)
    assert use_fused_norms(model) == (2 * 4 + 1 if dtype == torch.bfloat16 else 0)
    model.set_attn_implementation(register())
    assert use_fused_layers(model) == 2 * 2
    settings = peft.LoraConfig(r=4, lora_alpha=8, target_modules="all-linear", bias="none")
    for each in (model, twin):
        torch.manual_seed(1)
        peft.LoraModel(each, {"live": settings}, "live")
        for name, parameter in each.named_parameters():
            if "lora_" in name:
                parameter.data = 0.2 * torch.randn(parameter.shape, device="cuda")
    assert use_fused_lora(model)
    after = model(input_ids=ids, position_ids=ids - 1, art_row=Plainly()).logits.float()
    before = twin(input_ids=ids).logits.float()
    assert distance(after, before.double()) < apart
    weights = torch.randn_like(before)
    flat = []
    for each, logits in ((model, after), (twin, before)):
        parameters = [p for name, p in each.named_parameters() if "lora_" in name]
        gradients = torch.autograd.grad((weights * logits).sum(), parameters)
        flat.append(torch.cat([g.flatten() for g in gradients]))
    assert distance(flat[0], flat[1].double()) < 2 * apart
