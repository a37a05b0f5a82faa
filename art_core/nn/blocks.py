"""The decoder of Llama's kind in few operations: four products a block, the adapter within them.

In: the modules of a causal model, and the adapter that answers or learns. Out: hidden states of a
row, equal to the modules' own to float error, with the adapter's gradient. Where a model is not of
this kind, or its adapter reaches elsewhere, the answer is None, and the modules have to be asked.
CPU only: on a GPU other things take the time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from art_core.nn import rotary
from art_core.nn.copying import KINDS
from art_core.nn.frozen import is_four_bit
from art_core.nn.linear import packed
from art_core.nn.product import Factors, Gate, Norm, Nothing, Product, apply
from art_core.nn.rows import Row, Score

_ATTENTION = ("q_proj", "k_proj", "v_proj")
_MLP = ("gate_proj", "up_proj")
_PACKED_FOR = 64
"""Positions of a usual decoding step."""


@dataclass(frozen=True, eq=False)
class Block:
    """One layer."""

    qkv: Product
    o: Product
    gate_up: Product
    down: Product
    before_attention: Norm
    before_mlp: Norm
    attention: Any
    """The module; its products are not asked."""


@dataclass(frozen=True, eq=False)
class Merged:
    """A decoder with one adapter in its weights."""

    decoder: Any
    blocks: Sequence[Block]
    head: Tensor | None
    """[V, H] the output matrix, packed for few positions; None where the adapter learns."""
    leaves: Sequence[Tensor]
    """The adapter's matrices."""
    versions: Sequence[int]

    @property
    def is_current(self) -> bool:
        """False once a matrix was changed in place."""
        # `_version` is what autograd itself compares to find such changes.
        return all(p._version == v for p, v in zip(self.leaves, self.versions, strict=True))

    def hidden(self, ids: Tensor, depth: Tensor, row: Row) -> Tensor:
        """ids, depth: [N] -> [N, H]."""
        x = self.decoder.embed_tokens(ids)
        angles = rotary.angles(self.decoder.rotary_emb, x, depth)
        for layer, block in enumerate(self.blocks):
            qkv = apply(block.qkv, x, block.before_attention)
            q, k, v = rotary.heads(qkv, block.attention, angles)
            seen = row.attend(layer, q, k, v, Score(block.attention.scaling))
            x = apply(block.o, seen.reshape(len(ids), -1), Nothing(), add=x)
            x = apply(block.down, apply(block.gate_up, x, block.before_mlp), Gate(), add=x)
        out: Tensor = self.decoder.norm(x)
        return out


def is_block_model(causal: Any) -> bool:
    """True if the model is a decoder of this kind on CPU, in single or double precision."""
    config, weight = causal.config, causal.get_output_embeddings().weight
    return (
        type(causal).__name__ in [f"{kind}ForCausalLM" for kind in KINDS]
        and weight.device.type == "cpu"
        and weight.dtype in (torch.float32, torch.float64)
        and getattr(config, "hidden_act", None) == "silu"
        and set(getattr(config, "layer_types", None) or ["full_attention"]) == {"full_attention"}
        and getattr(config, "sliding_window", None) is None
        and config.rope_parameters.get("partial_rotary_factor", 1.0) == 1.0
        and causal.get_output_embeddings().bias is None
        and not any(is_four_bit(_base(part)) for part in _linear(causal.base_model.layers[0]))
        and _norms_alike(causal.base_model.layers[0].input_layernorm, config.rms_norm_eps)
    )


@torch.no_grad()
def _norms_alike(module: Any, epsilon: float) -> bool:
    """True if the model's norm is ours; in float64 transformers' own goes through float32."""
    weight = module.weight
    x = torch.linspace(-2.0, 3.0, len(weight), dtype=weight.dtype, device=weight.device)
    expected = Norm(epsilon).forward(x) * weight
    return bool(
        ((module(x) - expected).abs() <= 8 * torch.finfo(x.dtype).eps * x.abs().max()).all()
    )


