"""Every knob, once, with its unit, default and meaning. Environment variables are read here,
by one function, at use and never at import.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, TypeAlias

from pydantic import BaseModel, ConfigDict, Field, model_validator

from art_core import algorithms
from art_core.algorithms import Aggregation, Baseline, Loss, Scale, Spread
from art_core.errors import ConfigError

LEAST_ROW = 16
"""The smallest `max_tokens_per_row`."""
_Decay: TypeAlias = Annotated[float, Field(ge=0.0, lt=1.0)]
_Steepness: TypeAlias = Annotated[float, Field(gt=0.0)]


class _Config(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


class SamplingConfig(_Config):
    """Sampling during training; it overrides what a graph's node asks for (evaluation keeps it)."""

    temperature: float = Field(1.0, ge=0.0, le=10.0)
    """0 is greedy: every rollout of a group would be the same."""
    top_p: float = Field(1.0, gt=0.0, le=1.0)
    top_k: int = Field(0, ge=0)
    min_p: float = Field(0.0, ge=0.0, lt=1.0)
    max_tokens: int | None = Field(None, ge=1)
    """Upper bound of sampled tokens a call, when the request names none."""


class LoraSettings(_Config):
    """The adapter that is trained."""

    rank: int = Field(8, ge=1, le=512)
    alpha: float = Field(16.0, gt=0.0)
    """The update is scaled by alpha / rank."""
    target_modules: Literal["all-linear"] | tuple[str, ...] = "all-linear"


