"""LoRA layers on a GPU without the detours: no copies in float32, nothing kept twice.

In: a model on a GPU in half precision with peft's LoRA layers. Out: the same model, each such layer
computing x W' + s (x A') B' in the model's dtype in two products that are added in place. The
adapter's own weights stay in float32, which the optimizer needs to add up small steps, and their
gradients come out in float32; only their copies in a product are rounded, as the engine that
serves them does. peft itself casts every activation to float32 and back.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def use_fused_lora(model: torch.nn.Module) -> bool:
    """Replace peft's LoRA linear layers in place; False where it is not a GPU's half precision."""
    from peft.tuners.lora import Linear

    first = next(model.parameters())
    if first.device.type != "cuda" or first.dtype not in (torch.bfloat16, torch.float16):
        return False
    fused = _fused_class()
    for layer in model.modules():
        if type(layer) is Linear and type(layer.base_layer) is torch.nn.Linear:
            layer.__class__ = fused
    return True


def _fused_class() -> type:
    """A subclass of peft's layer: it differs where one plain adapter is active."""
    global _FUSED
    if _FUSED is None:
        from peft.tuners.lora import Linear

        class FusedLora(Linear):
            """`peft.tuners.lora.Linear`, with one adapter of no dropout fused."""

            def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
                active = [name for name in self.active_adapters if name in self.lora_A]
                if self.disable_adapters or self.merged or len(active) != 1 or args or kwargs:
                    out: Tensor = super().forward(x, *args, **kwargs)
                    return out
                (name,) = active
                if name in self.lora_variant or not isinstance(
                    self.lora_dropout[name], torch.nn.Identity
                ):
                    out = super().forward(x)
                    return out
                out = _Lora.apply(  # type: ignore[no-untyped-call]  # torch's stub
                    x,
                    self.base_layer.weight,
                    self.base_layer.bias,
                    self.lora_A[name].weight,
                    self.lora_B[name].weight,
                    self.scaling[name],
                )
                return out

        _FUSED = FusedLora
    return _FUSED


_FUSED: type | None = None


class _Lora(torch.autograd.Function):
    """x [..., i], weight [o, i], bias [o], a [r, i], b [o, r] -> [..., o]."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        a: Tensor,
        b: Tensor,
        scale: float,
    ) -> Tensor:
        flat = x.reshape(-1, x.shape[-1])
        low_a, low_b = a.to(x.dtype), (b * scale).to(x.dtype)
        narrow = flat @ low_a.t()
        out = torch.nn.functional.linear(flat, weight, bias).addmm_(narrow, low_b.t())
        ctx.save_for_backward(flat, weight, low_a, low_b, narrow)
        ctx.scale = scale
        return out.view(*x.shape[:-1], -1)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        flat, weight, low_a, low_b, narrow = ctx.saved_tensors
        shape, grad = grad.shape[:-1], grad.reshape(-1, grad.shape[-1])
        through = grad @ low_b
        dx = None
        if ctx.needs_input_grad[0]:
            dx = (grad @ weight).addmm_(through, low_a).view(*shape, -1)
        da, db = _exact(through.t(), flat), _exact(grad.t(), narrow) * ctx.scale
        return dx, None, None, da, db, None


def _exact(left: Tensor, right: Tensor) -> Tensor:
    """The product in float32, as the tensor cores add it up."""
    if left.device.type != "cuda":
        return (left @ right).float()
    return torch.mm(left, right, out_dtype=torch.float32)
