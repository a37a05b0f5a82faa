"""One real training step on calls of the user's graph: learned, saved, loaded again, served.

In: a graph, a scenario, and a base model small enough for it. Out: findings. The rewards are made
up, so it shows that the plumbing holds for this graph, and nothing of what a model can learn.
"""

from __future__ import annotations

from pathlib import Path
from typing import cast

from langchain_core.runnables import RunnableConfig

import art_core as art
from art_core.errors import ARTError
from art_core.plural import plural
from art_langgraph.rehearsal.finding import Finding
from art_langgraph.rehearsal.scenarios import Scenario
from art_langgraph.rollouts import rollout
from art_langgraph.sources import GraphSource

CHECK = "checkpoint"
_ROLLOUTS = 3
_RECURSION_LIMIT = 12
"""Supersteps: noise has no reason to stop."""


async def practise(
    source: GraphSource, scenario: Scenario, base_model: Path, runs: Path, *, timeout: float
) -> Finding:
    """Play a group with the base model, train a step, and take it up again.

    Args:
        source: the graph.
        scenario: what is played.
        base_model: its folder.
        runs: where the run folder is made; it should be empty.
        timeout: seconds a rollout may take.
    """
    try:
        trained, tokens, skipped = await _learn(source, scenario, base_model, runs, timeout)
        if not trained:
            return _nothing(skipped)
        answered = await _resume(base_model, runs)
    except Exception as error:  # noqa: BLE001  # whatever torch raises: the other checks are told
        known = error if isinstance(error, ARTError) else None
        what = known.what if known else f"{type(error).__name__}: {error}"
        return Finding(
            CHECK,
            "fail",
            f"a training step on the graph's calls failed: {what}",
            known.fix if known else "Leave it out by --no-train.",
        )
    if answered != 1:
        return Finding(CHECK, "fail", f"after the restart step {answered} answered, not step 1")
    return Finding(
        CHECK,
        "pass",
        f"a random tiny model learned a step from {plural(tokens, 'token')} that it sampled in "
        "this graph (made-up rewards); the checkpoint was saved, loaded again, and answered",
    )


async def _learn(
    source: GraphSource, scenario: Scenario, base_model: Path, runs: Path, timeout: float
) -> tuple[bool, int, str]:
    """(True if a step was learned, tokens of it, else why not)."""
    model = _model(base_model, runs)

    async def play(number: int) -> art.Trajectory:
        config = {"recursion_limit": _RECURSION_LIMIT, **scenario.config}
        trajectory = await rollout(
            source,
            scenario.input,
            model=model,
            config=cast(RunnableConfig, config),
            context=scenario.context,
            timeout=timeout,
        )
        trajectory.reward = float(number)  # made up: the step needs something to compare
        return trajectory

    async with art.LocalBackend(show_progress=False) as backend:
        await model.register(backend)
        group = art.TrajectoryGroup(play(number) for number in range(_ROLLOUTS))
        groups = await art.gather_trajectory_groups([group], progress=False)
        config = art.TrainConfig(
            learning_rate=1e-3, max_tokens_per_row=32_768, max_nonfinite_steps=1
        )
        result = await model.train(groups, config=config)
    tokens = sum(t.completion_tokens for t in groups[0])
    return result.trained, tokens, "; ".join(result.reasons)


async def _resume(base_model: Path, runs: Path) -> int | None:
    """The step that answers after everything was closed and opened again."""
    model = _model(base_model, runs)
    async with art.LocalBackend(show_progress=False) as backend:
        await model.register(backend)
        await model.openai_client().chat.completions.create(
            model=f"{model.name}@1", messages=[{"role": "user", "content": "Hi"}], max_tokens=4
        )
        return await model.get_step()


def _model(base_model: Path, runs: Path) -> art.TrainableModel[None]:
    return art.TrainableModel(
        name="rehearsal",
        project="rehearsal",
        base_model=str(base_model),
        base_path=str(runs),
        art_config=art.ModelConfig(
            lora=art.LoraSettings(rank=2, alpha=4.0), sampling=art.SamplingConfig(max_tokens=32)
        ),
    )


def _nothing(skipped: str) -> Finding:
    return Finding(
        CHECK,
        "skipped",
        f"no step could be tried, for the rollouts of a random tiny model left nothing: {skipped}",
        "Mend what else is failing first.",
    )
