"""The named algorithms as settings of `TrainConfig`, and which of its settings don't go together.

In: names, and settings as given. Out: settings, or a `ConfigError` that says what to set instead.
The formulae are in batch/advantages.py and training/*_losses.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

from art_core.errors import ConfigError

if TYPE_CHECKING:
    from art_core.config import TrainConfig

Baseline: TypeAlias = Literal["group", "leave_one_out", "length", "batch", "running"]
Scale: TypeAlias = Literal["none", "group", "group_sample", "mean", "batch", "batch_centred"]
Spread: TypeAlias = Literal["own", "to_go"]
Aggregation: TypeAlias = Literal["token", "sequence", "rollout", "constant"]
Loss: TypeAlias = Literal[
    "ppo",
    "reinforce",
    "cispo",
    "gspo",
    "gspo_token",
    "luspo",
    "gmpo",
    "sapo",
    "vespo",
    "dppo",
    "spo",
    "drpo",
    "decoupled",
]

PRESETS: Mapping[str, Mapping[str, Any]] = {
    "grpo": {  # arXiv:2402.03300; the KL's weight as in DeepSeek-R1
        "scale_rewards": "group",
        "aggregation": "sequence",
        "epsilon_high": 0.2,
        "kl_penalty": "k3",
        "kl_penalty_coef": 1e-3,
    },
    "dr_grpo": {"aggregation": "constant", "epsilon_high": 0.2},  # arXiv:2503.20783
    "dapo": {"scale_rewards": "group"},  # arXiv:2503.14476
    "gspo": {  # arXiv:2507.18071
        "loss_fn": "gspo",
        "scale_rewards": "group",
        "aggregation": "sequence",
        "minibatches": 4,
    },
    "cispo": {"loss_fn": "cispo", "scale_rewards": "batch"},  # arXiv:2506.13585, 2510.13786
    "rloo": {  # arXiv:2402.14740
        "loss_fn": "reinforce",
        "baseline": "leave_one_out",
        "aggregation": "constant",
    },
    "dppo": {"loss_fn": "dppo"},  # arXiv:2602.04879
}
"""What each sets; the rest is `TrainConfig`'s default.

Which when: "dapo" is the plain choice where groups have few right answers; "dr_grpo" where answers
grow longer for no reason; "gspo" for long answers and models with experts, whose token ratios are
noise; "cispo" and "dppo" where rare tokens, such as a tool's name, have to become likely, which a
clip forbids, and where calls are some steps old; "rloo" for one update of fresh calls with nothing
to tune; "grpo" where the policy must stay near the base model, at the price of one more forward
pass.
"""

BOUNDS: Mapping[str, tuple[float, float]] = {
    "ppo": (0.2, 0.28),  # DAPO's
    "decoupled": (0.2, 0.28),
    "cispo": (1.0, 4.0),  # free below, 5 above
    "gspo": (3e-4, 4e-4),
    "gspo_token": (3e-4, 4e-4),
    "luspo": (2e-3, 2.5e-3),
    "gmpo": (0.4, 0.4),
    "dppo": (0.2, 0.2),
    "spo": (0.2, 0.2),
    "drpo": (0.2, 0.2),
}
"""`epsilon` and `epsilon_high` of each loss that has them, as its paper uses it."""

BY_CALL = frozenset({"gspo", "gspo_token", "luspo", "gmpo"})
"""Losses whose ratio is a call's: averaged over calls."""

_RENAMED = {
    "advantage_balance": "nothing: it is not offered",
    "allow_training_without_logprobs": 'old_logprobs="recomputed"',
    "grad_accumulation_sequences": "max_tokens_per_row; rows are accumulated by themselves",
    "importance_sampling_level": 'loss_fn="gspo" for "sequence", "ppo" for "token"',
    "mask_prob_ratio": 'loss_fn="dppo", which masks instead of clipping',
    "normalize_advantages": "scale_rewards",
    "num_trajectories_learning_rate_multiplier_power": "trained_share_power",
    "packed_sequence_length": "max_tokens_per_row",
    "ppo": 'loss_fn="ppo" for True, "cispo" for False',
    "precalculate_logprobs": 'old_logprobs="recomputed"',
    "truncated_importance_sampling": 'old_logprobs="recomputed", mismatch="truncate" and '
    "mismatch_high",
}
"""ART's names for what is called otherwise here."""


