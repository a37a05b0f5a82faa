"""Every knob, once, with its unit, default and meaning. Environment variables are read here,
by one function, at use and never at import.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from art_core.errors import ConfigError


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
    """One reinforcement-learning step."""

    learning_rate: float = Field(5e-6, gt=0.0)
    trained_share_power: float = Field(0.0, ge=0.0)
    """The learning rate is multiplied by (trained / all trajectories of the step) ** this. Late in
    a run most groups are all equal; with 0, the few that are left move the policy as far as a
    whole step does, with 1 in proportion."""
    scale_rewards: Literal["none", "group"] = "none"
    """Advantages are reward minus the group's mean; "group" divides them by its std (GRPO)."""
    epsilon: float = Field(0.2, gt=0.0)
    """Lower clip: the ratio counts down to 1 - epsilon."""
    epsilon_high: float = Field(0.28, gt=0.0)
    """Upper clip: the ratio counts up to 1 + epsilon_high."""
    entropy_coef: float = 0.0
    """Weight of the mean token entropy (nats), which is maximised."""
    aggregation: Literal["token", "sequence", "rollout"] = "token"
    """What is averaged: tokens of the step, calls, or trajectories."""
    max_grad_norm: float = Field(1.0, gt=0.0)
    adam_betas: tuple[float, float] = (0.9, 0.99)
    weight_decay: float = Field(0.0, ge=0.0)
    minibatches: int = Field(1, ge=1)
    """Optimizer steps a train call makes over its groups."""
    max_tokens_per_row: int = Field(4096, ge=16)
    """Positions computed at once; bounds the memory of a step."""
    max_staleness: int = Field(4, ge=0)
    """A call may be at most this many steps older than the policy being trained."""
    mask_truncated: bool = False
    """Leave out calls that hit their token limit."""


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
    adam_betas: tuple[float, float] = (0.9, 0.99)
    weight_decay: float = Field(0.0, ge=0.0)
    max_tokens_per_row: int = Field(4096, ge=16)
    """Positions computed at once, unless one answer alone needs more."""

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


class EngineConfig(_Config):
    """The embedded engine."""

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


class ModelConfig(_Config):
    """How a `TrainableModel` is sampled and adapted."""

    sampling: SamplingConfig = SamplingConfig()
    lora: LoraSettings = LoraSettings()
    engine: EngineConfig = EngineConfig()
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
    home: Path | None
    """ART_HOME: where downloaded base models are kept; None means the user's cache folder."""
    ci: bool
    """CI: output is kept as a log, so nothing is drawn over."""


def environment() -> Environment:
    """Read the environment now."""
    home = os.environ.get("ART_HOME")
    return Environment(
        base_url=os.environ.get("ART_BASE_URL") or None,
        model=os.environ.get("ART_MODEL") or None,
        api_key=os.environ.get("ART_API_KEY") or None,
        home=Path(home) if home else None,
        ci=os.environ.get("CI", "").lower() not in ("", "0", "false"),
    )
