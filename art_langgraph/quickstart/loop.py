"""The loop that trains the shop's agent: what you would write for an agent of your own.

In: a registered model, the agent, its customers. Out: a better model, step by step, each step a
checkpoint. Left out: what is shown (the command), and what is kept to go on (journal.py).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import art_core as art
from art_core.runlog import summarize
from art_langgraph import rollout
from art_langgraph.quickstart.clientele import Clientele
from art_langgraph.quickstart.customers import Customer, judge, succeeded, total
from art_langgraph.quickstart.finish import finish
from art_langgraph.quickstart.lessons import lesson
from art_langgraph.quickstart.recipe import Recipe
from art_langgraph.quickstart.score import Score, score
from art_langgraph.quickstart.shop import EXAMPLES, Shop

MAX_FAILED = 0.5
"""Share of a gather's rollouts that may fail by no fault of the policy."""
OnStep = Callable[[int, Mapping[str, float], art.TrainResult], None]
"""Called after each step with its number, counted from 1, the mean figures of its rollouts, and
what was learned of them."""
OnCheck = Callable[[Score], None]
"""Called after each check."""


@dataclass(frozen=True)
class Desk:
    """The agent at work."""

    agent: Any
    model: art.TrainableModel
    recipe: Recipe
    progress: bool
    """Draw bars."""

    async def serve(self, customer: Customer, *, evaluation: bool = False) -> art.Trajectory:
        """One rollout: the graph plays, then its last state is judged."""
        trajectory = await rollout(
            self.agent,
            {"messages": [*EXAMPLES, ("user", customer.message)]},
            model=self.model,
            config={"recursion_limit": self.recipe.recursion_limit},
            evaluation=evaluation,  # keeps the agent's temperature=0; training explores
            metadata={"customer": customer.id, "tool": customer.tool},
        )
        parts = judge(customer, trajectory.state)
        right = succeeded(parts)
        trajectory.reward = total(parts)
        trajectory.metrics |= {**parts, "success": right, f"success/{customer.tool}": right}
        return trajectory

    async def examine(self, customers: Sequence[Customer], what: str) -> list[art.TrajectoryGroup]:
        """Serve each customer once, greedily."""
        return await art.gather_trajectory_groups(
            [art.TrajectoryGroup([self.serve(c, evaluation=True)]) for c in customers],
            pbar_desc=what,
            max_exceptions=MAX_FAILED,
            progress=self.progress,
        )

    async def check(self, customers: Sequence[Customer]) -> Score:
        """Examine on the customers by whom it is decided to stop; logged as split "val"."""
        groups = await self.examine(customers, "check")
        await self.model.log(groups, split="val")
        return score(customers, groups, await self.model.get_step())


async def warm_up(desk: Desk, customers: Sequence[Customer], shop: Shop) -> art.TrainResult:
    """One supervised step on the labelled examples, all of them at once."""
    rows = [lesson(customer, shop) for customer in customers]
    rate = desk.recipe.lesson_rate
    config = art.TrainSFTConfig(learning_rate=rate, batch_size=len(rows))
    return await finish(desk.model.train_sft(rows, config))


async def learn(desk: Desk, clientele: Clientele, on_step: OnStep, on_check: OnCheck) -> str:
    """Train until the checks are served right, or for `max_steps`; say which it was.

    Started again after whatever end, it goes on from the last whole step.
    """
    model, recipe = desk.model, desk.recipe
    checked = 0  # the last step whose policy was
    for step in range(await model.get_step() - recipe.warm_up_steps, recipe.max_steps):
        began = time.monotonic()
        groups = await art.gather_trajectory_groups(
            (
                art.TrajectoryGroup(desk.serve(customer) for _ in range(recipe.group_size))
                for customer in clientele.of_step(step, recipe.groups)
            ),
            pbar_desc=f"step {step + 1}",
            max_exceptions=MAX_FAILED,
            progress=desk.progress,
            key=f"step-{step}",
        )
        played = {"gather_seconds": time.monotonic() - began}
        result = await finish(model.train(groups, recipe.train_config(step)))
        await model.log(split="train", metrics=played, step=result.step - result.trained)
        figures = summarize(groups) | played
        on_step(step + 1, figures, result)

        if figures["reward"] >= recipe.stop_reward and result.step > checked:
            checked = result.step
            found = await desk.check(clientele.checks)
            on_check(found)
            if is_enough(found, recipe):
                return "learned"
    return "max_steps"


def is_enough(found: Score, recipe: Recipe) -> bool:
    """True if these checks speak for stopping."""
    return found.success >= recipe.stop_success and found.weakest >= recipe.stop_tool_success