def settings_of(name: str) -> Mapping[str, Any]:
    """What the algorithm `name` sets.

    Raises:
        ConfigError: it is not in `PRESETS`.
    """
    if name not in PRESETS:
        raise ConfigError(
            "an algorithm's name",
            got=name,
            expected=f"one of {', '.join(PRESETS)}",
            fix="Any other is put together from the settings of TrainConfig.",
        )
    return PRESETS[name]


def known_names(given: Any) -> Any:
    """Settings under our names; ART's True and False for `scale_rewards` are understood.

    Raises:
        ConfigError: a setting has another name here.
    """
    if not isinstance(given, dict):
        return given
    for name in given.keys() & _RENAMED.keys():
        raise ConfigError(f"TrainConfig has no {name}", fix=f"Set {_RENAMED[name]}.")
    if given.get("kl_penalty") == "k1":
        raise ConfigError(
            "k1 as a loss",
            got="k1",
            expected="an estimator whose gradient is not 0 in expectation",
            fix='Set kl_penalty="reward", which takes k1 off the advantage, or "k2".',
        )
    scale = given.get("scale_rewards")
    if isinstance(scale, bool):
        return {**given, "scale_rewards": "group" if scale else "none"}
    return given


def check_together(config: TrainConfig) -> None:
    """Refuse settings that make no sense together.

    Raises:
        ConfigError: says which, and what to set instead.
    """
    for rule in (_loss, _idle, _advantages, _parts, _sampler, _reference):
        rule(config)


def _loss(c: TrainConfig) -> None:
    if c.loss_fn in BY_CALL and c.aggregation != "sequence":
        _refuse(
            f'loss_fn="{c.loss_fn}" averaged by {c.aggregation}',
            'Its ratio is a whole call\'s: set aggregation="sequence".',
        )
    if c.loss_fn not in BOUNDS and (c.epsilon is not None or c.epsilon_high is not None):
        _refuse(
            f'epsilon with loss_fn="{c.loss_fn}"',
            'It has no such bound: leave epsilon and epsilon_high out, or set loss_fn="ppo".',
        )
    if c.loss_fn in ("spo", "drpo") and c.epsilon_high is not None:
        _refuse(f'epsilon_high with loss_fn="{c.loss_fn}"', "Its one bound is epsilon.")
    if c.loss_fn != "ppo" and c.max_negative_advantage_importance_sampling_weight is not None:
        _refuse(
            f'max_negative_advantage_importance_sampling_weight with loss_fn="{c.loss_fn}"',
            'Set loss_fn="ppo", or leave it out.',
        )
    cap = c.max_negative_advantage_importance_sampling_weight
    if cap is not None and cap <= 1.0 + c.bounds[1]:
        _refuse(
            f"max_negative_advantage_importance_sampling_weight={cap} within the clip",
            f"It must be above 1 + epsilon_high = {1.0 + c.bounds[1]}; INTELLECT-2 uses 4.",
        )
    if c.kimi_k2_tau is not None and c.loss_fn not in ("ppo", "cispo", "reinforce"):
        _refuse(f'kimi_k2_tau with loss_fn="{c.loss_fn}"', 'Set loss_fn="cispo" or "ppo".')
    if c.loss_fn == "reinforce" and c.minibatches > 1:
        _refuse(
            f'loss_fn="reinforce" with minibatches={c.minibatches}',
            "It can't tell that the policy has moved after the first: set minibatches=1, or "
            'loss_fn="cispo".',
        )


def _idle(c: TrainConfig) -> None:
    """Refuse what is set and has no effect."""
    mismatch = (c.mismatch != "none", 'mismatch="truncate" or "mask"')
    needs = {
        "sapo_tau": (c.loss_fn == "sapo", 'loss_fn="sapo"'),
        "vespo_shape": (c.loss_fn == "vespo", 'loss_fn="vespo"'),
        "dppo_tau": (c.loss_fn == "dppo", 'loss_fn="dppo"'),
        "overlong_buffer": (c.overlong_limit is not None, "overlong_limit"),
        "mismatch_level": mismatch,
        "mismatch_low": mismatch,
        "mismatch_high": mismatch,
        "entropy_step": (c.entropy_target is not None, "entropy_target"),
        "kl_penalty_reference_step": (c.kl_penalty_coef > 0, "kl_penalty_coef"),
        "kl_ref_adapter_path": (c.kl_penalty_coef > 0, "kl_penalty_coef"),
    }
    for name, (acts, needed) in needs.items():
        value = getattr(c, name)
        if not acts and value != type(c).model_fields[name].default:
            _refuse(f"{name}={value!r} alone", f"It has no effect: set {needed}, or leave it out.")


