"""The seam to transformers: a model's attention asks the row of a forward pass who sees whom.

In: queries, keys and values as a layer makes them, and how it makes scores of them. Out: what the
row answers. Rows of whole trees are in tree_row.py, an engine's steps in engine/generate.py.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from art_core.errors import BaseModelError

IMPLEMENTATION = "art_tree"
"""Name under which `attend` is registered with transformers."""

_UNCARRIED = ("position_bias", "indices", "block_indices")
"""Arguments of attention functions that say more of who sees whom than a row does."""


@dataclass(frozen=True, eq=False)
class Score:
    """How a layer makes scores of products of queries and keys."""

    scale: float
    softcap: float | None = None
    """c: a score is c * tanh(score / c); None is none."""
    window: int | None = None
    """A query sees only keys that are fewer than this many positions of its sequence before it."""
    sinks: Tensor | None = None
    """[Hq]: a score that every query has with a key whose value is zero."""


class Row(Protocol):
    """How the positions of one forward pass attend; given to the model as `art_row=`."""

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, score: Score) -> Tensor:
        """q: [1, Hq, N, D]; k, v: [1, Hkv, N, D] with rotary applied. Returns [1, N, Hq, D]."""
        ...


def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, score: Score) -> Tensor:
    """q: [1, Hq, N, D]; k, v: [1, Hkv, N, D] with rotary applied. Returns [1, N, Hq, D]."""
    ...


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


def masked(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """Sequences of their own keys: q [B, Hkv, G, D] over k, v [B, Hkv, m, D].

    mask: [B, 1, 1, m], added to the scores. Returns (out like q, log-sum-exp [B, Hkv, G]).
    """
    if _has_kernel(q.device):
        out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            q, k, v, 0.0, False, attn_mask=mask, scale=scale
        )
        return out, lse
    s = (q @ k.transpose(2, 3)).mul_(scale).add_(mask)
    lse = torch.logsumexp(s, dim=-1)
    return (s - lse.unsqueeze(-1)).exp() @ v, lse


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


def attend(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    art_row: Row | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """The attention function given to transformers; it asks `art_row` how to attend.

    Raises:
        BaseModelError: the model's attention has a part that rows do not carry.
    """
    for name in _UNCARRIED:
        if kwargs.get(name) is not None:
            raise BaseModelError(
                f"attention of {type(module).__name__} uses {name}",
                expected="attention that sees all before it, or a window of it",
                fix="Choose another base model.",
            )
    if art_row is None:
        raise TypeError("a model loaded for rows was called without art_row=")
    score = Score(
        query.shape[-1] ** -0.5 if scaling is None else scaling, softcap, sliding_window, s_aux
    )
    layer: int = module.layer_idx  # type: ignore[assignment]  # transformers sets it on attention
    return art_row.attend(layer, query, key, value, score), None


def register() -> str:
    """Make `attend` known to transformers and return its name; safe to call twice."""
    from transformers import AttentionInterface

    function: Callable[..., Any] = attend
    AttentionInterface.register(IMPLEMENTATION, function)
    return IMPLEMENTATION
