"""The algorithms that are compared, as settings that differ in nothing but the algorithm.

In: the quickstart's own settings. Out: settings by name: each of `algorithms.PRESETS`, "default"
(a bare `TrainConfig`), and "own" (the quickstart as it is). Left out: what they are tried on.

Held equal: whatever is no part of an algorithm, `HELD`, and the schedule of the learning rate,
which lies outside the settings. What the quickstart does in its early steps, to learn from what did
better alone, is "own"'s only (algorithm_plan.py). A preset's own word wins, so GSPO makes its four
updates a step; a loss that allows one update a step makes one (RLOO's). AdamW takes away a constant
factor of the loss, so advantages that are not divided by a standard deviation need no other
learning rate; but they are that much smaller beside the entropy bonus, whose weight is therefore
made as much smaller. What does change how far a step goes is the number of updates: such contenders
have a learning rate of their own to try beside the common ones.
"""

from __future__ import annotations

from typing import Any

from art_core.algorithms import PRESETS
from art_core.config import TrainConfig

HELD = (
    "trained_share_power",
    "entropy_coef",
    "minibatches",
    "max_tokens_per_row",
    "max_grad_norm",
    "adam_betas",
    "weight_decay",
)
"""Settings that the quickstart decides for all."""

SPREAD = 0.28
"""Standard deviation of rewards within a group, mean over groups: the quickstart's second step
("train/reward_std_dev" of its history)."""

_DIVIDED = frozenset({"group", "group_sample", "batch", "batch_centred"})
_ONE_UPDATE = frozenset({"reinforce"})
"""Losses that can't tell that the policy has moved."""


def contenders(own: TrainConfig) -> dict[str, TrainConfig]:
    """Settings by name. Of two that are the same the first name stays: see `twins`."""
    found: dict[str, TrainConfig] = {}
    for name, config in _all(own).items():
        if config not in found.values():
            found[name] = config
    return found


def twins(own: TrainConfig) -> dict[str, str]:
    """Names that are left out of `contenders`, and which one of it is the same."""
    kept = contenders(own)
    others = {name: config for name, config in _all(own).items() if name not in kept}
    return {
        name: next(n for n, other in kept.items() if other == config)
        for name, config in others.items()
    }


def own_rate(config: TrainConfig, own: TrainConfig) -> float:
    """Factor of the learning rate at which a step's updates together are as big as `own`'s."""
    return own.minibatches / config.minibatches


def at_rate(config: TrainConfig, rate: float) -> TrainConfig:
    """The same with `rate` times the learning rate."""
    return config.model_copy(update={"learning_rate": rate * config.learning_rate})


def _all(own: TrainConfig) -> dict[str, TrainConfig]:
    return {
        "own": own,
        "default": _fitted({}, own),
        **{name: _fitted(settings, own) for name, settings in PRESETS.items()},
    }


def _fitted(settings: Any, own: TrainConfig) -> TrainConfig:
    """`settings` with what is held equal, as far as they leave it open."""
    bare = TrainConfig(**settings)
    held = {name: getattr(own, name) for name in HELD if name not in settings}
    if "entropy_coef" in held:
        held["entropy_coef"] *= _size(bare) / _size(own)
    if bare.loss_fn in _ONE_UPDATE:
        held["minibatches"] = 1
    return TrainConfig(**{**settings, **held, "learning_rate": own.learning_rate})


def _size(config: TrainConfig) -> float:
    """About how big its advantages are."""
    return 1.0 if config.scale_rewards in _DIVIDED else SPREAD
