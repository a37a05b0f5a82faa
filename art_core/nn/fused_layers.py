"""Attention and feed-forward blocks on a GPU with fewer products, and fewer passes between them.

In: a model on a GPU whose attention asks rows. Out: the same model; attention blocks that rotate
all of their queries and keys by halves, and feed-forward blocks gated by SiLU, make what reads the
same input in one product (fused_lora.py) and go through kernels.py from there. Which blocks are so
is told by what they hold, and then tried out: a block that answers otherwise keeps its own way.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from art_core.nn import fused_lora, rows
from art_core.nn.fused_norm import epsilon, is_like_rms_norm
from art_core.nn.tree_row import TreeRow
from art_core.nn.trees import decoder
from art_core.nn.triton_here import has_triton

_AGREE = {torch.float32: 1e-4}
_AGREE_HALF = 2.0**-5
"""||after - before|| / ||before||: the two round at different places."""
_ROW = TreeRow(np.array([0, 16]), np.array([16, 32]), np.array([32, 32]), np.arange(32))


def use_fused_layers(causal: Any) -> int:
    """Replace blocks in place; returns how many."""
    if causal.device.type != "cuda" or causal.dtype not in fused_lora.DTYPES or not has_triton():
        return 0
    return fuse(causal)


def fuse(causal: Any) -> int:
    """As `use_fused_layers`, wherever Triton's kernels run."""
    found, angles = 0, _angles(causal)
    for block in causal.modules():
        if angles is not None and _is_attention(block):
            found += _swap(block, _attend, lambda b: _try_attention(b, angles))
        elif _is_gated(block):
            found += _swap(block, _feed, _try_gated)
    return found


def _is_attention(block: Any) -> bool:
    holds = ("q_proj", "k_proj", "v_proj", "o_proj", "head_dim", "scaling", "layer_idx")
    odd = ("sinks", "attn_logit_softcapping", "gate_proj", "indexer")
    norm = getattr(block, "q_norm", None)
    return (
        all(hasattr(block, name) for name in holds)
        and all(type(getattr(block, name)) is torch.nn.Linear for name in holds[:4])
        and not any(getattr(block, name, None) is not None for name in odd)
        and block.k_proj.out_features == block.v_proj.out_features
        and (norm is None or is_like_rms_norm(norm, block.head_dim))
    )


def _is_gated(block: Any) -> bool:
    holds = ("gate_proj", "up_proj", "down_proj")
    is_silu = type(getattr(block, "act_fn", None)).__name__ in ("SiLU", "SiLUActivation")
    return is_silu and all(type(getattr(block, n, None)) is torch.nn.Linear for n in holds)


def _swap(
    block: Any, forward: Callable[..., Any], run: Callable[[Any], tuple[Tensor, ...]]
) -> bool:
    """Give `block` another forward pass, unless `run` comes out otherwise with it."""
    kind = type(block)
    with torch.no_grad():
        try:
            before = run(block)
        except TypeError:  # it asks for arguments that are not known here
            return False
        block.art_together = fused_lora.join(_side_by_side(block))
        if block.art_together is None:
            return False
        block.__class__ = _subclass(kind, forward)
        after = run(block)
    if all(_alike(got, want) for got, want in zip(after, before, strict=True)):
        return True
    block.__class__ = kind
    return False


def _side_by_side(block: Any) -> list[Any]:
    """The layers that read the block's input."""
    if hasattr(block, "gate_proj"):
        return [block.gate_proj, block.up_proj]
    return [block.q_proj, block.k_proj, block.v_proj]


def _alike(got: Tensor, want: Tensor) -> bool:
    allowed = _AGREE.get(got.dtype, _AGREE_HALF) * float(want.float().norm())
    return float((got.float() - want.float()).norm()) <= allowed


_SUBCLASSES: dict[type, type] = {}


def _subclass(kind: type, forward: Callable[..., Any]) -> type:
    if kind not in _SUBCLASSES:
        _SUBCLASSES[kind] = type(f"Fused{kind.__name__}", (kind,), {"forward": forward})
    return _SUBCLASSES[kind]


