"""Attention in pieces that can be joined, and their gradients.

In: queries [Hkv, n, G, D], where G query heads share a key head, over keys and values
[Hkv, m, D]. Out: the attention of each piece and its log-sum-exp. Attention over disjoint keys is
joined by its log-sum-exp, and a backward pass recomputes probabilities from it (FlashAttention,
Dao et al. 2022, arXiv:2205.14135, section 3.1 and appendix B). It leaves out who sees whom.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor


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
    if not has_kernel(q, v):
        return dense(q, k, v, scale, mask=_causal(q) if causal else None)
    heads, n, group, d = q.shape
    if causal:  # one head a query head, so that the kernel's own causal mask fits
        flat, k, v = _by_query_head(q), _repeat(k, group), _repeat(v, group)
    else:  # the queries of a group stand behind each other: one product a key head
        flat = q.reshape(heads, n * group, d)
    out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        flat.unsqueeze(0), k.unsqueeze(0), v.unsqueeze(0), 0.0, causal, scale=scale
    )
    if causal:
        return _by_position(out[0], heads), lse[0].view(heads, group, n).transpose(1, 2)
    return out[0].view(heads, n, group, d), lse[0].view(heads, n, group)


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


def rectangle_backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    scale: float,
    *,
    causal: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of q, k, v through one rectangle, given the whole row's `out` and `lse`."""
    if not has_kernel(q, v):
        mask = _causal(q) if causal else None
        return dense_backward(grad, q, k, v, out, lse, scale, mask=mask)
    heads, n, group, d = q.shape
    if causal:
        flat_grad, flat_q, flat_out = _by_query_head(grad), _by_query_head(q), _by_query_head(out)
        flat_lse = lse.transpose(1, 2).reshape(heads * group, n)
        k, v = _repeat(k, group), _repeat(v, group)
    else:
        flat_grad, flat_q, flat_out = (x.reshape(heads, n * group, d) for x in (grad, q, out))
        flat_lse = lse.reshape(heads, n * group)
    dq, dk, dv = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
        flat_grad.unsqueeze(0),
        flat_q.unsqueeze(0),
        k.unsqueeze(0),
        v.unsqueeze(0),
        flat_out.unsqueeze(0),
        flat_lse.unsqueeze(0),
        0.0,
        causal,
        scale=scale,
    )
    if not causal:
        return dq[0].view(heads, n, group, d), dk[0], dv[0]
    return (
        _by_position(dq[0], heads),
        dk[0].reshape(heads, group, n, d).sum(1),
        dv[0].reshape(heads, group, n, d).sum(1),
    )


def dense(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float,
    *,
    softcap: float | None = None,
    mask: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """As `rectangle`, in plain operations that hold every score, at least in float32.

    softcap: c of c * tanh(score / c). mask: [n, m], True where a query sees a key; it sees one at
    least.
    """
    s = _scores(q, k, scale, softcap, mask)
    lse = torch.logsumexp(s, dim=-1)
    out = torch.einsum("hngm,hmd->hngd", (s - lse.unsqueeze(-1)).exp_(), v.to(s.dtype))
    return out.to(v.dtype), lse


def dense_backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    scale: float,
    *,
    softcap: float | None = None,
    mask: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """As `rectangle_backward`, through `dense`."""
    s, dtype = _scores(q, k, scale, softcap, mask), q.dtype
    grad, q, k, v, out = (x.to(s.dtype) for x in (grad, q, k, v, out))
    p = (s - lse.unsqueeze(-1)).exp()
    ds = torch.einsum("hngd,hmd->hngm", grad, v)
    ds = ds.sub_((grad * out).sum(-1, keepdim=True)).mul_(p)
    if softcap is not None:
        slope = 1 - (s / softcap).square()
        ds = ds.mul_(slope if mask is None else slope.masked_fill(~mask[:, None], 0.0))
    ds.mul_(scale)
    return (
        torch.einsum("hngm,hmd->hngd", ds, k).to(dtype),
        torch.einsum("hngm,hngd->hmd", ds, q).to(dtype),
        torch.einsum("hngm,hngd->hmd", p, grad).to(dtype),
    )


def _scores(
    q: Tensor, k: Tensor, scale: float, softcap: float | None, mask: Tensor | None
) -> Tensor:
    """[Hkv, n, G, m]."""
    exact = torch.promote_types(q.dtype, torch.float32)
    s = torch.einsum("hngd,hmd->hngm", q.to(exact), k.to(exact)).mul_(scale)
    if softcap is not None:
        s = (s / softcap).tanh_().mul_(softcap)
    return s if mask is None else s.masked_fill_(~mask[:, None], float("-inf"))


def _causal(q: Tensor) -> Tensor:
    n = q.shape[1]
    return torch.ones(n, n, dtype=torch.bool, device=q.device).tril_()


def has_kernel(q: Tensor, v: Tensor) -> bool:
    """The CPU kernel gives the log-sum-exp and takes it back, three times as fast as plain ops."""
    return q.device.type == "cpu" and q.shape[-1] == v.shape[-1]


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
