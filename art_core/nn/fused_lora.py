"""LoRA layers on a GPU without the detours: no copies in float32, nothing kept twice.

In: a model on a GPU with peft's LoRA layers. Out: the same model, each such layer computing
x W' + s (x A') B' in the model's dtype; layers that read the same input do so as one product, and
weights of 4 bits (frozen.py) are made dense for each product, forward and backward. The
adapter's own weights stay in float32, which the optimizer needs to add up small steps, and their
gradients come out in float32; only their copies in a product are rounded, as the engine that
serves them does. peft itself casts every activation to float32 and back.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn

from art_core.nn.frozen import Frozen, frozen, is_linear, laid_together

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
"""Of models that are fused: what a GPU's kernels add up in float32."""


@dataclass(frozen=True, eq=False)
class Together:
    """Layers that read the same input, as one."""

    weight: Frozen
    """[o, i]."""
    bias: Tensor | None
    """[o]."""
    widths: Sequence[int]
    """Outputs of each layer, in order."""


def join(layers: Sequence[Any]) -> Together | None:
    """Lay plain layers together, in place; None where they can't be."""
    if len({layer.bias is None for layer in layers}) > 1:
        return None
    weight = laid_together(layers)
    if weight is None:
        return None
    widths = [layer.out_features for layer in layers]
    bias = None
    if layers[0].bias is not None:
        bias = torch.cat([layer.bias.detach() for layer in layers])
        for layer, part in zip(layers, bias.split(widths), strict=True):
            layer.bias.data = part
    return Together(weight, bias, widths)


def apply(together: Together, layers: Sequence[nn.Module], x: Tensor) -> Tensor:
    """x [N, i] -> what the layers give, side by side [N, o], each with its active adapter.

    layers: as they stand in the model by now, with peft's around some of them.
    """
    found = [_active(layer) for layer in layers]
    adapters = [part for part in found if isinstance(part, _Adapter)]
    if any(part is _OTHER for part in found) or (not adapters and together.weight.is_packed):
        return torch.cat([layer(x) for layer in layers], dim=-1)
    if not adapters:
        return nn.functional.linear(x, together.weight.dense(x.dtype), together.bias)
    places, start = [], 0
    for width, part in zip(together.widths, found, strict=True):
        if isinstance(part, _Adapter):
            places.append((start, start + width, part.scale))
        start += width
    leaves = [leaf for part in adapters for leaf in (part.a, part.b)]
    out: Tensor = _Lora.apply(x, together.weight, together.bias, tuple(places), *leaves)  # type: ignore[no-untyped-call]  # torch's stub
    return out


def use_fused_lora(model: nn.Module) -> bool:
    """Replace peft's LoRA linear layers in place; False where it is not such a GPU model."""
    first = next(model.parameters())
    if first.device.type != "cuda" or first.dtype not in DTYPES:
        return False
    fuse(model)
    return True


def fuse(model: nn.Module) -> None:
    """As `use_fused_lora`, on any device."""
    for layer in model.modules():
        fused = _fused(type(layer))
        if fused is not None and is_linear(layer.base_layer):
            layer.__class__ = fused


@dataclass(frozen=True, eq=False)
class _Adapter:
    """The one adapter that a layer answers with."""

    a: Tensor
    b: Tensor
    scale: float


_NONE, _OTHER = object(), object()
"""A layer answers with its weight alone; or in a way that only peft knows."""


def _active(layer: Any) -> object:
    """An `_Adapter`, `_NONE` or `_OTHER`."""
    kind = type(layer)
    if kind not in _FUSED:
        return _NONE if is_linear(layer) else _OTHER
    if layer.merged:
        return _OTHER
    active = [name for name in layer.active_adapters if name in layer.lora_A]
    if layer.disable_adapters or not active:
        return _NONE
    name = active[0]
    if (
        len(active) > 1
        or name in layer.lora_variant
        or not isinstance(layer.lora_dropout[name], nn.Identity)
        or layer.lora_B[name].bias is not None
    ):
        return _OTHER
    return _Adapter(layer.lora_A[name].weight, layer.lora_B[name].weight, layer.scaling[name])