def copied_bytes(causal: Any) -> int:
    """What `merge` takes."""
    layers = causal.base_model.layers
    weights = [_base(module).weight for layer in layers for module in _linear(layer)]
    weights.append(causal.get_output_embeddings().weight)
    return sum(weight.numel() * weight.element_size() for weight in weights)


@torch.inference_mode(False)
@torch.no_grad()
def merge(causal: Any, name: str | None, *, learns: bool) -> Merged | None:
    """The adapter `name` in a copy of the weights; None where it is not only in the blocks.

    learns: its matrices get gradients. Otherwise the copy is packed for few positions.
    """
    layers = causal.base_model.layers
    parts = [_factors(module, name) for layer in layers for module in _linear(layer)]
    leaves = [leaf for part in parts if part is not None for leaf in (part.a, part.b)]
    if 2 * sum(name in getattr(module, "lora_A", ()) for module in causal.modules()) != len(leaves):
        return None
    blocks = [_block(layer, name, learns) for layer in layers]
    head = None if learns else packed(causal.get_output_embeddings().weight, _PACKED_FOR)
    return Merged(causal.base_model, blocks, head, leaves, [leaf._version for leaf in leaves])


def _linear(layer: Any) -> list[Any]:
    attention, mlp = layer.self_attn, layer.mlp
    return [
        *(getattr(attention, name) for name in (*_ATTENTION, "o_proj")),
        *(getattr(mlp, name) for name in (*_MLP, "down_proj")),
    ]


def _block(layer: Any, name: str | None, learns: bool) -> Block:
    q, k, v, o, gate, up, down = _linear(layer)
    norm, norm_mlp = layer.input_layernorm, layer.post_attention_layernorm
    epsilon = float(layer.self_attn.config.rms_norm_eps)
    return Block(
        qkv=_product([q, k, v], norm.weight, name, learns),
        o=_product([o], None, name, learns),
        gate_up=_product([gate, up], norm_mlp.weight, name, learns),
        down=_product([down], None, name, learns),
        before_attention=Norm(epsilon),
        before_mlp=Norm(epsilon),
        attention=layer.self_attn,
    )


def _product(
    modules: Sequence[Any], fold: Tensor | None, name: str | None, learns: bool
) -> Product:
    bases = [_base(module) for module in modules]
    weight = torch.cat([base.weight for base in bases])
    biases: list[Tensor | None] = [base.bias for base in bases]
    found: list[Factors] = []
    start = 0
    for module, base in zip(modules, bases, strict=True):
        at = slice(start, start + base.out_features)
        start = at.stop
        if (part := _factors(module, name, at)) is not None:
            weight[at].addmm_(part.b, part.a, alpha=part.scale)
            found.append(part)
    if fold is not None:
        weight *= fold
    stacked = _stacked(found, len(weight), fold) if learns and found else (None, None)
    return Product(
        weight=weight if learns else packed(weight, _PACKED_FOR),
        bias=torch.cat(present) if (present := [b for b in biases if b is not None]) else None,
        factors=found,
        fold=fold,
        a=stacked[0],
        b=stacked[1],
    )


def _stacked(parts: Sequence[Factors], outputs: int, fold: Tensor | None) -> tuple[Tensor, Tensor]:
    a = torch.cat([part.a for part in parts])
    b = a.new_zeros(outputs, len(a))
    column = 0
    for part in parts:
        b[part.at, column : column + len(part.a)] = part.b * part.scale
        column += len(part.a)
    return (a if fold is None else a * fold), b


def _base(module: Any) -> nn.Linear:
    """The frozen layer under peft's."""
    layer: nn.Linear = getattr(module, "base_layer", module)
    return layer


def _factors(module: Any, name: str | None, at: slice = slice(0)) -> Factors | None:
    """The adapter's part of a layer; None if it has none, or one that is not just a product."""
    if name not in getattr(module, "lora_A", ()) or name in module.lora_variant:
        return None
    a, b = module.lora_A[name], module.lora_B[name]
    if b.bias is not None:
        return None
    return Factors(at, a.weight, b.weight, float(module.scaling[name]))
