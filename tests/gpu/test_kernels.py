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


@pytest.mark.parametrize("shape", [(64, 64), (130, 192), (3584, 1000)])
def test_unpack(shape: tuple[int, int]) -> None:
    """Against bitsandbytes; a scale may round once less, so that bfloat16 may differ by one bit."""
    functional = pytest.importorskip(
        "bitsandbytes.functional", reason="art-langgraph[gpu] is not installed"
    )
    from art_core.nn import nf4_kernel

    weight = draw(*shape, dtype=torch.bfloat16).detach()
    packed, state = functional.quantize_4bit(weight, quant_type="nf4", compress_statistics=True)
    assert nf4_kernel.can_unpack(state)
    place = torch.full_like(weight, float("nan"))
    nf4_kernel.unpack(packed, state, place)
    want = functional.dequantize_4bit(packed, state)
    assert (place - want).abs().max() <= 2.0**-7 * want.abs().max()
    assert (place != want).float().mean() < 1e-3


class Plainly:
    """One sequence of 39, without compiling anything."""

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, score: Score) -> Tensor:
        row = TreeRow(np.array([0]), np.array([39]), np.array([39]), np.arange(39))
        return row.in_rectangles(q, k, v, score)


@pytest.mark.parametrize(
    ("dtype", "exact"),
    [(torch.bfloat16, torch.float32), (torch.float32, torch.float64)],
    ids=str,
)
def test_blocks_of_a_qwen3_are_fused_and_no_further_from_the_truth(
    dtype: torch.dtype, exact: torch.dtype
) -> None:
    """Logits, and the gradients of all of a LoRA's matrices: transformers and peft in `exact` are
    the truth, and in `dtype` they are as far from it as rounding goes."""
    from art_core.nn.fused_layers import use_fused_layers
    from art_core.nn.fused_lora import use_fused_lora
    from art_core.nn.fused_norm import use_fused_norms

    truth = outcome(small_qwen3(dtype, exact))
    peer = outcome(small_qwen3(dtype, dtype))
    model = small_qwen3(dtype, dtype, lora=False)
    assert use_fused_norms(model) == (2 * 4 + 1 if dtype == torch.bfloat16 else 0)
    model.set_attn_implementation(register())
    assert use_fused_layers(model) == 2 * 2
    with_lora(model, dtype)
    assert use_fused_lora(model)
    fused = outcome(model, position_ids=IDS.cuda() - 1, art_row=Plainly())
    for mine, theirs, true in zip(fused, peer, truth, strict=True):
        assert distance(mine, true) < 2 * distance(theirs, true)


IDS = torch.arange(1, 40)[None]


def small_qwen3(weights: torch.dtype, dtype: torch.dtype, *, lora: bool = True) -> Any:
    """Random weights as `weights` holds them, two layers, in `dtype`."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

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
    model = model.to(weights).to("cuda", dtype).eval()
    return with_lora(model, dtype) if lora else model


def with_lora(model: Any, dtype: torch.dtype) -> Any:
    """The same adapter in every model: in float32, as it is trained, or in float64."""
    import peft

    settings = peft.LoraConfig(r=4, lora_alpha=8, target_modules="all-linear", bias="none")
    peft.LoraModel(model, {"live": settings}, "live")
    held = torch.promote_types(dtype, torch.float32)
    generator = torch.Generator().manual_seed(1)
    for name, parameter in sorted(model.named_parameters()):
        if "lora_" in name:
            parameter.data = 0.1 * torch.randn(parameter.shape, generator=generator).to(
                "cuda", held
            )
    return model


def outcome(model: Any, **more: Any) -> tuple[Tensor, Tensor]:
    """Logits, and the gradient of their weighted sum."""
    logits = model(input_ids=IDS.cuda(), **more).logits.double()
    generator = torch.Generator().manual_seed(2)
    weights = torch.randn(logits.shape, generator=generator).to(logits)
    parameters = [p for name, p in sorted(model.named_parameters()) if "lora_" in name]
    gradients = torch.autograd.grad((weights * logits).sum(), parameters)
    return logits.detach(), torch.cat([g.flatten().double() for g in gradients])
