"""What one training step takes, part by part: the one estimate for the doctor, a run's plan and the
README's table.

In: a model's shape, and what is computed of it at once. Out: `StepMemory`, bytes with nothing
computed twice, with everything computed twice, and in between. It is a formula that meets what was
measured on an H200 within 5 % (benchmarks/RESULTS.md, six runs of 0.6B and 4B, 13.8 to 98.4 GB;
tests/readiness/test_step_memory.py holds it). Left out: what a device has, and whether that is
enough.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from art_core.readiness.shape import Shape

BRAIN, SINGLE = 2, 4
"""Bytes of a number in bfloat16, in float32."""
MOMENTS = 2 * SINGLE
"""Bytes of AdamW's two moments of a trained number; of its 8-bit kind 2."""

_SCRAPS = 1.08
"""What a processor's allocator makes of a byte that lean layers keep: SmolLM2-135M took 1.91 GB for
a row of 490 positions, 2.81 for 1,486, 4.18 for 2,988."""
_LOGITS = 0.02
"""Of one full tensor of logits: what the loss needs beyond (benchmarks/RESULTS.md: 0.017)."""
_LEAST_LOGITS = {BRAIN: 256, SINGLE: 128}
"""Positions of that tensor that exist at once in any row, by the bytes of a number layers compute
with. On a GPU the least chunks of training/logprobs.py make 512 positions of half precision, as
many bytes as 256 of float32; on a processor twice 64, since a chunk's logits exist twice."""


@dataclass(frozen=True)
class Step:
    """What is computed at once, and what is in memory beside it."""

    row: int
    """Positions of the longest row."""
    weights: int
    """Bytes of the base model's."""
    adapter: int
    """Numbers that are trained."""
    number: int = BRAIN
    """Bytes of a number that layers compute with."""
    moments: int = MOMENTS
    """Bytes of the optimizer's state of a trained number."""
    updates: int = 1
    """Optimizer steps of the train call; from the second on, a copy lies ready to undo them."""
    four_bit: bool = False
    """The linear layers are kept in 4 bits, and made dense for one product at a time."""
    copied: int = 0
    """Bytes of a copy of the weights with the adapter in it, whose layers keep less (nn/blocks.py);
    0: there is none."""
    held: Mapping[str, int] | None = None
    """Bytes of what else is on the device, by what they are for: the engine, other adapters."""


@dataclass(frozen=True)
class StepMemory:
    """Bytes of a step."""

    fixed: Mapping[str, int]
    """What is there whatever is computed, by what it is for."""
    layers: int
    layer: int
    """What one layer keeps of the row for the backward pass."""
    inputs: int
    """What it keeps if it computes the rest again."""
    working: int
    """Gradients inside the layer under way, and weights of 4 bits made dense."""
    loss: int

    def at(self, keeping: int) -> int:
        """With so many layers that keep what they compute."""
        again = self.layers - keeping
        recomputed = again * self.inputs + (self.layer if again else 0)
        kept = keeping * self.layer + recomputed
        return sum(self.fixed.values()) + kept + self.working + self.loss

    @property
    def total(self) -> int:
        """With nothing computed twice."""
        return self.at(self.layers)

    @property
    def least(self) -> int:
        """Every layer computed twice, where that takes less."""
        return min(self.total, self.at(0))

    @property
    def parts(self) -> dict[str, int]:
        """`total` by what it is for."""
        return {
            **self.fixed,
            "kept for the backward pass": self.layers * self.layer,
            "gradients of a layer": self.working,
            "loss": self.loss,
        }


def step_memory(shape: Shape, step: Step) -> StepMemory:
    """What `step` takes of a model of this shape."""
    trained = step.adapter * (2 * SINGLE + step.moments)  # itself and its gradient in float32
    undo = step.adapter * (SINGLE + step.moments) if step.updates > 1 else 0
    fixed = {"weights": step.weights, "adapter and optimizer": trained + undo, **(step.held or {})}
    if step.copied:
        fixed["weights with the adapter in them"] = step.copied
    kept = _lean_activations(shape) if step.copied else _activations(shape)
    dense = 2 * shape.hidden * shape.intermediate * BRAIN if step.four_bit else 0
    least = _LEAST_LOGITS.get(step.number, 0)
    return StepMemory(
        fixed=fixed,
        layers=len(shape.layers),
        layer=kept * step.row * step.number,
        inputs=shape.hidden * step.row * step.number,
        working=_gradients(shape) * step.row * step.number + dense,
        loss=int(max(_LOGITS * step.row, least) * shape.vocabulary * SINGLE),
    )


def _activations(shape: Shape) -> int:
    """Numbers that a layer keeps for a position: what its two norms read and make, queries and keys
    before and after their rotation, values, what attention gives, and the gated part three times.
    """
    queries, keys = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    return 4 * shape.hidden + 3 * queries + 4 * keys + 3 * widest(shape)


def _lean_activations(shape: Shape) -> int:
    """As `_activations`, where norms and the gated product are made again for the backward pass."""
    queries, keys = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    return int(_SCRAPS * (2 * shape.hidden + 3 * queries + 4 * keys + 2 * widest(shape)))


def _gradients(shape: Shape) -> int:
    """Numbers for a position that the backward pass of a layer holds while all layers' are kept."""
    return 2 * shape.hidden + 3 * widest(shape)


def widest(shape: Shape) -> int:
    """The width of the gated part that a token goes through."""
    text = shape.text
    chosen = text.get("num_experts_per_tok") or text.get("experts_per_token")
    if chosen:
        each = text.get("moe_intermediate_size") or shape.intermediate
        return int(chosen * each + (text.get("shared_expert_intermediate_size") or 0))
    return shape.intermediate
