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
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    layer: int = module.layer_idx  # type: ignore[assignment]  # transformers sets it on attention
    score = Score(scale, softcap, sliding_window, s_aux)
    return art_row.attend(layer, query, key, value, score), None


def register() -> str:
    """Make `attend` known to transformers and return its name; safe to call twice."""
    from transformers import AttentionInterface

    function: Callable[..., Any] = attend
    AttentionInterface.register(IMPLEMENTATION, function)
    return IMPLEMENTATION