class TrainConfig(_Config):
    """One reinforcement-learning step.

    `TrainConfig.preset("gspo", learning_rate=1e-5)` sets what a named algorithm sets; see
    `art_core.algorithms`, which also says which settings don't go together.
    """

    learning_rate: float = Field(5e-6, gt=0.0)
    trained_share_power: float = Field(0.0, ge=0.0)
    """The learning rate is multiplied by (trained / all trajectories of the step) ** this. Late in
    a run most groups are all equal; with 0, the few that are left move the policy as far as a
    whole step does, with 1 in proportion."""

    # From rewards to advantages (batch/advantages.py)

    baseline: Baseline = "group"
    """What a reward is compared with: the mean of its group, of the others in it (RLOO), of its
    group weighted by length (OPO), of the whole step (REINFORCE++), or a running mean that is kept
    from step to step (RAE)."""
    scale_rewards: Scale = "none"
    """What the difference is divided by: nothing (Dr. GRPO), the group's std (GRPO), that with
    n - 1 (TRL), the group's mean (MaxRL), the std of the step's rewards (REINFORCE++, Lite PPO), or
    of the step's differences (REINFORCE++-baseline). True and False mean "group" and "none"."""
    reward_parts: tuple[str, ...] = ()
    """Names of trajectory metrics that are the reward's parts. Each is normalised by itself within
    the group and their sum over the step (GDPO), instead of comparing `reward`."""
    call_rewards: Spread = "own"
    """Where rewards of single calls (`Trajectory.add_reward`) count: for the call itself, or also
    for the calls before it in the trajectory."""
    call_baseline: Literal["trajectory", "visit"] = "trajectory"
    """What a call is compared with: the group's trajectories, or the group's calls that were the
    n-th of the same node, like it."""
    equal_groups: Literal["skip", "keep"] = "skip"
    """Groups with nothing to learn from, all rewards equal: left out, or kept for the KL and the
    entropy; their tokens then count in the means."""
    zero_advantages: Literal["count", "leave_out"] = "count"
    """Calls with an advantage of exactly 0, in groups that differ: they count in the means, as the
    papers have it, or are left out, which computes less and makes the others' share bigger."""
    negative_weight: float = Field(1.0, ge=0.0)
    """What advantages below 0 are multiplied with. At 0 only what did better than its zero is
    learned, which suits a small model whose answers are mostly broken in many ways at first
    (RAFT++, arXiv:2504.11343); with `zero_advantages="leave_out"` the others then cost nothing.
    Entropy falls faster so: hold it up by `entropy_coef`."""
    overlong_limit: int | None = Field(None, ge=1)
    """Sampled tokens of a trajectory from which it gets a penalty of 1 (DAPO). None: no penalty."""
    overlong_buffer: int = Field(4096, ge=1)
    """Tokens before the limit in which the penalty rises from 0 to 1."""

    # The loss (training/loss.py)

    loss_fn: Loss = "ppo"
    """"ppo" is the clipped ratio of GRPO and DAPO; the others go by the names of their papers."""
    epsilon: float | None = Field(None, gt=0.0)
    """Lower bound: the ratio counts down to 1 - epsilon. None: what `loss_fn` is used with, see
    `algorithms.BOUNDS`; for "ppo" 0.2. (For "gmpo" a bound of the log-ratio, for "dppo" of the
    probability's change.)"""
    epsilon_high: float | None = Field(None, gt=0.0)
    """Upper bound: the ratio counts up to 1 + epsilon_high. None: as above; for "ppo" 0.28."""
    max_negative_advantage_importance_sampling_weight: float | None = Field(None, gt=1.0)
    """Largest ratio that counts where the advantage is negative ("ppo"; the two-sided clip)."""
    kimi_k2_tau: float | None = Field(None, gt=0.0)
    """Takes this times the log-ratio off each token's advantage (Kimi K2)."""
    sapo_tau: tuple[_Steepness, _Steepness] = (1.0, 1.05)
    """"sapo": steepness of the gate for positive and for other advantages."""
    vespo_shape: tuple[tuple[float, float], tuple[float, float]] = ((2.0, 3.0), (3.0, 2.0))
    """"vespo": (power, fall) for positive and for other advantages."""
    dppo_tau: float = Field(1e-3, ge=0.0)
    """"dppo": weight of the squared log-ratio."""
    off_policy_delta: float | None = Field(None, gt=0.0)
    """Calls with a negative advantage whose mean log-ratio fell by more than this are left out of
    the loss (DeepSeek-V3.2; begin with 0.5)."""
    entropy_coef: float = 0.0
    """Weight of the mean token entropy (nats), which is maximised."""
    entropy_target: float | None = Field(None, gt=0.0)
    """Nats a token that the entropy is held at: the weight begins at `entropy_coef`; each update
    raises it by `entropy_step` where the entropy is below, else lowers it, and above the target it
    does not act. None: it stays as it is. (Skywork-OR1 uses 0.2 and 0.005.)"""
    entropy_step: float = Field(0.005, gt=0.0)
    """See `entropy_target`."""
    entropy_top_share: float = Field(1.0, gt=0.0, le=1.0)
    """Share of a step's tokens, those of the highest entropy, that the policy loss looks at
    (arXiv:2506.01939 uses 0.2); the others count in the mean all the same."""
    observation_coef: float = Field(0.0, ge=0.0)
    """Weight of the mean cross-entropy (nats) of what the environment said to the calls that are
    trained: tools' results, the user's next message, as the template shows them. It learns from
    trajectories of any reward and computes next to nothing more (ECHO, arXiv:2605.24517). With
    `equal_groups="keep"`, from groups with nothing to compare too."""
    aggregation: Aggregation = "token"
    """What is averaged: tokens of the step, calls, or trajectories; or the sum over calls of
    `horizon` tokens (Dr. GRPO)."""
    horizon: int = Field(1024, ge=1)
    """"constant": tokens that every call is taken to have."""

    # The policy that sampled

    old_logprobs: Literal["sampler", "recomputed"] = "sampler"
    """What ratios are against: the logprobs that the sampler gave, or the trainer's own, computed
    once more before the first update."""
    mismatch: Literal["none", "truncate", "mask"] = "none"
    """With recomputed ones: the loss is weighted by exp(recomputed - sampler), at most
    `mismatch_high` (TIS), or 0 where it is out of its bounds (MIS, IcePop)."""
    mismatch_level: Literal["token", "sequence", "geometric"] = "token"
    """Of each token, of a call, or of a call's mean token."""
    mismatch_low: float = Field(0.0, ge=0.0, lt=1.0)
    """"mask": smallest weight that counts; IcePop and MIS use 0.5."""
    mismatch_high: float = Field(2.0, gt=1.0)
    """Largest; IcePop uses 5, for calls TRL 3."""

    # The reference policy

    kl_penalty_coef: float = Field(0.0, ge=0.0)
    """Weight of the KL to the reference. 0: the reference is never computed."""
    kl_penalty: Literal["advantage", "reward", "k2", "k3", "k3_weighted"] = "advantage"
    """How it counts: off each token's advantage, by how much it is above the step's mean (ART) or
    whole (RLHF); or in the loss, by estimator (training/kl.py)."""
    kl_penalty_reference_step: int | None = Field(None, ge=0)
    """Checkpoint of this model that is the reference. None: the base model, without the adapter; a
    run that began from a trained adapter is then at a distance from its first step on."""
    kl_ref_adapter_path: str | None = None
    """Folder of an adapter in peft's format that is the reference, instead of a step."""

    # The update

    max_grad_norm: float = Field(1.0, gt=0.0)
    adam_betas: tuple[_Decay, _Decay] = (0.9, 0.99)
    weight_decay: float = Field(0.0, ge=0.0)
    minibatches: int = Field(1, ge=1)
    """Optimizer steps a train call makes over its groups."""
    max_tokens_per_row: int = Field(4096, ge=LEAST_ROW)
    """Positions computed at once; bounds the memory of a step."""
    beyond_memory: Literal["refuse", "try"] = "refuse"
    """A step that by the estimate (`art-langgraph doctor` gives it too) can't fit in memory: it is
    refused before anything is computed, or tried all the same."""
    too_long: Literal["error", "drop", "cut"] = "error"
    """What becomes of a call with more positions than a row may have, or than the model can read:
    the step is refused; it is left out; or its sample is cut to what fits, and left out where
    nothing of it would be left. Both are counted ("misfit/too long", "misfit/cut")."""
    max_nonfinite_steps: int = Field(3, ge=1)
    """A step whose gradient is NaN or infinite is skipped; so many in a row are an error."""

    # What is trained

    max_staleness: int = Field(4, ge=0)
    """A call may be at most this many steps older than the policy being trained."""
    mask_truncated: bool = False
    """Leave out calls that hit their token limit."""
    unfit: Literal["refuse", "leave_out"] = "refuse"
    """A trajectory that can't be trained, of another model, too stale or without tokens: an error,
    or left out of its group, counted and told."""

    @model_validator(mode="before")
    @classmethod
    def _renamed(cls, given: Any) -> Any:
        return algorithms.known_names(given)

    @model_validator(mode="after")
    def _goes_together(self) -> TrainConfig:
        algorithms.check_together(self)
        return self

    @classmethod
    def preset(cls, name: str, **changes: Any) -> TrainConfig:
        """The settings of a named algorithm; `changes` win.

        Raises:
            ConfigError: the name is not in `algorithms.PRESETS`, or settings don't go together.
        """
        return cls(**{**algorithms.settings_of(name), **changes})

    @property
    def bounds(self) -> tuple[float, float]:
        """`epsilon` and `epsilon_high`, with the loss's own where they are None."""
        low, high = algorithms.BOUNDS.get(self.loss_fn, (0.0, 0.0))
        return (
            low if self.epsilon is None else self.epsilon,
            high if self.epsilon_high is None else self.epsilon_high,
        )


