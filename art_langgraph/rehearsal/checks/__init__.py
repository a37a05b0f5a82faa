"""The checks of a rehearsal, in the order in which they are shown.

In: a `Rehearsal`. Out: findings. A check is a pure function; one that has nothing to say of a graph
says nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from art_core.finding import Finding
from art_langgraph.rehearsal.checks.ending import check_ending, check_interrupts, check_limits
from art_langgraph.rehearsal.checks.history import check_history
from art_langgraph.rehearsal.checks.length import check_length
from art_langgraph.rehearsal.checks.models import check_models
from art_langgraph.rehearsal.checks.recording import check_recording, check_streams, check_tokens
from art_langgraph.rehearsal.checks.rewards import check_rewards
from art_langgraph.rehearsal.checks.sampling import check_caches, check_sampling
from art_langgraph.rehearsal.checks.state import check_state
from art_langgraph.rehearsal.checks.tools import check_tools
from art_langgraph.rehearsal.played import Rehearsal

CHECKS: tuple[Callable[[Rehearsal], Iterator[Finding]], ...] = (
    check_ending,
    check_models,
    check_recording,
    check_tokens,
    check_history,
    check_streams,
    check_tools,
    check_sampling,
    check_caches,
    check_state,
    check_limits,
    check_interrupts,
    check_length,
    check_rewards,
)


def check(rehearsal: Rehearsal) -> list[Finding]:
    """Everything that the checks say."""
    return [finding for one in CHECKS for finding in one(rehearsal)]
