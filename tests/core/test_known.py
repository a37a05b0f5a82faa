"""What is computed before the first update, against plain transformers and peft: old logprobs, the
reference of the KL, advantages with it.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from art_core.batch.sample import Sample
from art_core.config import TrainConfig
from art_core.errors import CheckpointError
from art_core.nn.lora import LoraModel
from art_core.training.trainer import Trainer
from tests.core.samples import policy_calls
from tests.core.tiny_policy import (
    NAME,
    in_peft,
    reference_logprobs,
    reference_parameters,
    tiny_policy,
    weights,
)

PLAIN: dict[str, Any] = {"learning_rate": 1e-3, "max_grad_norm": 1e9}
Loss = Callable[[Sample, Tensor], Tensor]
"""Of the tokens of a call, from their new logprobs."""


def adapter(model: LoraModel, folder: Path) -> Path:
    model.save_adapter(NAME, folder)
    return folder


def gradient_alone(
    base: Path, folder: Path, samples: list[Sample], loss: Loss
) -> dict[str, Tensor]:
    """By token, each call alone, in plain peft."""
    twin = in_peft(base, folder, torch.float64)
    total = sum(len(s.sampled_ids) for s in samples)
    torch.stack([loss(s, reference_logprobs(twin, s)[0]).sum() for s in samples]).sum().div(
        total
    ).backward()
    return {k: p.grad for k, p in reference_parameters(twin).items() if p.grad is not None}


def gradient_packed(
    model: LoraModel, samples: list[Sample], config: TrainConfig, reference: Path | None = None
) -> tuple[dict[str, Tensor], dict[str, float]]:
    """Read off Adam's first moment, (1 - beta1) g after one update from nothing; and figures."""
    trainer = Trainer(model, NAME, seed=0)
    figures = trainer.step(samples, config, reference=reference)
    state = trainer._optimizer.state
    found = [state[p]["exp_avg"] / (1 - config.adam_betas[0]) for p in trainer._parameters]
    return dict(zip(model.adapter_weights(NAME), found, strict=True)), figures


def close(got: dict[str, Tensor], expected: dict[str, Tensor]) -> bool:
    assert got.keys() == expected.keys()
    scale = max(float(g.abs().max()) for g in expected.values())
    assert scale > 0
    worst = max(float((got[k] - expected[k]).abs().max()) for k in got)
    return worst <= 1e-10 * scale


def logprobs_alone(
    base: Path, folder: Path, samples: list[Sample], *, adapted: bool = True
) -> dict[int, Tensor]:
    """Of each call, without gradients; `adapted` False: of the base model."""
    twin = in_peft(base, folder, torch.float64)
    with torch.no_grad():
        if adapted:
            return {s.call: reference_logprobs(twin, s)[0] for s in samples}
        with twin.disable_adapter():
            return {s.call: reference_logprobs(twin, s)[0] for s in samples}


# --- old logprobs --------------------------------------------------------------------------------


@pytest.mark.parametrize("max_tokens_per_row", [20, 4096])
def test_recomputed_logprobs_and_the_samplers_gap(
    tiny_llama: Path, tmp_path: Path, max_tokens_per_row: int
) -> None:
    """At the first update n is o, so that the clip's gradient is -w A dn, w = min(exp(o - m), 2);
    1 for distorted calls, whose m says nothing.
    """
    model, samples = tiny_policy(tiny_llama), policy_calls()
    old = logprobs_alone(tiny_llama, adapter(model, tmp_path), samples)

    def weight(s: Sample) -> Tensor:
        gap = old[s.call] - torch.from_numpy(s.logprobs).double()
        return torch.ones_like(gap) if s.distorted else gap.exp().clamp(max=2.0)

    expected = gradient_alone(
        tiny_llama, tmp_path, samples, lambda s, n: -weight(s) * s.advantage * n
    )
    config = TrainConfig(
        old_logprobs="recomputed",
        mismatch="truncate",
        max_tokens_per_row=max_tokens_per_row,
        **PLAIN,
    )
    got, figures = gradient_packed(model, samples, config)
    assert close(got, expected)
    assert (figures["ratio_min"], figures["ratio_max"]) == pytest.approx((1.0, 1.0), abs=1e-12)
    assert figures["kl"] == pytest.approx(0.0, abs=1e-15)
    mean = torch.cat([weight(s) for s in samples]).mean()
    assert figures["mismatch_weight"] == pytest.approx(float(mean), rel=1e-9)
    assert figures["kl_sampler"] > 0.01


