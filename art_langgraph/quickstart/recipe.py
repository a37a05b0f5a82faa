"""The quickstart's numbers, in one place: who is served, how it learns, when it has learned.

In: a seed, and what the command's options change. Out: one frozen record. A run goes on only with
the recipe it began with, so that its figures before and after can be compared.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

from art_core.config import LoraSettings, ModelConfig, SamplingConfig, TrainConfig
from art_langgraph.quickstart.customers import PARTS


@dataclass(frozen=True)
class Recipe:
    """How the shop's agent is trained and examined."""

    seed: int = 0
    """Makes the shop, its customers, the adapter's first weights and the sampling noise."""
    base_model: str = "SmolLM2-135M-Instruct"
    graph: str = "agent"
    """"agent": LangChain's `create_agent`; "stategraph": the same by hand."""

    lessons: int = 9
    """Customers whose conversations are given whole, as labelled examples: the warm-up is one
    supervised step on them. Without it two of the three tools are hardly ever sampled at first."""
    lesson_rate: float = 3e-4
    """Learning rate of the warm-up."""

    groups: int = 6
    """Customers a step."""
    group_size: int = 8
    """Rollouts of each customer."""
    max_steps: int = 24
    customers: int = 180
    """Customers to train on, taken in turn."""
    held_out: int = 36
    """Customers who are served before and after, and never else: other wordings, other orders."""
    checks: int = 24
    """Customers by whom it is decided to stop, in wordings that no other customer uses."""

    stop_reward: float = 0.9
    """From this mean reward of a step on, the policy that it made is checked."""
    stop_success: float = 0.95
    """Share of the checks that must be right to stop."""
    stop_tool_success: float = 0.8
    """Share of each tool's checks that must be right to stop."""
    steady_steps: int = 5
    """Steps at the full learning rate, before it falls."""
    steady_negative_weight: float = 0.0
    """`negative_weight` in them; later it is that of `train`. At 0 they learn from what did better
    than its group alone."""
    rate_decay: float = 0.93
    """After them each step's learning rate is this share of the one before."""

    max_tokens: int = 48
    """Sampled tokens of one call, at most."""
    recursion_limit: int = 4
    """Supersteps of the graph; one call of a tool takes three, and the fourth ends it."""
    minutes: int = 4
    """About how long it takes on two cores, download apart."""

    train: TrainConfig = field(
        default_factory=lambda: TrainConfig(
            learning_rate=8e-4,
            trained_share_power=1.0,
            scale_rewards="group",
            zero_advantages="leave_out",
            entropy_coef=0.02,
            minibatches=2,
            max_tokens_per_row=8192,
        )
    )
    lora: LoraSettings = field(default_factory=LoraSettings)
    sampling: SamplingConfig = field(default_factory=lambda: SamplingConfig(temperature=0.6))
    """At 1.0 two of three rollouts of so small a model are no calls at all, at first."""

    @property
    def warm_up_steps(self) -> int:
        """Steps of the model that are none of reinforcement learning."""
        return 1 if self.lessons else 0

    def quick(self) -> Recipe:
        """The same in a minute or so: shows that every part works, and teaches nothing."""
        gentle = self.train.learning_rate / 20  # so few rollouts would lead it astray
        return replace(
            self,
            lessons=3,
            groups=3,
            group_size=4,
            max_steps=2,
            customers=6,
            held_out=3,
            checks=3,
            minutes=1,
            train=self.train.model_copy(update={"learning_rate": gentle}),
        )

    def train_config(self, step: int) -> TrainConfig:
        """How step `step`, counted from 0, is trained.

        A falling rate keeps what was learned: at a constant one the reward dips again once most
        groups are all right, since the few that are left then move the policy alone. While most
        rollouts fail, each in a way of its own, what failed says little and costs most of a step;
        once most are right it is the other way round.
        """
        late = max(0, step + 1 - self.steady_steps)
        rate = self.train.learning_rate * self.rate_decay**late
        weight = self.train.negative_weight if late else self.steady_negative_weight
        return self.train.model_copy(update={"learning_rate": rate, "negative_weight": weight})

    def model_config(self) -> ModelConfig:
        """How the model is sampled and adapted."""
        return ModelConfig(sampling=self.sampling, lora=self.lora, seed=self.seed)

    def settings(self) -> dict[str, Any]:
        """What must stay the same in a run, ready for JSON; the reward's parts are of it."""
        plain = {k: v for k, v in vars(self).items() if k not in ("max_steps", "minutes")}
        return {
            **plain,
            "train": self.train.model_dump(mode="json"),
            "lora": self.lora.model_dump(mode="json"),
            "sampling": self.sampling.model_dump(mode="json"),
            "reward_parts": dict(PARTS),
        }
