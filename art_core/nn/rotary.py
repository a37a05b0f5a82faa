"""Queries, keys and values of a product, turned by their positions.

In: what the product of q, k and v gave. Out: heads as a `Row` takes them, with their gradient.
Rotary embeddings are those of Su et al. 2021 (arXiv:2104.09864) in halves, as transformers does.
"""

from __future__ import annotations

from typing import Any, TypeAlias

import torch
from torch import Tensor

Angles: TypeAlias = tuple[Tensor, Tensor]
"""(cos, sin) [N, 1, D], sin negative in its first half."""


def angles(module: Any, x: Tensor, depth: Tensor) -> Angles:
    """The model's own angles at depth [N], in the type of x."""
    cos, sin = module(x, position_ids=depth.unsqueeze(0))
    sin = sin.clone()
    sin[..., : sin.shape[-1] // 2].neg_()
    return cos[0].unsqueeze(1), sin[0].unsqueeze(1)


def heads(qkv: Tensor, attention: Any, turn: Angles) -> tuple[Tensor, Tensor, Tensor]:
    """[N, (Hq + 2 Hkv) D] -> q [1, Hq, N, D], and k, v [1, Hkv, N, D].

    attention: the module, asked for the sizes and, where there are any, the norms of its heads.
    """
    kv_heads = attention.config.num_key_value_heads
    q, k, v = qkv.view(len(qkv), -1, attention.head_dim).split(
        [attention.config.num_attention_heads, kv_heads, kv_heads], dim=1
    )
    if hasattr(attention, "q_norm"):
        q, k = attention.q_norm(q), attention.k_norm(k)
    q, k = _turned(q, turn), _turned(k, turn)
    return tuple(part.transpose(0, 1).unsqueeze(0) for part in (q, k, v))  # type: ignore[return-value]  # three of them


def _turned(x: Tensor, turn: Angles) -> Tensor:
    """x: [N, heads, D]."""
    if not torch.is_grad_enabled():
        return _turn(x, *turn)
    out: Tensor = _Turn.apply(x, *turn)  # type: ignore[no-untyped-call]  # torch's stub
    return out


def _turn(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    return torch.addcmul(x * cos, x.roll(x.shape[-1] // 2, -1), sin)


class _Turn(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        ctx.save_for_backward(cos, sin)
        return _turn(x, cos, sin)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        cos, sin = ctx.saved_tensors
        return _turn(grad, cos, -sin), None, None
