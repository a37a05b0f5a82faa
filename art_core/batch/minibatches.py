"""The samples of a train call, dealt to its optimizer steps, each with its share of the loss.

In: samples without weights, and a key for the order. Out: one list of weighted samples an
optimizer step. A trajectory is never split over two. Left out: rows (forest.py).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from art_core.batch.sample import Sample
from art_core.batch.weights import entry_weights
from art_core.config import TrainConfig


def minibatches(
    samples: Sequence[Sample], config: TrainConfig, *, key: Sequence[int]
) -> list[list[Sample]]:
    """Deal whole trajectories to `config.minibatches` parts, as even as can be by their number.

    There are never more parts than trajectories. A part without any advantage is left out, unless
    something else acts on its tokens or no part has one: its update would have no gradient, and
    drift on the momentum of those before it. The weights of a part sum to 1 over what the policy
    sampled, but for the aggregation "constant".

    Args:
        key: not negative; the same one deals the same parts. One part alone keeps its order.
    """
    trajectories = np.array(sorted({sample.trajectory for sample in samples}))
    count = min(config.minibatches, len(trajectories))
    if count > 1:
        np.random.default_rng(key).shuffle(trajectories)
    dealt = [set(part.tolist()) for part in np.array_split(trajectories, count)]
    parts = [[s for s in samples if s.trajectory in part] for part in dealt]
    if not acts_without_advantage(config):
        parts = [part for part in parts if any(s.advantage for s in part)] or parts
    return [_weighted(part, config) for part in parts]


def acts_without_advantage(config: TrainConfig) -> bool:
    """True if something teaches tokens whose advantage is 0."""
    return bool(
        config.kl_penalty_coef
        or config.entropy_coef
        or config.entropy_target
        or config.observation_coef
    )


def _weighted(samples: Sequence[Sample], config: TrainConfig) -> list[Sample]:
    """What was observed shares `config.observation_coef` by token, beside the policy's samples."""
    heard = sum(len(s.sampled_ids) for s in samples if s.observed)
    weights = entry_weights(
        [0 if s.observed else len(s.sampled_ids) for s in samples],
        [s.trajectory for s in samples],
        config.aggregation,
        horizon=config.horizon,
    )
    return [
        s._replace(weight=config.observation_coef / heard if s.observed else w)
        for s, w in zip(samples, weights, strict=True)
    ]