def _attend(
    self: Any,
    hidden_states: Tensor,
    position_embeddings: tuple[Tensor, Tensor] | None = None,
    attention_mask: Tensor | None = None,
    *args: Any,
    art_row: rows.Row | None = None,
    **kwargs: Any,
) -> Any:
    """A block's forward pass where a row is given and all of a head turns; else its own."""
    if (
        art_row is None
        or position_embeddings is None
        or position_embeddings[0].shape != (*hidden_states.shape[:-1], self.head_dim)
    ):
        more = {} if art_row is None else {"art_row": art_row}
        return super(type(self), self).forward(
            hidden_states, position_embeddings, attention_mask, *args, **more, **kwargs
        )
    from art_core.nn.kernels import turned_heads

    shape = hidden_states.shape
    x = fused_lora.apply(
        self.art_together, _side_by_side(self), hidden_states.reshape(-1, shape[-1])
    )
    cos, sin = (part.reshape(-1, self.head_dim) for part in position_embeddings)
    out, _ = rows.attend(
        self,
        *turned_heads(x, cos, sin, _heads(self)),
        None,
        scaling=self.scaling,
        art_row=art_row,
        sliding_window=getattr(self, "sliding_window", None),
    )
    return self.o_proj(out.reshape(*shape[:-1], -1)), None


def _heads(attention: Any) -> Any:
    """How the joined product of queries, keys and values is cut, as `kernels.Heads`."""
    from art_core.nn.kernels import Heads

    width = attention.head_dim
    queries, keys, _ = (outputs // width for outputs in attention.art_together.widths)
    if getattr(attention, "q_norm", None) is None:
        return Heads(queries, keys, width)
    norms = (attention.q_norm.weight, attention.k_norm.weight)
    return Heads(queries, keys, width, norms, epsilon(attention.q_norm))


def _feed(self: Any, x: Tensor) -> Tensor:
    from art_core.nn.kernels import gated

    flat = x.reshape(-1, x.shape[-1])
    out: Tensor = self.down_proj(
        gated(fused_lora.apply(self.art_together, _side_by_side(self), flat))
    )
    return out.view(x.shape)


def _noise(like: Tensor, width: int) -> Tensor:
    generator = torch.Generator(like.device).manual_seed(0)
    shape = (1, len(_ROW.depth), width)
    return torch.randn(shape, generator=generator, device=like.device).to(like.dtype)


def _angles(causal: Any) -> tuple[Tensor, Tensor] | None:
    """Cosines and sines for `_ROW`; None if there is not one kind of them for all layers."""
    rotary = getattr(decoder(causal), "rotary_emb", None)
    settings = getattr(causal.config.get_text_config(), "rope_parameters", None) or {}
    if rotary is None or any(isinstance(value, dict) for value in settings.values()):
        return None
    like = causal.get_output_embeddings().weight
    angles: tuple[Tensor, Tensor] = rotary(like[None, :1], torch.arange(32)[None].to(like.device))
    return angles


def _try_attention(block: Any, angles: tuple[Tensor, Tensor]) -> tuple[Tensor, ...]:
    """What the block asks the row, rotated, and what it gives."""
    hidden, row = _noise(block.q_proj.weight, block.q_proj.in_features), _Witness()
    out = block(hidden_states=hidden, position_embeddings=angles, attention_mask=None, art_row=row)
    return (*row.asked, out[0])


class _Witness:
    """Attends to `_ROW` without compiling anything, and keeps queries, keys and values."""

    asked: tuple[Tensor, ...] = ()

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, score: rows.Score) -> Tensor:
        self.asked = (q, k, v)
        return _ROW.in_rectangles(q, k, v, score)


def _try_gated(block: Any) -> tuple[Tensor, ...]:
    return (block(_noise(block.gate_proj.weight, block.gate_proj.in_features)),)
