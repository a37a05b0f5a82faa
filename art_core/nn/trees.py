"""Whether a model may compute calls as trees, or must compute each sequence by itself.

In: a model's config, and the model. Out: the reason why its positions can't be shared, or None. A
layer with a state that runs along the row (recurrence, linear attention, convolution) would carry
it from one branch into the next. The config says so of known kinds; of the others a probe compares
a small tree with the same sequence alone in the model's own attention, so that a kind of attention
nobody thought of is found out too.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from art_core.nn.rows import Score
from art_core.nn.tree_row import TreeRow

_ATTENTION = {"full_attention", "sliding_attention", "attention"}
"""Names of layers in configs that see what is before them, and nothing else."""
_RECURRENT = ("mamba", "ssm_", "rwkv", "linear_conv", "linear_key", "lru_", "xlstm", "conv_L")
"""How settings of recurrent and convolving layers begin."""
_STATES = ("state_size", "conv_kernel", "time_step_rank", "conv1d_width")
_ROTARY_BY_LENGTH = ("dynamic", "longrope")

_STEM, _ASIDE, _BRANCH = [0.43, 0.08, 0.63], [0.75, 0.38], [0.11, 0.32, 0.1]
"""Ids of the probe, as shares of the vocabulary: two branches over a stem. Not its first ids: those
are often control tokens that were never trained, on which a model in bfloat16 is mostly rounding
(SmolLM2-135M: a third of the largest logit, against a fiftieth on words)."""
_TOLERANCE = {torch.float64: 1e-5, torch.float32: 1e-3}
"""Relative to the largest logit; some models norm in float32 whatever their dtype."""
_TOLERANCE_HALF = 0.1


def why_not_by_config(config: Any) -> str | None:
    """Why the config says that positions can't be shared."""
    kinds = set(getattr(config, "layer_types", None) or ()) - _ATTENTION
    if kinds:
        return f"it has layers of kind {', '.join(sorted(kinds))}"
    names = [
        name
        for name, value in config.to_dict().items()
        if value and (name.startswith(_RECURRENT) or name in _STATES)
    ]
    if config.model_type.startswith(_RECURRENT):
        return f"it is a {config.model_type} model"
    return f"it has recurrent layers ({names[0]})" if names else None


def rotary_limit(config: Any) -> int | None:
    """Positions up to which rotary embeddings do not depend on how long a sequence is.

    Beyond it a key's rotation would depend on what comes after it, so that no key could be kept
    from one call to the next; within it such embeddings are as any other.
    """
    rotary = getattr(config, "rope_parameters", None) or {}
    kinds = [rotary, *(value for value in rotary.values() if isinstance(value, dict))]
    limits = [
        int(
            kind.get("original_max_position_embeddings")
            or getattr(config, "original_max_position_embeddings", None)
            or config.max_position_embeddings
        )
        for kind in kinds
        if kind.get("rope_type") in _ROTARY_BY_LENGTH
    ]
    return min(limits, default=None)


@dataclass(frozen=True, eq=False)
class Finding:
    """What a small tree through the model showed."""

    scores: dict[int, Score]
    """How each layer that asked the row makes its scores."""
    why_not: str | None
    """Why positions can't be shared, if they can't."""


def probe(causal: Any, config: Any, expected: Tensor) -> Finding:
    """Try a model whose attention asks rows.

    expected: logits that `alone` gave when its attention was its own.
    """
    row = _ProbeRow()
    depth = torch.from_numpy(row.tree.depth).to(causal.device)[None]
    ids = _ids(causal, _STEM + _ASIDE + _BRANCH)
    with torch.no_grad():
        logits = causal(input_ids=ids, position_ids=depth, use_cache=False, art_row=row).logits[0]
    branch = [*range(len(_STEM)), *range(len(_STEM) + len(_ASIDE), ids.shape[1])]
    error = float((logits[branch] - expected).abs().max() / expected.abs().max())
    why_not = _unasked(config, row.scores)
    if why_not is None and not error <= tolerance(causal.dtype):
        why_not = f"its logits depend on other branches, by {error:.1e} of the largest"
    return Finding(row.scores, why_not)


@torch.no_grad()
def alone(causal: Any) -> tuple[Tensor, Tensor]:
    """Hidden states [n, H] and logits [n, V] of the probe's longer branch, a plain sequence."""
    ids = _ids(causal, _STEM + _BRANCH)
    hidden = decoder(causal)(input_ids=ids, use_cache=False).last_hidden_state
    return hidden[0], causal(input_ids=ids, use_cache=False).logits[0]


def decoder(causal: Any) -> Any:
    """The part that gives hidden states."""
    for found in (causal.get_decoder(), causal.base_model):
        if found is not None and found is not causal:
            return found
    return causal.model


def _ids(causal: Any, shares: list[float]) -> Tensor:
    vocabulary = causal.get_input_embeddings().num_embeddings
    return torch.tensor([[int(share * vocabulary) for share in shares]], device=causal.device)


def tolerance(dtype: torch.dtype) -> float:
    """By how much logits may differ that are the same but for rounding; see `_TOLERANCE`."""
    return _TOLERANCE.get(dtype, _TOLERANCE_HALF)


@dataclass(eq=False)
class _ProbeRow:
    """The probe's tree; keeps how each layer makes its scores."""

    tree: TreeRow = field(default_factory=lambda: _tree())
    scores: dict[int, Score] = field(default_factory=dict)

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, score: Score) -> Tensor:
        self.scores[layer] = score
        return self.tree.in_rectangles(q, k, v, score)


def _tree() -> TreeRow:
    a, b = len(_STEM), len(_STEM) + len(_ASIDE)
    end = b + len(_BRANCH)
    depth = [*range(b), *range(a, a + len(_BRANCH))]
    return TreeRow(
        np.array([0, a, b]), np.array([a, b, end]), np.array([end, b, end]), np.array(depth)
    )


def _unasked(config: Any, scores: dict[int, Score]) -> str | None:
    """Layers that did not ask the row, or that did not tell it of their window."""
    if len(scores) != config.num_hidden_layers:
        return "some layers attend in a way of their own"
    kinds = getattr(config, "layer_types", None)
    windowed = getattr(config, "sliding_window", None) and getattr(
        config, "use_sliding_window", True
    )
    if kinds:
        untold = [i for i, kind in enumerate(kinds) if kind == "sliding_attention"]
        if any(scores[i].window is None for i in untold):
            return "it has a sliding window of its own"
    elif windowed and all(score.window is None for score in scores.values()):
        return "it has a sliding window of its own"
    return None
