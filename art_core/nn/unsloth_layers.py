"""Unsloth's kernels in the layers of a model, under our attention.

In: a model on a GPU. Out: the same model, whose attention blocks make queries, keys, values and
outputs, and whose feed-forward blocks compute all they do, by Unsloth's own functions, 4 bits
included. Who sees whom is still asked of the row: Unsloth's attention takes no tree, and a tree's
positions would mean packed sequences to it. Its functions read peft's layers, so adapters are made,
saved and loaded as ever. Importing Unsloth changes transformers for the whole process; so that
happens here, when its layers are asked for, and nowhere else.
"""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

from art_core.errors import ConfigError
from art_core.nn.fused_layers import attending, replace, side_by_side

_OURS = 'Set TrainerConfig(layers="own"), which needs nothing more and is no slower.'


def check_unsloth(device: torch.device | str, dtype: torch.dtype) -> None:
    """See that its layers can be had here, before anything is loaded for them.

    Raises:
        ConfigError: there is no GPU or no Unsloth.
    """
    kind = torch.device(device).type
    if kind != "cuda" or dtype not in (torch.bfloat16, torch.float16):
        raise ConfigError(
            "Unsloth's layers need a GPU and half precision", got=f"{dtype} on {kind}", fix=_OURS
        )
    if find_spec("unsloth") is None:
        raise ConfigError(
            "Unsloth's layers are asked for",
            got="unsloth is not installed",
            fix=f"Install it, with the torch and transformers that it wants. Or: {_OURS}",
        )


def use_unsloth_layers(causal: Any) -> int:
    """Replace blocks in place; returns how many. Those with a bias keep their own way.

    Raises:
        ConfigError: as `check_unsloth`; or the model has no block for it.
    """
    check_unsloth(causal.device, causal.dtype)
    import unsloth  # noqa: F401 - its parts refuse to be imported before it

    found = replace(causal, attend=_attend, feed=_feed, prepare=_has_no_bias)
    if not found:
        raise ConfigError(
            "Unsloth's layers fit no block of this base model",
            got=type(causal).__name__,
            expected="one such as Qwen3ForCausalLM or LlamaForCausalLM",
            fix=_OURS,
        )
    return found


def _has_no_bias(block: Any) -> bool:
    """Its functions leave a bias out."""
    last = block.down_proj if hasattr(block, "down_proj") else block.o_proj
    return all(layer.bias is None for layer in [*side_by_side(block), last])


def _ask(block: Any, hidden: Tensor) -> Tensor:
    from unsloth.kernels import apply_lora_qkv

    # The input is not Unsloth's to overwrite: other functions may have kept it.
    made = apply_lora_qkv(block, hidden, inplace=False)
    return torch.cat(made, dim=-1).view(-1, sum(part.shape[-1] for part in made))


def _answer(block: Any, out: Tensor) -> Tensor:
    from unsloth.kernels import apply_lora_o

    made: Tensor = apply_lora_o(block, out)
    return made


_attend = attending(_ask, _answer)


def _feed(self: Any, x: Tensor) -> Tensor:
    from unsloth.kernels import apply_lora_mlp_swiglu

    shape = x.shape
    out: Tensor = apply_lora_mlp_swiglu(self, x.view(1, -1, shape[-1]), inplace=False)
    return out.view(shape)