def test_a_weight_by_call_is_that_of_the_whole_call(tiny_llama: Path, tmp_path: Path) -> None:
    """min(exp(sum(o - m)), 2), however the rows are cut."""
    model, samples = tiny_policy(tiny_llama), policy_calls()
    old = logprobs_alone(tiny_llama, adapter(model, tmp_path), samples)

    def weight(s: Sample) -> Tensor:
        gap = (old[s.call] - torch.from_numpy(s.logprobs).double()).sum()
        return torch.ones_like(gap) if s.distorted else gap.exp().clamp(max=2.0)

    expected = gradient_alone(
        tiny_llama, tmp_path, samples, lambda s, n: -weight(s) * s.advantage * n
    )
    config = TrainConfig(
        old_logprobs="recomputed",
        mismatch="truncate",
        mismatch_level="sequence",
        max_tokens_per_row=24,
        **PLAIN,
    )
    got, _ = gradient_packed(model, samples, config)
    assert close(got, expected)


def test_a_form_of_whole_calls_in_rows(tiny_llama: Path, tmp_path: Path) -> None:
    """GSPO's s = exp(mean(n - o)) of each call, by call: -s A, unclipped within wide bounds."""
    samples = [s._replace(distorted=False) for s in policy_calls()]
    model = tiny_policy(tiny_llama)
    total = sum(len(s.sampled_ids) for s in samples)

    def loss(s: Sample, n: Tensor) -> Tensor:
        ratio = (n - torch.from_numpy(s.logprobs).double()).mean().exp()
        inside = ratio.clamp(0.5, 1.5)
        gain = torch.minimum(ratio * s.advantage, inside * s.advantage)
        return -gain * total / len(samples)  # the mean is over calls

    expected = gradient_alone(tiny_llama, adapter(model, tmp_path), samples, loss)
    config = TrainConfig(
        loss_fn="gspo",
        aggregation="sequence",
        epsilon=0.5,
        epsilon_high=0.5,
        max_tokens_per_row=24,
        **PLAIN,
    )
    got, _ = gradient_packed(model, samples, config)
    assert close(got, expected)


# --- the reference -------------------------------------------------------------------------------


def on_policy(samples: list[Sample]) -> list[Sample]:
    """Ratios of 1: the policy gradient is -A dn."""
    return [s._replace(distorted=True) for s in samples]


def test_the_base_model_is_the_reference(tiny_llama: Path, tmp_path: Path) -> None:
    """Case 047: without the adapter. A run that begins from a trained adapter is at a distance, and
    says so: k3 in the loss, exp(f - n) + n - f - 1.
    """
    model, samples = tiny_policy(tiny_llama), on_policy(policy_calls())
    base = logprobs_alone(tiny_llama, adapter(model, tmp_path), samples, adapted=False)

    def estimate(s: Sample, n: Tensor) -> Tensor:
        gap = n - base[s.call]
        return (-gap).exp() + gap - 1

    expected = gradient_alone(
        tiny_llama, tmp_path, samples, lambda s, n: -s.advantage * n + 0.1 * estimate(s, n)
    )
    config = TrainConfig(kl_penalty="k3", kl_penalty_coef=0.1, max_tokens_per_row=24, **PLAIN)
    now = logprobs_alone(tiny_llama, tmp_path, samples)
    got, figures = gradient_packed(model, samples, config)
    assert close(got, expected)
    mean = torch.cat([estimate(s, now[s.call]) for s in samples]).mean()
    assert figures["kl_reference"] == pytest.approx(float(mean), rel=1e-9)
    assert figures["kl_reference"] > 1e-3


@pytest.mark.parametrize("form", ["advantage", "reward", "k3", "k2"])
def test_the_point_where_a_run_began_is_at_no_distance(
    tiny_llama: Path, tmp_path: Path, form: str
) -> None:
    """Case 047: the reference is A0, and the policy is still there: 0 to 1e-4."""
    model = tiny_policy(tiny_llama)
    config = TrainConfig.model_validate({**PLAIN, "kl_penalty": form, "kl_penalty_coef": 0.1})
    start = adapter(model, tmp_path)
    _, figures = gradient_packed(model, policy_calls(), config, reference=start)
    assert figures["kl_reference"] == pytest.approx(0.0, abs=1e-12)
    assert model.adapters() == [NAME], "the reference is gone again"


@pytest.mark.parametrize("form", ["advantage", "reward"])
@pytest.mark.parametrize("minibatches", [1, 3])
def test_the_kl_in_the_advantages(
    tiny_llama: Path, tmp_path: Path, form: str, minibatches: int
) -> None:
    """A - .1 d, or A + .1 (mean d - d), of the policy before the first update, whatever the sampler
    said. The other adapter is the reference.
    """
    model, samples = tiny_policy(tiny_llama), on_policy(policy_calls())
    now = logprobs_alone(tiny_llama, adapter(model, tmp_path / "now"), samples)
    other = tiny_policy(tiny_llama, seed=5)
    there = logprobs_alone(tiny_llama, adapter(other, tmp_path / "other"), samples)
    gap = {call: now[call] - there[call] for call in now}
    mean = torch.cat(list(gap.values())).mean() if form == "advantage" else torch.zeros(())
    config = TrainConfig.model_validate(
        {**PLAIN, "kl_penalty": form, "kl_penalty_coef": 0.1, "minibatches": minibatches}
    )
    got, figures = gradient_packed(model, samples, config, reference=tmp_path / "other")
    estimate = {call: torch.expm1(-d) + d for call, d in gap.items()}
    expected = float(torch.cat(list(estimate.values())).mean())
    assert figures["kl_reference"] == pytest.approx(expected, rel=1e-9)
    if minibatches == 1:
        assert close(
            got,
            gradient_alone(
                tiny_llama,
                tmp_path / "now",
                samples,
                lambda s, n: -(s.advantage + 0.1 * (mean - gap[s.call])) * n,
            ),
        )


