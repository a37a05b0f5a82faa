"""What a run of the comparison of algorithms is, and how and where it is played.

In: a command line's JSON. Out: frozen records, and the settings that follow from them.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, TypeAlias

import art_core as art
from art_core.config import ModelConfig, SamplingConfig
from art_langgraph.quickstart.recipe import Recipe
from benchmarks import tool_task
from benchmarks.contenders import at_rate, contenders

Task: TypeAlias = Literal["tool", "quickstart"]
NAME, PROJECT = "agent", "algorithms"


@dataclass(frozen=True)
class Run:
    """What is played."""

    task: Task
    contender: str
    rate: float
    """Factor of the quickstart's learning rate."""
    seed: int

    @property
    def id(self) -> str:
        """Names its folder and its lines."""
        return f"{self.task}-{self.contender}-x{self.rate:g}-s{self.seed}"


@dataclass(frozen=True)
class Plan:
    """How and where."""

    run: Run
    out: str
    """Folder of `steps.jsonl` and `results.jsonl`."""
    runs: str
    """Folder of the runs' own folders."""
    model: str
    seconds: float
    """That learning may take, over all starts; then it is examined as it is."""
    until: float | None
    """`time.time()` at which it stops for this time, to go on at the next start."""
    steps: int | None
    """At most; None: the task's own number."""
    quick: bool

    @classmethod
    def from_json(cls, text: str) -> Plan:
        """Of `dataclasses.asdict`."""
        kept = json.loads(text)
        return cls(**{**kept, "run": Run(**kept["run"])})

    def recipe(self) -> Recipe:
        """The quickstart's, with the contender's settings, which hold from the first step on: to
        weigh what did worse less at first is the quickstart's own way alone."""
        bare = Recipe(seed=self.run.seed, base_model=self.model)
        train = at_rate(contenders(bare.train)[self.run.contender], self.run.rate)
        own = self.run.contender == "own"
        early = bare.steady_negative_weight if own else train.negative_weight
        recipe = replace(bare, train=train, steady_negative_weight=early)
        recipe = recipe.quick() if self.quick else recipe
        return replace(recipe, max_steps=self.steps or recipe.max_steps)

    @property
    def planned(self) -> int:
        """Steps, unless the run stops before."""
        if self.run.task == "quickstart":
            return self.recipe().max_steps
        return self.steps or tool_task.STEPS

    def trainable(self) -> art.TrainableModel[Any]:
        """Not registered. All runs' models have one name, so that their noise is the same, each in
        a folder of its own."""
        recipe = self.recipe()
        settings = recipe.model_config()
        if self.run.task == "tool":
            sampling = SamplingConfig(temperature=recipe.sampling.temperature)
            settings = ModelConfig(sampling=sampling, lora=recipe.lora, seed=self.run.seed)
        return art.TrainableModel(
            name=NAME,
            project=PROJECT,
            base_model=self.model,
            base_path=str(Path(self.runs) / self.run.id),
            art_config=settings,
        )
