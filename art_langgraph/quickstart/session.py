"""A whole quickstart: a warm-up, the held-out customers before, the training, the same after.

In: a model and its backend, a recipe, the journal of the run. Out: the journal filled in; started
again after whatever end, it does what is missing. Left out: what is shown, which a `Watcher` is
told as it happens.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

import art_core as art
from art_langgraph import ChatArt
from art_langgraph.quickstart.clientele import Clientele, make_clientele
from art_langgraph.quickstart.journal import Journal
from art_langgraph.quickstart.loop import Desk, learn, warm_up
from art_langgraph.quickstart.recipe import Recipe
from art_langgraph.quickstart.score import Score, score
from art_langgraph.quickstart.shop import Shop, support_agent, support_graph

BUILD = {"agent": support_agent, "stategraph": support_graph}
"""The ways to build the agent, by name."""


class Watcher(Protocol):
    """Whom a session tells what happens."""

    @property
    def bars(self) -> bool:
        """Draw progress bars."""

    def warmed_up(self, result: art.TrainResult, seconds: float) -> None:
        """The supervised step on the labelled examples is through."""

    def first(self, group: art.TrajectoryGroup) -> None:
        """The very first customer was served, before any reinforcement learning."""

    def examined(self, when: str, score: Score, groups: Sequence[art.TrajectoryGroup]) -> None:
        """The held-out customers were served; `when` is "before" or "after"."""

    def step(self, number: int, figures: Mapping[str, float], result: art.TrainResult) -> None:
        """Step `number`, counted from 1, is through."""

    def checked(self, score: Score) -> None:
        """It was looked whether it has learned enough."""


async def run_session(
    model: art.TrainableModel,
    backend: art.Backend,
    recipe: Recipe,
    journal: Journal,
    watcher: Watcher,
    *,
    began: float | None = None,
) -> None:
    """Do what is missing of the run.

    Args:
        model: not registered yet.
        backend: stays open.
        recipe: of the run.
        journal: of the run.
        watcher: is told.
        began: `time.monotonic()` when loading began; None means now.

    Raises:
        GatherError: more than half of some rollouts failed by no fault of the policy.
        ARTError: as `TrainableModel.register` and `train`.
    """
    with journal.phase("load", began=began):
        await model.register(backend)
    clientele = make_clientele(recipe)
    shop = Shop(clientele.orders)
    try:
        agent = BUILD[recipe.graph](ChatArt(temperature=0, max_tokens=recipe.max_tokens), shop)
        desk = Desk(agent, model, recipe, progress=watcher.bars)
        if recipe.warm_up_steps and await model.get_step() == 0:
            with journal.phase("warm_up"):
                warmed = await warm_up(desk, clientele.lessons, shop)
            watcher.warmed_up(warmed, journal.phases["warm_up"])
        if journal.before is None:
            with journal.phase("before"):
                journal.before = await _first_look(desk, clientele, journal, watcher)
        if journal.stopped is None:
            with journal.phase("learn"):
                journal.stopped = await _learn(desk, clientele, journal, watcher)
        if journal.after is None:
            with journal.phase("after"):
                groups = await desk.examine(clientele.held_out, "held-out after")
                journal.after = await _logged(desk, clientele, groups)
                watcher.examined("after", journal.after, groups)
    finally:
        shop.close()


async def _first_look(
    desk: Desk, clientele: Clientele, journal: Journal, watcher: Watcher
) -> Score:
    """The held-out customers before training; the first of them alone, to have something to see."""
    first = await desk.examine(clientele.held_out[:1], "first customer")
    journal.note_first_reward()
    watcher.first(first[0])
    others = await desk.examine(clientele.held_out[1:], "held-out before")
    groups = [*first, *others]
    before = await _logged(desk, clientele, groups)
    watcher.examined("before", before, groups)
    return before


async def _learn(desk: Desk, clientele: Clientele, journal: Journal, watcher: Watcher) -> str:
    def on_step(number: int, figures: Mapping[str, float], result: art.TrainResult) -> None:
        journal.save()
        watcher.step(number, figures, result)

    return await learn(desk, clientele, on_step, watcher.checked)


async def _logged(desk: Desk, clientele: Clientele, groups: list[art.TrajectoryGroup]) -> Score:
    """Keep an evaluation of the held-out customers as split "test"."""
    await desk.model.log(groups, split="test")
    return score(clientele.held_out, groups, await desk.model.get_step())
