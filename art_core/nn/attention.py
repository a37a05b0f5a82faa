"""Tree attention: every position of a packed row sees its own ancestors and nothing else.

In: queries, keys and values of one row whose positions lie in depth-first order, and the row's
`Block`s. Out: the attention output, exact to float error, with its gradient. A tree's mask is a
list of rectangles: each segment sees itself causally, and everything below a segment sees all of
it. So a shared stem is one dense product for all its descendants, whatever their number.

The rectangles are joined by their log-sum-exp, and the backward pass recomputes the probabilities
from it (FlashAttention, Dao et al. 2022, arXiv:2205.14135, section 3.1 and appendix B).
Leaves out: sliding windows, soft caps and attention sinks, which raise.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from art_core.errors import BaseModelError

IMPLEMENTATION = "art_tree"
"""Name under which `attend` is registered with transformers."""


@dataclass(frozen=True)
class Block:
    """One rectangle of the mask: queries [q0, q1) see keys [k0, k1) of the row."""

    q0: int
    q1: int
    k0: int
    k1: int
    causal: bool
    """True where queries and keys are the same segment."""


class Row(Protocol):
    """How the positions of one forward pass attend; given to the model as `art_row=`."""

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
        """q: [1, Hq, N, D]; k, v: [1, Hkv, N, D] with rotary applied. Returns [1, N, Hq, D]."""
        ...


@dataclass(frozen=True)
class TreeRow:
    """A row of whole trees: keys come from the row itself; differentiable."""

    blocks: Sequence[Block]

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
        grouped = group_heads(q, k.shape[1])
        out: Tensor = _TreeAttention.apply(  # type: ignore[no-untyped-call]  # torch's stub
            grouped, k[0].contiguous(), v[0].contiguous(), self.blocks, scale
        )
        return ungroup_heads(out)


def group_heads(q: Tensor, kv_heads: int) -> Tensor:
    """[1, Hq, N, D] -> [Hkv, N, G, D], so that a range of positions is one block of memory."""
    _, heads, n, d = q.shape
    return q[0].view(kv_heads, heads // kv_heads, n, d).transpose(1, 2).contiguous()


def ungroup_heads(out: Tensor) -> Tensor:
    """[Hkv, N, G, D] -> [1, N, Hq, D]."""
    kv_heads, n, group, d = out.shape
    return out.permute(1, 0, 2, 3).reshape(1, n, kv_heads * group, d)


def merge(out: Tensor, lse: Tensor, part: Tensor, part_lse: Tensor) -> tuple[Tensor, Tensor]:
    """Join two attentions over disjoint keys: (out [..., D], log-sum-exp [...]) each."""
    total = torch.logaddexp(lse, part_lse)
    out = out * (lse - total).exp().unsqueeze(-1)
    return out.addcmul_(part, (part_lse - total).exp().unsqueeze(-1)), total


def rectangle(
    q: Tensor, k: Tensor, v: Tensor, scale: float, *, causal: bool = False
) -> tuple[Tensor, Tensor]:
    """Attention of q [Hkv, n, G, D] over k, v [Hkv, m, D]: (out like q, log-sum-exp [Hkv, n, G]).

    `causal`: query i sees keys 0..i (n = m).
    """
    heads, n, group, d = q.shape
    if causal:  # one head a query head, so that the kernel's own causal mask fits
        flat, k, v = _by_query_head(q), _repeat(k, group), _repeat(v, group)
    else:  # the queries of a group stand behind each other: one product a key head
        flat = q.reshape(heads, n * group, d)
    out, lse = _forward(flat, k, v, scale, causal)
    if causal:
        return _by_position(out, heads), lse.view(heads, group, n).transpose(1, 2)
    return out.view(heads, n, group, d), lse.view(heads, n, group)


def rectangles(
    q: Tensor, pieces: Iterable[tuple[int, int, Tensor, Tensor, bool]], scale: float
) -> tuple[Tensor, Tensor]:
    """Attention of q [Hkv, N, G, D], piece by piece: (out like q, log-sum-exp [Hkv, N, G]).

    pieces: (q0, q1, k, v, causal): queries [q0, q1) over k, v [Hkv, m, D], as in `rectangle`. A
        query meets each key once.
    """
    out = torch.zeros_like(q)
    lse = q.new_full(q.shape[:3], float("-inf"))
    for q0, q1, k, v, causal in pieces:
        part = rectangle(q[:, q0:q1], k, v, scale, causal=causal)
        out[:, q0:q1], lse[:, q0:q1] = merge(out[:, q0:q1], lse[:, q0:q1], *part)
    return out, lse


def _rectangle_backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    scale: float,
    causal: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of q, k, v through one rectangle, given the whole row's `out` and `lse`."""
    heads, n, group, d = q.shape
    if not causal:
        flat = (heads, n * group, d)
        dq, dk, dv = _backward(
            grad.reshape(flat),
            q.reshape(flat),
            k,
            v,
            out.reshape(flat),
            lse.reshape(heads, n * group),
            scale,
            causal,
        )
        return dq.view(heads, n, group, d), dk, dv
    dq, dk, dv = _backward(
        _by_query_head(grad),
        _by_query_head(q),
        _repeat(k, group),
        _repeat(v, group),
        _by_query_head(out),
        lse.transpose(1, 2).reshape(heads * group, n),
        scale,
        causal,
    )
    return (
        _by_position(dq, heads),
        dk.reshape(heads, group, n, d).sum(1),
        dv.reshape(heads, group, n, d).sum(1),
    )


