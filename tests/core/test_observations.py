"""What the environment said, found in ids, weighed, and learned (ECHO, arXiv:2605.24517)."""

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from art_core.batch.minibatches import minibatches
from art_core.batch.observations import observations
from art_core.batch.sample import Sample
from art_core.batch.select import select
from art_core.calls import ModelCall
from art_core.config import TrainConfig
from art_core.training.loss import cross_entropy
from art_core.training.trainer import Trainer
from art_core.trajectories import Trajectory, TrajectoryGroup
from tests.core.sample import make_call
from tests.core.samples import learned
from tests.core.tiny_policy import (
    NAME,
    in_peft,
    reference_logprobs,
    reference_loss,
    reference_parameters,
    tiny_policy,
)
from tests.core.toy import vector


def call(prompt: list[int], sampled: list[int], **changes: Any) -> ModelCall:
    logprobs = np.full(len(sampled), -5.7, np.float32)
    ids = {"prompt_ids": np.array(prompt), "sampled_ids": np.array(sampled)}
    return make_call(record_id=str(prompt), logprobs=logprobs, **ids, **changes)


TURNS = [
    call([1, 2], [3, 4]),
    call([1, 2, 3, 4, 50, 51], [5]),
    call([1, 2, 3, 4, 50, 51, 5, 60], [6, 7]),
]
"""A tool says [50, 51], a user says [60]."""


@pytest.mark.parametrize(
    ("calls", "expected"),
    [
        (TURNS, [None, 4, 7]),
        (TURNS[:1], [None]),
        # Two parallel calls read the same result, and one of them more: each id counts once.
        ([TURNS[0], TURNS[1], call([1, 2, 3, 4, 50, 51], [9])], [None, 4, None]),
        ([TURNS[0], TURNS[1], call([1, 2, 3, 4, 50, 52], [9])], [None, 4, 5]),
        # A sub-agent, and a history without the answer, go on from nothing.
        ([TURNS[0], call([7, 8, 9], [1]), call([1, 2, 50], [5])], [None, None, None]),
        # The longer of two that it goes on from.
        ([call([1], [2]), call([1, 2, 8], [9]), call([1, 2, 8, 9, 70], [1])], [None, 2, 4]),
        # Nothing was said in between.
        ([call([1], [2]), call([1, 2], [3])], [None, None]),
    ],
    ids=["turns", "one", "twins", "siblings", "foreign", "nested", "silent"],
)
def test_what_was_said(calls: list[ModelCall], expected: list[int | None]) -> None:
    assert observations(calls) == expected


def test_cross_entropy_by_hand() -> None:
    """.05 * 1 + .05 * 2 + .1 * .5 = .2; gradient -w."""
    new = vector(-1, -2, -0.5).requires_grad_()
    loss = cross_entropy(new, vector(0.05, 0.05, 0.1))
    (gradient,) = torch.autograd.grad(loss, new)
    assert float(loss.detach()) == pytest.approx(0.2, abs=1e-15)
    assert gradient.tolist() == [-0.05, -0.05, -0.1]


def group(*rewards: float) -> TrajectoryGroup:
    found = [Trajectory(calls=list(TURNS)) for _ in rewards]
    for trajectory, reward in zip(found, rewards, strict=True):
        trajectory.reward = reward
    return TrajectoryGroup(found)


def samples(*rewards: float, **config: Any) -> list[Sample]:
    return select([group(*rewards)], model="agent", step=2, config=TrainConfig(**config)).samples


def test_nothing_is_observed_unless_it_is_asked_for() -> None:
    assert [s.observed for s in samples(1, 0)] == [False] * 6
    found = samples(1, 0, observation_coef=0.1)
    assert [s.observed for s in found] == [False, True, False, True, False] * 2
    assert [s.sampled_ids.tolist() for s in found if s.observed] == [[50, 51], [60]] * 2
    assert [s.call for s in found] == list(range(10))
    assert [s.trajectory for s in found] == [0] * 5 + [1] * 5


def test_equal_groups_teach_what_was_observed_if_they_are_kept() -> None:
    """Failed rollouts too: that is what it is for."""
    assert samples(0, 0, observation_coef=0.1) == []
    assert samples(0, 0, equal_groups="keep") == []
    kept = {"equal_groups": "keep", "observation_coef": 0.1}
    assert len(samples(0, 0, **kept)) == 10


