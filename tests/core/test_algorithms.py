"""Named algorithms, settings under ART's names, and settings that make no sense together."""

from typing import Any

import pytest
from pydantic import ValidationError

from art_core.algorithms import BOUNDS, PRESETS
from art_core.config import TrainConfig
from art_core.errors import ConfigError


@pytest.mark.parametrize("name", PRESETS)
def test_presets_are_settings_and_can_be_changed(name: str) -> None:
    plain = TrainConfig.preset(name)
    assert TrainConfig.preset(name, learning_rate=0.5) == plain.model_copy(
        update={"learning_rate": 0.5}
    )
    assert TrainConfig.model_validate_json(plain.model_dump_json()) == plain, "it can be sent"


def test_presets_differ() -> None:
    assert len({TrainConfig.preset(name).model_dump_json() for name in PRESETS}) == len(PRESETS)
    assert set(PRESETS) == {"grpo", "dr_grpo", "dapo", "gspo", "cispo", "rloo", "dppo"}


@pytest.mark.parametrize(
    ("name", "bounds"),
    [
        ("grpo", (0.2, 0.2)),
        ("dapo", (0.2, 0.28)),
        ("gspo", (3e-4, 4e-4)),
        ("cispo", (1.0, 4.0)),
        ("dppo", (0.2, 0.2)),
    ],
)
def test_bounds_are_the_papers(name: str, bounds: tuple[float, float]) -> None:
    assert TrainConfig.preset(name).bounds == bounds


def test_a_bound_that_is_set_is_kept() -> None:
    assert TrainConfig(loss_fn="cispo", epsilon_high=1.5).bounds == (1.0, 1.5)
    assert TrainConfig().bounds == BOUNDS["ppo"] == (0.2, 0.28)


def test_a_changed_preset_must_make_sense() -> None:
    with pytest.raises(ConfigError, match='set aggregation="sequence"'):
        TrainConfig.preset("gspo", aggregation="token")


