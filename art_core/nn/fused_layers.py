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
from art_core.nn.frozen import is_linear
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
    return replace(causal, attend=_attend, feed=_feed, prepare=_lay_together)


def replace(
    causal: Any,
    *,
    attend: Callable[..., Any],
    feed: Callable[..., Any],
    prepare: Callable[[Any], bool],
) -> int:
    """Give blocks that were not replaced before other forward passes; returns how many.

    prepare: makes a block ready for it; False if that can't be.
    """
    found, angles = 0, _angles(causal)
    for block in causal.modules():
        if hasattr(block, "art_replaced"):
            continue
        if angles is not None and _is_attention(block):
            found += _swap(block, attend, prepare, lambda b: _try_attention(b, angles))
        elif _is_gated(block):
            found += _swap(block, feed, prepare, lambda b: _try_gated(b, causal.dtype))
    return found


def _is_attention(block: Any) -> bool:
    holds = ("q_proj", "k_proj", "v_proj", "o_proj", "head_dim", "scaling", "layer_idx")
    odd = ("sinks", "attn_logit_softcapping", "gate_proj", "indexer")
    norm = getattr(block, "q_norm", None)
    return (
        all(hasattr(block, name) for name in holds)
        and all(is_linear(getattr(block, name)) for name in holds[:4])
        and not any(getattr(block, name, None) is not None for name in odd)
        and block.k_proj.out_features == block.v_proj.out_features
        and (norm is None or is_like_rms_norm(norm, block.head_dim))
    )


def _is_gated(block: Any) -> bool:
    holds = ("gate_proj", "up_proj", "down_proj")
    is_silu = type(getattr(block, "act_fn", None)).__name__ in ("SiLU", "SiLUActivation")
    return is_silu and all(is_linear(getattr(block, n, None)) for n in holds)


def _swap(
    block: Any,
    forward: Callable[..., Any],
    prepare: Callable[[Any], bool],
    run: Callable[[Any], tuple[Tensor, ...]],
) -> bool:
    """Give `block` another forward pass, unless `run` comes out otherwise with it."""
    kind = type(block)
    with torch.no_grad():
        try:
            before = run(block)
        except TypeError:  # it asks for arguments that are not known here
            return False
        if not prepare(block):
            return False
        block.__class__ = _subclass(kind, forward)
        after = run(block)
    if all(_alike(got, want) for got, want in zip(after, before, strict=True)):
        block.art_replaced = True
        return True
    block.__class__ = kind
    return False


def _lay_together(block: Any) -> bool:
    block.art_together = fused_lora.join(side_by_side(block))
    return block.art_together is not None


def side_by_side(block: Any) -> list[Any]:
    """The layers that read the block's input."""
    if hasattr(block, "gate_proj"):
        return [block.gate_proj, block.up_proj]
    return [block.q_proj, block.k_proj, block.v_proj]


def _alike(got: Tensor, want: Tensor) -> bool:
    allowed = _AGREE.get(got.dtype, _AGREE_HALF) * float(want.float().norm())
    return float((got.float() - want.float()).norm()) <= allowed


def _subclass(kind: type[Any], forward: Callable[..., Any]) -> Any:
    """`kind` with that forward pass: the same class for the same two."""
    known = _MADE.get((kind, forward))
    if known is None:
        known = type(f"Fused{kind.__name__}", (kind,), {"forward": forward})
        _MADE[kind, forward] = known
    return known


_MADE: dict[tuple[type[Any], Callable[..., Any]], Any] = {}


