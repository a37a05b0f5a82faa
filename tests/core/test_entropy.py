"""The entropy's target, and the tokens where it is high."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from art_core.config import TrainConfig
from art_core.training.entropy import EntropyBonus, least_of_top
from art_core.training.loss import row_loss
from art_core.training.moments import STATE
from art_core.training.trainer import Trainer
from tests.core.samples import policy_calls
from tests.core.test_loss import toy
from tests.core.tiny_policy import NAME, same_bits, tiny_policy, weights

PLAIN: dict[str, Any] = {"learning_rate": 1e-3}


def test_the_weight_follows_the_entropy() -> None:
    """Skywork-OR1, arXiv:2505.22312, target .2 and step .005: below, it rises; above, it falls and
    does not act; at the target it falls and acts; it is never below 0.
    """
    bonus = EntropyBonus(0.005, acts=True)
    seen = []
    for entropy in (0.1, 0.15, 0.3, 0.2, 0.25, 0.25, 0.1):
        bonus = bonus.after(entropy, target=0.2, step=0.005)
        seen.append((round(bonus.coef, 6), bonus.weight > 0))
    assert seen == [
        (0.01, True),
        (0.015, True),
        (0.01, False),
        (0.005, True),
        (0.0, False),
        (0.0, False),
        (0.005, True),
    ]


@pytest.mark.parametrize(("share", "least"), [(0.2, 5.0), (0.4, 4.0), (1.0, 1.0), (0.01, 5.0)])
def test_the_top_share(share: float, least: float) -> None:
    """Of five tokens .2 is one, and one is the least there is."""
    assert least_of_top(np.array([3.0, 1.0, 5.0, 2.0, 4.0]), share) == least


def test_tokens_that_are_left_out_count_in_the_mean() -> None:
    """The clip's terms are [-1.2, -1.105171, .8, 1, 1.491825]: with the second and the fourth alone
    (-1.105171 + 1) / 5.
    """
    out = torch.tensor([True, False, True, False, True])
    tokens = toy(left_out=out)
    parts = row_loss(tokens, TrainConfig(epsilon_high=0.2))
    (gradient,) = torch.autograd.grad(parts.loss, tokens.new)
    assert float(parts.loss.detach()) == pytest.approx(-0.105171 / 5, abs=1e-6)
    assert gradient.tolist() == pytest.approx([0, -0.221034, 0, 0.2, 0], abs=1e-6)
    assert float(parts.sums["clipped"]) == pytest.approx(0.6)


def test_only_the_top_tokens_learn(tiny_llama: Path) -> None:
    """A share of less than a token each is the one token of highest entropy, over all rows."""
    total = sum(len(s.sampled_ids) for s in policy_calls())
    found = []
    for size in (4096, 24):
        model = tiny_policy(tiny_llama)
        config = TrainConfig(entropy_top_share=1e-6, max_tokens_per_row=size, **PLAIN)
        figures = Trainer(model, NAME, seed=0).step(policy_calls(), config)
        found.append(weights(model))
        assert figures["clipped"] == pytest.approx((total - 1) / total)
    assert max(float((a - found[1][k]).abs().max()) for k, a in found[0].items()) <= 1e-9


def test_a_target_moves_the_weight_and_is_kept(tiny_llama: Path, tmp_path: Path) -> None:
    """The tiny model's entropy is about 5 nats. Below a target of 9 the weight rises by .5 each
    update, from .25; the first update has .25 as if there were no target.
    """
    model, plain = tiny_policy(tiny_llama), tiny_policy(tiny_llama)
    config = TrainConfig(entropy_coef=0.25, entropy_target=9.0, entropy_step=0.5, **PLAIN)
    trainer = Trainer(model, NAME, seed=0)
    assert trainer.step(policy_calls(), config)["entropy_coef"] == 0.25
    Trainer(plain, NAME, seed=0).step(policy_calls(), TrainConfig(entropy_coef=0.25, **PLAIN))
    assert same_bits(weights(model), weights(plain))
    trainer.save(tmp_path)
    assert json.loads((tmp_path / STATE).read_text())["bonus"] == {"coef": 0.75, "acts": True}
    fresh = Trainer(tiny_policy(tiny_llama), NAME, seed=0)
    fresh.load(tmp_path)
    assert fresh.step(policy_calls(), config)["entropy_coef"] == 0.75
    low = config.model_copy(update={"entropy_target": 1.0})
    fresh.step(policy_calls(), low)
    assert fresh.step(policy_calls(), low)["entropy_coef"] == 0.0, "it is above"
