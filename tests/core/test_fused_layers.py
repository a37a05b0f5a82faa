"""Blocks with another forward pass: when it is theirs, and whose. What they compute: tests/gpu."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from art_core.nn.fused_layers import _subclass, attending


def refuses(block: Any, hidden: Tensor) -> Tensor:
    raise AssertionError("no row was given")


def test_without_a_row_a_block_keeps_its_own_way(tiny_llama: Path) -> None:
    """As where transformers itself calls the model."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(tiny_llama)
    ids = torch.arange(5)[None]
    with torch.no_grad():
        before = model(ids).logits
        for layer in model.model.layers:
            block = layer.self_attn
            block.__class__ = _subclass(type(block), attending(refuses, refuses))
        assert torch.equal(model(ids).logits, before)


def test_a_kind_of_block_may_be_replaced_in_two_ways() -> None:
    """Two base models in one process, of which one has Unsloth's layers."""
    first, second = (attending(refuses, refuses) for _ in range(2))
    kinds: list[Any] = [_subclass(torch.nn.Linear, way) for way in (first, second, first)]
    assert [kind.forward for kind in kinds] == [first, second, first]
    assert kinds[0] is kinds[2]