def attending(
    ask: Callable[[Any, Tensor], Tensor], answer: Callable[[Any, Tensor], Tensor]
) -> Callable[..., Any]:
    """A block's forward pass where a row is given and all of a head turns; else its own.

    Args:
        ask: the block and what it reads -> queries, keys and values side by side, [N, o].
        answer: the block and what the row's attention gives, in the form of the input -> the
            block's output.
    """

    def attend(
        self: Any,
        hidden_states: Tensor,
        position_embeddings: tuple[Tensor, Tensor] | None = None,
        attention_mask: Tensor | None = None,
        *args: Any,
        art_row: rows.Row | None = None,
        **kwargs: Any,
    ) -> Any:
        if not _turns_all(self, hidden_states, position_embeddings, art_row):
            more = {} if art_row is None else {"art_row": art_row}
            return super(type(self), self).forward(
                hidden_states, position_embeddings, attention_mask, *args, **more, **kwargs
            )
        out = _attended(self, ask(self, hidden_states), position_embeddings, art_row)
        return answer(self, out.view(*hidden_states.shape[:-1], -1)), None

    return attend


def _ask(block: Any, hidden: Tensor) -> Tensor:
    flat = hidden.reshape(-1, hidden.shape[-1])
    return fused_lora.apply(block.art_together, side_by_side(block), flat)


def _answer(block: Any, out: Tensor) -> Tensor:
    made: Tensor = block.o_proj(out)
    return made


def _turns_all(
    attention: Any, hidden: Tensor, angles: tuple[Tensor, Tensor] | None, row: rows.Row | None
) -> bool:
    """Whether a row is given and `angles` are for the whole of each head."""
    wanted = (*hidden.shape[:-1], attention.head_dim)
    return row is not None and angles is not None and angles[0].shape == wanted


def _attended(
    attention: Any, x: Tensor, angles: tuple[Tensor, Tensor] | None, row: rows.Row | None
) -> Tensor:
    """x: [N, o], queries, keys and values side by side -> what the row's attention gives [N, q]."""
    from art_core.nn.kernels import turned_heads

    assert angles is not None
    cos, sin = (part.reshape(-1, attention.head_dim) for part in angles)
    out, _ = rows.attend(
        attention,
        *turned_heads(x, cos, sin, _heads(attention)),
        None,
        scaling=attention.scaling,
        art_row=row,
        sliding_window=getattr(attention, "sliding_window", None),
    )
    return out.reshape(len(x), -1)


def _heads(attention: Any) -> Any:
    """How the outputs for queries, keys and values are cut, as `kernels.Heads`."""
    from art_core.nn.kernels import Heads

    width = attention.head_dim
    queries, keys, _ = (layer.out_features // width for layer in side_by_side(attention))
    if getattr(attention, "q_norm", None) is None:
        return Heads(queries, keys, width)
    norms = (attention.q_norm.weight, attention.k_norm.weight)
    return Heads(queries, keys, width, norms, epsilon(attention.q_norm))


_attend = attending(_ask, _answer)


def _feed(self: Any, x: Tensor) -> Tensor:
    from art_core.nn.kernels import gated

    flat = x.reshape(-1, x.shape[-1])
    out: Tensor = self.down_proj(
        gated(fused_lora.apply(self.art_together, side_by_side(self), flat))
    )
    return out.view(x.shape)


def _noise(layer: Any, dtype: torch.dtype) -> Tensor:
    """Something for `layer` to read."""
    device = layer.weight.device
    generator = torch.Generator(device).manual_seed(0)
    shape = (1, len(_ROW.depth), layer.in_features)
    return torch.randn(shape, generator=generator, device=device).to(dtype)


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
    hidden, row = _noise(block.q_proj, angles[0].dtype), _Witness()
    out = block(hidden_states=hidden, position_embeddings=angles, attention_mask=None, art_row=row)
    return (*row.asked, out[0])


class _Witness:
    """Attends to `_ROW` without compiling anything, and keeps queries, keys and values."""

    asked: tuple[Tensor, ...] = ()

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, score: rows.Score) -> Tensor:
        self.asked = (q, k, v)
        return _ROW.in_rectangles(q, k, v, score)


def _try_gated(block: Any, dtype: torch.dtype) -> tuple[Tensor, ...]:
    return (block(_noise(block.gate_proj, dtype)),)