def _by_query_head(x: Tensor) -> Tensor:
    """[Hkv, n, G, D] -> [Hkv * G, n, D]."""
    heads, n, group, d = x.shape
    return x.transpose(1, 2).reshape(heads * group, n, d)


def _by_position(x: Tensor, kv_heads: int) -> Tensor:
    """[Hkv * G, n, D] -> [Hkv, n, G, D]."""
    _, n, d = x.shape
    return x.reshape(kv_heads, -1, n, d).transpose(1, 2)


def _repeat(x: Tensor, group: int) -> Tensor:
    """[Hkv, m, D] -> [Hkv * G, m, D]."""
    return x.repeat_interleave(group, dim=0) if group > 1 else x


def _has_kernel(device: torch.device) -> bool:
    """The CPU kernel gives the log-sum-exp and takes it back, three times as fast as plain ops."""
    return device.type == "cpu"


def _forward(q: Tensor, k: Tensor, v: Tensor, scale: float, causal: bool) -> tuple[Tensor, Tensor]:
    """q: [H, n, D]; k, v: [H, m, D] -> out [H, n, D], log-sum-exp [H, n]."""
    if _has_kernel(q.device):
        out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            q.unsqueeze(0), k.unsqueeze(0), v.unsqueeze(0), 0.0, causal, scale=scale
        )
        return out[0], lse[0]
    s = _scores(q, k, scale, causal)
    lse = torch.logsumexp(s, dim=-1)
    return torch.bmm((s - lse.unsqueeze(-1)).exp(), v), lse


def _backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    scale: float,
    causal: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Shapes as `_forward`; `out` and `lse` may be those of more keys than these."""
    if _has_kernel(q.device):
        dq, dk, dv = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
            grad.unsqueeze(0),
            q.unsqueeze(0),
            k.unsqueeze(0),
            v.unsqueeze(0),
            out.unsqueeze(0),
            lse.unsqueeze(0),
            0.0,
            causal,
            scale=scale,
        )
        return dq[0], dk[0], dv[0]
    p = (_scores(q, k, scale, causal) - lse.unsqueeze(-1)).exp()
    ds = torch.bmm(grad, v.transpose(1, 2)).sub_((grad * out).sum(-1, keepdim=True)).mul_(p)
    ds.mul_(scale)
    return torch.bmm(ds, k), torch.bmm(ds.transpose(1, 2), q), torch.bmm(p.transpose(1, 2), grad)


def _scores(q: Tensor, k: Tensor, scale: float, causal: bool) -> Tensor:
    s = torch.bmm(q, k.transpose(1, 2)).mul_(scale)
    if causal:
        above = torch.ones(s.shape[1:], dtype=torch.bool, device=s.device).triu_(1)
        s.masked_fill_(above, float("-inf"))
    return s


class _TreeAttention(torch.autograd.Function):
    """q: [Hkv, N, G, D]; k, v: [Hkv, N, D] -> [Hkv, N, G, D]."""

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, blocks: Sequence[Block], scale: float
    ) -> Tensor:
        pieces = ((b.q0, b.q1, k[:, b.k0 : b.k1], v[:, b.k0 : b.k1], b.causal) for b in blocks)
        out, lse = rectangles(q, pieces, scale)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.blocks, ctx.scale = blocks, scale
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, out, lse = ctx.saved_tensors
        dq, dk, dv = torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)
        for block in ctx.blocks:
            at, keys = slice(block.q0, block.q1), slice(block.k0, block.k1)
            parts = _rectangle_backward(
                grad[:, at],
                q[:, at],
                k[:, keys],
                v[:, keys],
                out[:, at],
                lse[:, at],
                ctx.scale,
                block.causal,
            )
            dq[:, at] += parts[0]
            dk[:, keys] += parts[1]
            dv[:, keys] += parts[2]
        return dq, dk, dv, None, None


def attend(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float,
    dropout: float = 0.0,
    art_row: Row | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """The attention function given to transformers; it asks `art_row` how to attend.

    Raises:
        BaseModelError: the model's attention has a part that rows do not carry.
    """
    for name in ("sliding_window", "softcap", "s_aux"):
        if kwargs.get(name) is not None:
            raise BaseModelError(
                f"attention of {type(module).__name__} uses {name}",
                got=kwargs[name],
                expected="plain causal attention in every layer",
                fix="Choose a base model without it for the embedded engine.",
            )
    if art_row is None:
        raise TypeError("a model loaded for rows was called without art_row=")
    layer: int = module.layer_idx  # type: ignore[assignment]  # transformers sets it on attention
    return art_row.attend(layer, query, key, value, scaling), None


def register() -> str:
    """Make `attend` known to transformers and return its name; safe to call twice."""
    from transformers import AttentionInterface

    function: Callable[..., Any] = attend
    AttentionInterface.register(IMPLEMENTATION, function)
    return IMPLEMENTATION
