"""Plays graphs on a scripted stage and gives the findings, by check."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from art_core.finding import Finding
from art_langgraph.rehearsal.checks import check
from art_langgraph.rehearsal.perform import Player, perform
from art_langgraph.rehearsal.played import Rehearsal
from art_langgraph.rehearsal.scenarios import Scenario
from art_langgraph.rehearsal.stage import ScriptedStage

HELLO = Scenario({"messages": [{"role": "user", "content": "Where is order 10437?"}]})


async def rehearse(graph: Any, *scenarios: Scenario, **settings: Any) -> Rehearsal:
    """Play `graph`; without scenarios, one is made up."""
    with ScriptedStage() as stage:
        await stage.prepare()
        player = Player("scripted", stage.target(), stage.records)
        return await perform(graph, player, scenarios or None, **settings)


async def findings(graph: Any, *scenarios: Scenario, **settings: Any) -> list[Finding]:
    """What the checks say of `graph`."""
    return check(await rehearse(graph, *scenarios, **settings))


def of(found: Sequence[Finding], name: str) -> list[Finding]:
    """The findings of one check."""
    return [finding for finding in found if finding.check == name]


def statuses(found: Sequence[Finding], name: str) -> list[str]:
    """The statuses of one check's findings."""
    return [finding.status for finding in of(found, name)]


@contextmanager
def setting(put: Callable[[Any], None], value: Any, back: Any) -> Iterator[None]:
    """A global setting for the time of the context."""
    put(value)
    try:
        yield
    finally:
        put(back)