class TrainSFTConfig(_Config):
    """One call of supervised training."""

    learning_rate: float | tuple[float, ...] = 5e-5
    """Of every optimizer step, or one for each."""
    batch_size: int | Literal["auto"] = "auto"
    """Trajectories an optimizer step; "auto" is 2."""
    max_length: int | None = Field(None, ge=2)
    """Tokens of a prompt with its answer. None: what the base model can read."""
    too_long: Literal["drop", "cut"] = "drop"
    """What becomes of a trajectory that has a longer one: it is left out and counted, or its answer
    is cut there, without a token that ends it."""
    max_grad_norm: float = Field(1.0, gt=0.0)
    adam_betas: tuple[_Decay, _Decay] = (0.9, 0.99)
    weight_decay: float = Field(0.0, ge=0.0)
    max_tokens_per_row: int = Field(4096, ge=LEAST_ROW)
    """Positions computed at once, unless one answer alone needs more."""
    beyond_memory: Literal["refuse", "try"] = "refuse"
    """As in `TrainConfig`."""
    max_nonfinite_steps: int = Field(3, ge=1)
    """As in `TrainConfig`. A call that has one such optimizer step learns nothing."""

    @model_validator(mode="after")
    def _is_possible(self) -> TrainSFTConfig:
        rates = self.learning_rate
        each = rates if isinstance(rates, tuple) else (rates,)
        if not each or min(each) <= 0:
            raise ConfigError("learning_rate", got=rates, expected="one above 0, or a list of them")
        if self.batch_size != "auto" and self.batch_size < 1:
            raise ConfigError("batch_size", got=self.batch_size, expected='1 or more, or "auto"')
        return self

    @property
    def rows_per_step(self) -> int:
        """`batch_size` as a number."""
        return 2 if self.batch_size == "auto" else self.batch_size