def test_an_unknown_name_lists_those_there_are() -> None:
    with pytest.raises(ConfigError, match=r"got 'gpro', expected one of grpo, dr_grpo, dapo"):
        TrainConfig.preset("gpro")


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"loss_fn": "gspo"}, 'set aggregation="sequence"'),
        ({"loss_fn": "gmpo", "aggregation": "constant"}, 'set aggregation="sequence"'),
        ({"loss_fn": "sapo", "epsilon": 0.2}, "leave epsilon and epsilon_high out"),
        ({"loss_fn": "reinforce", "epsilon_high": 0.2}, "leave epsilon and epsilon_high out"),
        ({"loss_fn": "spo", "epsilon_high": 0.2}, "Its one bound is epsilon"),
        (
            {"loss_fn": "cispo", "max_negative_advantage_importance_sampling_weight": 4.0},
            'Set loss_fn="ppo"',
        ),
        ({"max_negative_advantage_importance_sampling_weight": 1.1}, "above 1 .* = 1.28"),
        ({"loss_fn": "vespo", "kimi_k2_tau": 0.1}, 'Set loss_fn="cispo"'),
        ({"loss_fn": "reinforce", "minibatches": 2}, "set minibatches=1"),
        ({"baseline": "batch", "scale_rewards": "group"}, r"\['batch', 'none'\]"),
        ({"baseline": "running", "scale_rewards": "mean"}, "Set scale_rewards to one of"),
        ({"call_baseline": "visit", "scale_rewards": "batch"}, 'scale_rewards="none" or "group"'),
        ({"call_baseline": "visit", "baseline": "length"}, 'Set baseline="group"'),
        ({"overlong_limit": 100}, "make it smaller"),
        ({"overlong_limit": 9999, "scale_rewards": "mean"}, "leave overlong_limit out"),
        (
            {"equal_groups": "keep", "zero_advantages": "leave_out"},
            'set zero_advantages="count"',
        ),
        ({"reward_parts": ("a",), "scale_rewards": "group"}, 'set scale_rewards="none"'),
        ({"reward_parts": ("a",), "baseline": "leave_one_out"}, "leave both at their defaults"),
        ({"reward_parts": ("a",), "call_rewards": "to_go"}, "leave one of the two out"),
        ({"reward_parts": ("a",), "overlong_limit": 9999}, "a part of the reward"),
        ({"sapo_tau": (1.0, 2.0)}, 'no effect: set loss_fn="sapo"'),
        ({"loss_fn": "sapo", "vespo_shape": ((1.0, 1.0), (1.0, 1.0))}, 'set loss_fn="vespo"'),
        ({"dppo_tau": 0.0}, 'set loss_fn="dppo"'),
        ({"overlong_buffer": 10}, "set overlong_limit, or leave it out"),
        ({"old_logprobs": "recomputed", "mismatch_high": 5.0}, 'set mismatch="truncate" or "mask"'),
        ({"mismatch_level": "sequence"}, 'set mismatch="truncate" or "mask"'),
        ({"entropy_coef": 0.1, "entropy_step": 0.1}, "set entropy_target"),
        ({"mismatch": "truncate"}, 'set old_logprobs="recomputed"'),
        (
            {"old_logprobs": "recomputed", "mismatch": "truncate", "mismatch_low": 0.5},
            'set mismatch="mask"',
        ),
        ({"loss_fn": "decoupled", "old_logprobs": "recomputed"}, 'set old_logprobs="sampler"'),
        (
            {
                "kl_penalty_coef": 0.1,
                "kl_penalty_reference_step": 3,
                "kl_ref_adapter_path": "there",
            },
            "either kl_penalty_reference_step or",
        ),
        ({"kl_penalty_reference_step": 0}, "set kl_penalty_coef, or leave it out"),
        ({"kl_ref_adapter_path": "there"}, "set kl_penalty_coef, or leave it out"),
        ({"kl_penalty": "k1", "kl_penalty_coef": 0.1}, 'Set kl_penalty="reward"'),
        (
            {"loss_fn": "gspo", "aggregation": "sequence", "kl_penalty_coef": 0.1},
            'set loss_fn="gspo_token"',
        ),
    ],
    ids=str,
)
def test_what_makes_no_sense_is_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        TrainConfig(**settings)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("truncated_importance_sampling", 'mismatch="truncate"'),
        ("packed_sequence_length", "Set max_tokens_per_row"),
        ("grad_accumulation_sequences", "accumulated by themselves"),
        ("precalculate_logprobs", 'Set old_logprobs="recomputed"'),
        ("normalize_advantages", "Set scale_rewards"),
    ],
)
def test_arts_other_names_say_what_to_set(name: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        TrainConfig(**{name: 1})


def test_arts_names_that_are_kept() -> None:
    config = TrainConfig.model_validate({"scale_rewards": True, "loss_fn": "cispo"})
    assert config.scale_rewards == "group"
    assert TrainConfig.model_validate({"scale_rewards": False}).scale_rewards == "none"


@pytest.mark.parametrize("settings", [{}, {"loss_fn": "sapo", "sapo_tau": (2.0, 3.0)}], ids=str)
def test_settings_can_be_written_and_read(settings: dict[str, Any]) -> None:
    config = TrainConfig(**settings)
    assert TrainConfig.model_validate(config.model_dump(mode="json")) == config


@pytest.mark.parametrize(
    "settings",
    [{"adam_betas": (0.9, 1.0)}, {"adam_betas": (-0.1, 0.9)}, {"sapo_tau": (0.0, 1.0)}],
    ids=str,
)
def test_what_would_divide_by_zero_is_refused(settings: dict[str, Any]) -> None:
    with pytest.raises(ValidationError, match=next(iter(settings))):
        TrainConfig(**settings)


def test_what_is_misspelled_is_refused() -> None:
    with pytest.raises(ValidationError, match="lerning_rate"):
        TrainConfig.model_validate({"lerning_rate": 1.0})
