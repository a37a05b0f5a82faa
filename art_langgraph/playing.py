"""One graph run, from its input to its end: interrupts answered, the last state always kept.

In: an open runnable and a `Part`. Out: the trajectory's `state`, and how it `ended` unless an
exception says more. It leaves out the scope around (`rollout`) and whose fault an end is.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from langchain_core.runnables import Runnable, RunnableConfig
from langgraph.pregel import Pregel
from langgraph.pregel.protocol import PregelProtocol
from langgraph.types import Command, Interrupt

from art_core.errors import ConfigError
from art_core.time_limit import Waiting
from art_core.trajectories import Trajectory
from art_langgraph.hooks import run_hook

OnInterrupt: TypeAlias = Callable[[Sequence[Interrupt]], Any | Awaitable[Any]]
"""Answers what a graph asks: given the open interrupts it returns the resume value of the only one;
for several a dict of values by interrupt id; or a `Command`."""

_INTERRUPT = "__interrupt__"
_FIX = "Compile it with one, or give rollout(..., checkpointer=InMemorySaver)."


class NotPlayable(ConfigError):
    """The graph can't be played with these arguments; nothing was run."""


@dataclass(frozen=True)
class Part:
    """What a graph plays in a rollout."""

    input: Any
    config: RunnableConfig
    context: Any
    on_interrupt: OnInterrupt | None
    max_interrupts: int
    """How often `on_interrupt` is asked."""
    timeout: float | None
    """Seconds that an answer of `on_interrupt` may take."""
    asking: Waiting
    """Time in which `on_interrupt` is waited for: the policy has no part in it."""
    store: Any
    """A store, or a factory of one; None keeps the graph's own."""
    checkpointer: Any
    """As `store`."""
    continues: bool
    """The thread in `config` must be known already."""


async def play(graph: Runnable[Any, Any], part: Part, trajectory: Trajectory) -> None:
    """Run to the end; the trajectory has the last state at every moment.

    Raises:
        NotPlayable: the graph lacks what the part needs.
        HookFailed: `on_interrupt` raised, or took too long.
    """
    runnable = _equipped(graph, part)
    await _check(runnable, part)
    trajectory.ended, trajectory.exception = "completed", None
    given: dict[str, Any] = {} if part.context is None else {"context": part.context}
    if not isinstance(runnable, PregelProtocol):
        trajectory.state = await runnable.ainvoke(part.input, part.config, **given)
        if isinstance(trajectory.state, dict) and _INTERRUPT in trajectory.state:
            trajectory.ended = "interrupted"  # of a graph inside
        return
    following = part.input
    for asked in range(part.max_interrupts + 1):
        interrupts = await _run(runnable, following, part.config, given, trajectory)
        if not interrupts:
            stopped = await _stopped_before(runnable, part.config)
            trajectory.ended = "interrupted" if stopped else "completed"
            if stopped:
                trajectory.log(
                    f"the graph was compiled to stop before {', '.join(stopped)}, and did; go on "
                    "with rollout(graph, None, continue_=trajectory)"
                )
            return
        if part.on_interrupt is None:
            trajectory.log(
                f"the graph stopped at {_values(interrupts)}; answer it by on_interrupt=, or go on "
                "with rollout(graph, Command(resume=...), continue_=trajectory)"
            )
            return
        if asked < part.max_interrupts:
            with part.asking.on():
                following = await _answer(part.on_interrupt, interrupts, part.timeout)
    trajectory.log(f"the graph asked again after {part.max_interrupts} interrupts were answered")


async def _run(
    runnable: PregelProtocol[Any, Any, Any, Any],
    input: Any,
    config: RunnableConfig,
    given: Mapping[str, Any],
    trajectory: Trajectory,
) -> list[Interrupt]:
    """Run until the end or until the graph waits; the interrupts that it then waits for.

    Parallel nodes tell of their interrupts one by one, and states that come later tell of none; the
    last state holds all of them.
    """
    interrupts: list[Interrupt] = []
    async for state in runnable.astream(input, config, stream_mode="values", **given):
        known = state if isinstance(state, dict) else {}  # another state is left out, as by ainvoke
        if _INTERRUPT in known:
            interrupts += [i for i in known[_INTERRUPT] if i not in interrupts]
            trajectory.ended = "interrupted"
        trajectory.state = {**known, _INTERRUPT: tuple(interrupts)} if interrupts else state
    return interrupts


async def _stopped_before(
    runnable: PregelProtocol[Any, Any, Any, Any], config: RunnableConfig
) -> tuple[str, ...]:
    """The nodes that were to run next where `compile(interrupt_before=...)` or `interrupt_after`
    ended the run; the states that are streamed don't tell of it.
    """
    stops = (getattr(runnable, f"interrupt_{when}_nodes", ()) for when in ("before", "after"))
    return (await runnable.aget_state(config)).next if any(stops) else ()


async def _answer(
    on_interrupt: OnInterrupt, interrupts: Sequence[Interrupt], timeout: float | None
) -> Command[Any]:
    answer = await run_hook("on_interrupt", on_interrupt, tuple(interrupts), timeout=timeout)
    if isinstance(answer, Command):
        return answer
    if len(interrupts) == 1:
        return Command(resume={interrupts[0].id: answer})
    ids = {interrupt.id for interrupt in interrupts}
    if not isinstance(answer, Mapping) or not answer or not set(answer) <= ids:
        raise ConfigError(
            f"on_interrupt was asked {len(interrupts)} things at once: {_values(interrupts)}",
            got=answer,
            expected="a dict of values by interrupt id, or a Command",
            fix="For example: {i.id: answer(i.value) for i in interrupts}.",
        )
    return Command(resume=dict(answer))


def _equipped(graph: Runnable[Any, Any], part: Part) -> Runnable[Any, Any]:
    """The graph with the part's store and checkpointer in place of its own."""
    given = {
        name: made() if callable(made) else made
        for name, made in (("store", part.store), ("checkpointer", part.checkpointer))
        if made is not None
    }
    if not given:
        return graph
    if not isinstance(graph, Pregel):
        raise NotPlayable(
            "only a graph takes a store or a checkpointer",
            got=type(graph).__name__,
            expected="a compiled graph or a StateGraph",
        )
    return graph.copy(given)


async def _check(runnable: Runnable[Any, Any], part: Part) -> None:
    """See that what has to be remembered can be."""
    if part.on_interrupt is None and not part.continues:
        return
    if not isinstance(runnable, PregelProtocol):
        raise NotPlayable("this has neither interrupts nor threads", got=type(runnable).__name__)
    if getattr(runnable, "checkpointer", True) in (None, False):
        what = "continue_" if part.continues else "on_interrupt"
        raise NotPlayable(f"{what} needs a graph with a checkpointer, and this has none", fix=_FIX)
    if part.continues and not (await runnable.aget_state(part.config)).created_at:
        raise NotPlayable(
            "the graph's checkpointer does not know the thread to go on with",
            got=(part.config.get("configurable") or {}).get("thread_id"),
            fix="Use one checkpointer for all turns; a factory makes a new one each time.",
        )


def _values(interrupts: Sequence[Interrupt]) -> str:
    return ", ".join(f"interrupt {i.id} ({i.value!r:.200})" for i in interrupts)