class VllmConfig(_Config):
    """vLLM, where it serves; see `EngineConfig.kind`."""

    python: Path | None = None
    """Of an environment that has vLLM. None: the one that is found, see `art-langgraph setup`."""
    context_length: int | None = Field(None, ge=16)
    """Tokens of prompt and answer. None: what the base model was made for."""
    max_rank: int | None = Field(None, ge=1, le=512)
    """Largest rank of an adapter. None: that of the model that is registered first."""
    max_adapters: int = Field(4, ge=2)
    """Adapters that answer in one batch; calls of others wait. Each has a slot on the GPU."""
    kept_adapters: int = Field(8, ge=2)
    """Adapters kept loaded in the machine's memory; of those at rest the longest unasked goes."""
    gpu_share: float | None = Field(None, gt=0.0, le=1.0)
    """Of the GPU's memory. None: what the trainer's weights leave, or half of it if it stays."""
    while_training: Literal["auto", "sleep", "stay"] = "auto"
    """Whether it gives the GPU's memory back while a step is trained. "auto": unless half of what
    the trainer's weights leave is enough for it (its own weights and 8 GiB). On a CPU, and with
    `devices` of its own, it stays."""
    keyed_noise: bool | None = None
    """Calls that name no seed are sampled by one that a repeated rollout has again. None: on a CPU
    only. On a GPU vLLM draws for each such call in a kernel of its own, at each step, and what is
    drawn is still not the same for sure: in another batch logits are rounded otherwise. A rollout
    that is repeated after a crash is then a new sample of the policy, as good to learn from."""
    devices: str | None = None
    """CUDA_VISIBLE_DEVICES of vLLM, for GPUs of its own. None: this process's."""
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """Of the weights served. "auto": as they are on a GPU; float32 on a CPU, where it is twice as
    fast as bfloat16."""
    cpu_cache_gb: int = Field(1, ge=1)
    """Keys and values kept where there is no GPU, in 2**30 bytes."""
    extra_args: tuple[str, ...] = ()
    """Further flags, as on vLLM's command line."""
    environment: tuple[tuple[str, str], ...] = ()
    """Further variables of its environment."""