_FUSED: set[type] = set()
"""The classes that `_subclass` made."""


def _fused(kind: type) -> type | None:
    """The subclass for a layer of peft's; None where there is none."""
    if kind.__name__ not in ("Linear", "Linear4bit"):
        return None
    if kind.__module__ not in ("peft.tuners.lora.layer", "peft.tuners.lora.bnb"):
        return None
    return _subclass(kind)


@lru_cache(maxsize=2)
def _subclass(kind: Any) -> type:
    """It differs where one plain adapter is active."""

    class Fused(kind):  # type: ignore[misc]  # peft's classes are not typed
        """One of peft's LoRA layers, with one adapter of no dropout fused."""

        def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
            found = None if args or kwargs else _active(self)
            if not isinstance(found, _Adapter):
                out: Tensor = super().forward(x, *args, **kwargs)
                return out
            base = self.base_layer
            out = _Lora.apply(  # type: ignore[no-untyped-call]  # torch's stub
                x.reshape(-1, x.shape[-1]),
                frozen(base),
                base.bias,
                ((0, base.out_features, found.scale),),
                found.a,
                found.b,
            )
            return out.view(*x.shape[:-1], -1)

    # peft tells by "Linear" in a class's name that an adapter's layer takes other adapters too.
    Fused.__name__ = f"Fused{kind.__name__}"
    _FUSED.add(Fused)
    return Fused


class _Lora(torch.autograd.Function):
    """x [N, i], weight [o, i], bias [o] -> [N, o].

    places: of each adapter, where its outputs begin and end, and its scale; leaves: a [r, i] and b
    [outputs, r] of each. All narrow sides stand side by side, [N, R], so that the input and the
    gradient are each read once for all of them.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Frozen,
        bias: Tensor | None,
        places: Sequence[tuple[int, int, float]],
        *leaves: Tensor,
    ) -> Tensor:
        low_a = torch.cat(leaves[::2]).to(x.dtype)
        narrow = x @ low_a.t()
        out = nn.functional.linear(x, weight.dense(x.dtype), bias)
        low_b = _diagonal(places, leaves[1::2], out.shape[1], x.dtype)
        out.addmm_(narrow, low_b.t())
        ctx.save_for_backward(x, low_a, low_b, narrow)
        ctx.weight, ctx.places, ctx.ranks = weight, places, [len(a) for a in leaves[::2]]
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, low_a, low_b, narrow = ctx.saved_tensors
        through = grad @ low_b
        dx = None
        if ctx.needs_input_grad[0]:
            dx = (grad @ ctx.weight.dense(grad.dtype)).addmm_(through, low_a)
        da, db = _exact(through.t(), x), _exact(grad.t(), narrow)
        leaves: list[Tensor] = []
        row = 0
        for (start, end, scale), rank in zip(ctx.places, ctx.ranks, strict=True):
            rows = slice(row, row + rank)
            leaves += [da[rows], db[start:end, rows] * scale]
            row = rows.stop
        return dx, None, None, None, *leaves


def _diagonal(
    places: Sequence[tuple[int, int, float]],
    parts: Sequence[Tensor],
    outputs: int,
    dtype: torch.dtype,
) -> Tensor:
    """[o, R]: every scale * B at its outputs and its columns."""
    if len(parts) == 1 and len(parts[0]) == outputs:
        return (parts[0] * places[0][2]).to(dtype)
    found = parts[0].new_zeros(outputs, sum(part.shape[1] for part in parts), dtype=dtype)
    column = 0
    for (start, end, scale), part in zip(places, parts, strict=True):
        columns = slice(column, column + part.shape[1])
        torch.mul(part, scale, out=found[start:end, columns])
        column = columns.stop
    return found


def _exact(left: Tensor, right: Tensor) -> Tensor:
    """The product in float32, as the tensor cores add it up."""
    if left.device.type != "cuda" or left.dtype == torch.float32:
        return (left @ right).float()
    return torch.mm(left, right, out_dtype=torch.float32)