def counted(model: LoraModel) -> list[tuple[str | None, bool, bool]]:
    """(adapter, with gradients, module in train mode) of each forward pass to come."""
    seen: list[tuple[str | None, bool, bool]] = []
    forward = model.hidden

    def hidden(*args: Any) -> Tensor:
        training = any(module.training for module in model._causal.modules())
        seen.append((model._active, torch.is_grad_enabled(), training))
        return forward(*args)

    setattr(model, "hidden", hidden)  # noqa: B010 - mypy knows methods can't be assigned
    return seen


@pytest.mark.parametrize(
    ("settings", "passes"),
    [
        ({}, [(NAME, True)]),
        ({"kl_penalty_coef": 0.0, "kl_penalty": "k3"}, [(NAME, True)]),
        ({"kl_penalty_coef": 0.1, "kl_penalty": "k3"}, [(None, False), (NAME, True)]),
        ({"kl_penalty_coef": 0.1}, [(NAME, False), (None, False), (NAME, True)]),
        ({"old_logprobs": "recomputed"}, [(NAME, False), (NAME, True)]),
        (
            {"kl_penalty_coef": 0.1, "kl_penalty": "k3", "minibatches": 2},
            [(None, False)] * 2 + [(NAME, True)] * 2,
        ),
    ],
    ids=str,
)
def test_nothing_is_computed_that_is_not_asked_for(
    tiny_llama: Path, settings: dict[str, Any], passes: list[tuple[str | None, bool]]
) -> None:
    """Case 047: with a weight of 0 the reference never runs, and its figure is absent. Each pass is
    made once a train call, in eval mode: dropout is off.
    """
    model = tiny_policy(tiny_llama)
    samples = [s._replace(distorted=False) for s in policy_calls()]
    seen = counted(model)
    figures = Trainer(model, NAME, seed=0).step(samples, TrainConfig(**PLAIN, **settings))
    assert [(name, gradients) for name, gradients, _ in seen] == passes
    assert not any(training for _, _, training in seen)
    assert ("kl_reference" in figures) is bool(settings.get("kl_penalty_coef"))
    assert all(np.isfinite(value) for value in figures.values())


def test_a_reference_that_is_none_changes_nothing(tiny_llama: Path, tmp_path: Path) -> None:
    model = tiny_policy(tiny_llama)
    before = weights(model)
    config = TrainConfig(kl_penalty_coef=0.1, **PLAIN)
    with pytest.raises(CheckpointError, match=str(tmp_path)):
        Trainer(model, NAME, seed=0).step(policy_calls(), config, reference=tmp_path)
    assert model.adapters() == [NAME]
    assert all(torch.equal(before[k], w) for k, w in weights(model).items())


# --- named algorithms ----------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["grpo", "dr_grpo", "dapo", "gspo", "cispo", "rloo", "dppo"])
def test_presets_learn(tiny_llama: Path, name: str) -> None:
    model = tiny_policy(tiny_llama)
    before = weights(model)
    config = TrainConfig.preset(name, learning_rate=1e-3, max_tokens_per_row=24)
    figures = Trainer(model, NAME, seed=0).step(policy_calls(), config)
    assert all(np.isfinite(value) for value in figures.values())
    assert {"loss", "entropy", "clipped", "kl", "ratio_min", "ratio_max"} <= figures.keys()
    moved = [k for k, w in weights(model).items() if not torch.equal(before[k], w)]
    assert len(moved) == len(before)


def test_figures_are_means_whatever_divides_the_loss(tiny_llama: Path) -> None:
    """The entropy by token is that of any other average's; the loss is the one differentiated."""
    found = {}
    for aggregation in ("token", "constant"):
        config = TrainConfig.model_validate({**PLAIN, "aggregation": aggregation, "horizon": 16})
        found[aggregation] = Trainer(tiny_policy(tiny_llama), NAME, seed=0).step(
            policy_calls(), config
        )
    token, constant = found["token"], found["constant"]
    samples = policy_calls()
    share = sum(len(s.sampled_ids) for s in samples) / (len(samples) * 16)
    assert constant["entropy"] == pytest.approx(token["entropy"], rel=1e-9)
    assert constant["clipped"] == pytest.approx(token["clipped"], rel=1e-9)
    assert constant["loss"] == pytest.approx(token["loss"] * share, rel=1e-9)