class EngineConfig(_Config):
    """What answers calls."""

    kind: Literal["auto", "embedded", "vllm"] = "auto"
    """"embedded" samples from the very module that is trained, "vllm" starts vLLM beside it.
    "auto": vLLM where there are a GPU and an environment with vLLM, else embedded."""
    vllm: VllmConfig = VllmConfig()

    # How answers are read, whatever samples them

    tool_parser: str = "auto"
    """The form of the base model's calls of tools, by the name that vLLM's parser of it has
    ("hermes", "llama3_json", "mistral", ...). "auto": as its chat template writes them. "none":
    calls can't be read, and requests with tools are refused."""
    reasoning_parser: str = "auto"
    """The form of thoughts before an answer ("qwen3", "deepseek_r1", ...). "auto": as the chat
    template has it. "none": thoughts stay in the text."""

    # The embedded engine

    max_batch: int = Field(128, ge=1)
    """Sequences decoded side by side."""
    max_row_tokens: int = Field(4096, ge=1)
    """Positions of prompt computed in one forward pass."""
    cache_tokens: int = Field(40_000, ge=0)
    """Positions of keys and values kept for prompts to come, over all adapters."""
    gather_ms: float = Field(4.0, ge=0.0)
    """An idle engine waits this long after the last arrival before it starts, to fill the batch."""
    threads: int | None = None
    """CPU threads; None means one a core."""


Layers: TypeAlias = Literal["own", "unsloth"]
"""Whose layers compute a step on a GPU; see `TrainerConfig.layers`."""


class TrainerConfig(_Config):
    """What a step is computed with, as long as a run lives; it needs a GPU where it differs from
    what is set here."""

    load_in_4bit: bool = False
    """The linear layers of the base model in 4 bits (NF4) while it is trained: QLoRA, a quarter of
    the memory. vLLM goes on serving the weights in 16 bits, so that sampler and trainer differ a
    little: `TrainConfig(old_logprobs="recomputed")` keeps that out of the ratios."""
    layers: Layers = "own"
    """"own": this package's kernels. "unsloth": Unsloth's for LoRA and the feed-forward part, with
    this package's attention, since Unsloth's own takes no trees. On an H200 "own" is the faster
    (benchmarks/RESULTS.md), so it is not chosen by itself where Unsloth is installed."""
    optimizer: Literal["adamw", "adamw_8bit"] = "adamw"
    """"adamw_8bit": moments in 8 bits, by bitsandbytes; a quarter of their memory."""


class ModelConfig(_Config):
    """How a `TrainableModel` is sampled, adapted and trained."""

    sampling: SamplingConfig = SamplingConfig()
    lora: LoraSettings = LoraSettings()
    engine: EngineConfig = EngineConfig()
    trainer: TrainerConfig = TrainerConfig()
    seed: int = 0
    """Seeds the adapter's initial weights and the sampling noise."""

    @model_validator(mode="after")
    def _explores(self) -> ModelConfig:
        if self.sampling.temperature == 0.0:
            raise ConfigError(
                "sampling in training is greedy",
                got=0.0,
                expected="temperature > 0, else every rollout of a group is the same",
                fix="Set SamplingConfig(temperature=1.0); evaluation may be greedy.",
            )
        return self


@dataclass(frozen=True)
class Environment:
    """What the environment says, read at use."""

    base_url: str | None
    """ART_BASE_URL: OpenAI-compatible endpoint that `ChatArt` uses outside a rollout."""
    model: str | None
    """ART_MODEL: served name there, e.g. "agent-001@12"."""
    api_key: str | None
    """ART_API_KEY."""
    server_url: str | None
    """ART_SERVER_URL: of a server that commands train on, instead of this machine."""
    home: Path | None
    """ART_HOME: where base models and vLLM are kept; None means the user's cache folder."""
    vllm_python: Path | None
    """ART_VLLM_PYTHON: the Python that has vLLM, or its environment's folder; None means that one
    is looked for (see `art_core.engine.runtime`)."""
    ci: bool
    """CI: output is kept as a log, so nothing is drawn over."""


def environment() -> Environment:
    """Read the environment now."""
    home = os.environ.get("ART_HOME")
    vllm_python = os.environ.get("ART_VLLM_PYTHON")
    return Environment(
        base_url=os.environ.get("ART_BASE_URL") or None,
        model=os.environ.get("ART_MODEL") or None,
        api_key=os.environ.get("ART_API_KEY") or None,
        server_url=os.environ.get("ART_SERVER_URL") or None,
        home=Path(home) if home else None,
        vllm_python=Path(vllm_python) if vllm_python else None,
        ci=os.environ.get("CI", "").lower() not in ("", "0", "false"),
    )