def _advantages(c: TrainConfig) -> None:
    fits = {
        "group": {"none", "group", "group_sample", "mean", "batch", "batch_centred"},
        "leave_one_out": {"none", "group", "group_sample", "batch", "batch_centred"},
        "length": {"none", "group", "group_sample", "batch", "batch_centred"},
        "batch": {"none", "batch"},
        "running": {"none", "batch", "batch_centred"},
    }[c.baseline]
    if c.scale_rewards not in fits:
        _refuse(
            f'scale_rewards="{c.scale_rewards}" with baseline="{c.baseline}"',
            f'Set scale_rewards to one of {sorted(fits)}, or baseline="group".',
        )
    if c.call_baseline == "visit" and (
        c.baseline not in ("group", "leave_one_out") or c.scale_rewards not in ("none", "group")
    ):
        _refuse(
            f'call_baseline="visit" with baseline="{c.baseline}", '
            f'scale_rewards="{c.scale_rewards}"',
            'Set baseline="group" or "leave_one_out" and scale_rewards="none" or "group".',
        )
    if c.zero_advantages == "leave_out" and c.equal_groups == "keep":
        _refuse(
            'equal_groups="keep" with zero_advantages="leave_out"',
            'All that is kept would be left out: set zero_advantages="count".',
        )
    if c.overlong_limit is not None and c.scale_rewards == "mean":
        _refuse(
            'overlong_limit with scale_rewards="mean"',
            "A penalty makes rewards negative, which have no rate of success: set "
            'scale_rewards="group", or leave overlong_limit out.',
        )
    if c.overlong_limit is not None and c.overlong_buffer > c.overlong_limit:
        _refuse(
            f"overlong_buffer={c.overlong_buffer} with overlong_limit={c.overlong_limit}",
            "The buffer lies before the limit: make it smaller. DAPO uses 4096 of 20480.",
        )


def _parts(c: TrainConfig) -> None:
    if c.reward_parts and (c.baseline, c.call_baseline) != ("group", "trajectory"):
        _refuse(
            f'reward_parts with baseline="{c.baseline}", call_baseline="{c.call_baseline}"',
            "The parts have norms of their own: leave both at their defaults.",
        )
    if c.reward_parts and c.scale_rewards != "none":
        _refuse(
            f'reward_parts with scale_rewards="{c.scale_rewards}"',
            'The parts are divided by their own std: set scale_rewards="none".',
        )
    if c.reward_parts and c.call_rewards != "own":
        _refuse(
            f'reward_parts with call_rewards="{c.call_rewards}"',
            "A trajectory's parts alone are compared: leave one of the two out.",
        )
    if c.reward_parts and c.overlong_limit is not None:
        _refuse("reward_parts with overlong_limit", "Make the length a part of the reward.")


def _sampler(c: TrainConfig) -> None:
    if c.mismatch != "none" and c.old_logprobs == "sampler":
        _refuse(
            f'mismatch="{c.mismatch}" with old_logprobs="sampler"',
            'There is no gap to weight then: set old_logprobs="recomputed", or mismatch="none".',
        )
    if c.mismatch == "truncate" and c.mismatch_low > 0:
        _refuse(
            f'mismatch_low={c.mismatch_low} with mismatch="truncate"',
            'A truncated weight has no lower bound: set mismatch="mask".',
        )
    if c.loss_fn == "decoupled" and c.old_logprobs == "recomputed":
        _refuse(
            'loss_fn="decoupled" with old_logprobs="recomputed"',
            'It needs the policy that sampled: set old_logprobs="sampler".',
        )


def _reference(c: TrainConfig) -> None:
    if c.kl_penalty_reference_step is not None and c.kl_ref_adapter_path is not None:
        _refuse(
            "two reference policies",
            "Set either kl_penalty_reference_step or kl_ref_adapter_path.",
        )
    if c.kl_penalty_coef and c.loss_fn in BY_CALL - {"gspo_token"}:
        if c.kl_penalty in ("advantage", "reward"):
            _refuse(
                f'kl_penalty="{c.kl_penalty}" with loss_fn="{c.loss_fn}"',
                "It gives each token an advantage of its own, and this loss has one a call: set "
                'loss_fn="gspo_token", or kl_penalty="k3".',
            )


def _refuse(what: str, fix: str) -> None:
    raise ConfigError(f"{what} makes no sense", fix=fix)