@pytest.mark.parametrize("aggregation", ["token", "sequence", "rollout", "constant"])
def test_weights_beside_the_policys(aggregation: str) -> None:
    """Six ids were heard: .3 / 6 each; the policy's weights are those without them."""
    config = TrainConfig(observation_coef=0.3, aggregation=aggregation)
    (part,) = minibatches(samples(1, 0, observation_coef=0.3), config, key=(0,))
    (plain,) = minibatches(samples(1, 0), config, key=(0,))
    assert [s.weight for s in part if s.observed] == pytest.approx([0.05] * 4, abs=1e-15)
    assert [s.weight for s in part if not s.observed] == [s.weight for s in plain]


SETTINGS: dict[str, Any] = {
    "learning_rate": 1e-3, "max_grad_norm": 1e9, "entropy_coef": 0.01, "observation_coef": 0.3,
}  # fmt: skip


@pytest.mark.parametrize("changes", [{}, {"max_tokens_per_row": 16}], ids=str)
def test_the_gradient_is_that_of_both_losses_alone(
    tiny_llama: Path, tmp_path: Path, changes: dict[str, Any]
) -> None:
    """Against plain peft, one sequence at a time: the policy's loss and .3 times the mean over the
    6 ids that were heard; to 1e-10. No position more is computed.
    """
    model = tiny_policy(tiny_llama)
    model.save_adapter(NAME, tmp_path)
    twin = in_peft(tiny_llama, tmp_path, model.dtype)
    config = TrainConfig(**SETTINGS, **changes)
    found = samples(1, 0, observation_coef=0.3)
    own, heard = ([s for s in found if s.observed is kind] for kind in (False, True))
    told = -torch.cat([reference_logprobs(twin, s)[0] for s in heard]).mean()
    (reference_loss(twin, own, entropy_coef=0.01) + 0.3 * told).backward()
    expected = {key: p.grad for key, p in reference_parameters(twin).items()}

    trainer = Trainer(model, NAME, seed=0)
    figures = trainer.step(found, config)
    state, beta = trainer._optimizer.state, config.adam_betas[0]
    for (key, wanted), parameter in zip(expected.items(), trainer._parameters, strict=True):
        assert wanted is not None
        got = state[parameter]["exp_avg"] / (1 - beta)
        assert float((got - wanted).abs().max()) <= 1e-10 * float(wanted.abs().max()), key
    assert figures["observation_loss"] == pytest.approx(float(told.detach()), rel=1e-10)
    assert (figures["tokens_observed"], figures["tokens_trained"]) == (6, 10)
    plain = Trainer(tiny_policy(tiny_llama), NAME, seed=0).step(own, config)
    assert figures["tokens_computed"] == plain["tokens_computed"]
    assert figures["entropy"] == pytest.approx(plain["entropy"], rel=1e-12)
    assert (plain["tokens_observed"], plain.get("observation_loss")) == (0, None)


@pytest.mark.parametrize(
    "settings",
    [
        {"old_logprobs": "recomputed", "mismatch": "truncate"},
        {"entropy_top_share": 0.5},
        {"kl_penalty_coef": 0.1},
        {"kl_penalty_coef": 0.1, "kl_penalty": "k3"},
        {"loss_fn": "gspo", "aggregation": "sequence", "minibatches": 2},
    ],
    ids=str,
)
def test_the_policys_figures_are_those_without(tiny_llama: Path, settings: dict[str, Any]) -> None:
    """What is computed before the first update looks at what the policy sampled alone."""
    seen = samples(1, 0, observation_coef=0.3)
    with_it = TrainConfig(learning_rate=1e-12, observation_coef=0.3, **settings)
    without = TrainConfig(learning_rate=1e-12, **settings)
    got = Trainer(tiny_policy(tiny_llama), NAME, seed=0).step(seen, with_it)
    own = [s for s in seen if not s.observed]
    expected = Trainer(tiny_policy(tiny_llama), NAME, seed=0).step(own, without)
    apart = {"loss", "grad_norm", "observation_loss", "tokens_observed"}
    for name in learned(expected) - apart:
        assert got[name] == pytest.approx(expected[name], rel=1e-9), name
    assert math.isfinite(got["observation_loss"])
    assert got["loss"] == pytest.approx(expected["loss"] + 0.3 * got["observation_loss"], rel=1e-6)
