"""How the rollouts ended: by themselves, by an exception, at a limit, at an interrupt."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from art_core.errors import CaptureError
from art_core.finding import Finding
from art_langgraph.faults import chain
from art_langgraph.rehearsal.blame import named, place_of
from art_langgraph.rehearsal.played import Play, Rehearsal
from art_langgraph.rehearsal.wording import counted, listed, manners, shortened

_PROVIDERS = frozenset({"anthropic", "google", "httpx", "httpx2", "langchain_openai", "openai"})
"""Packages whose exceptions say that a model could not be reached."""


def check_ending(rehearsal: Rehearsal) -> Iterator[Finding]:
    """Rollouts that failed, then those that an exception ended, then what is well."""
    plays = rehearsal.plays
    broken = [play for play in plays if play.failure is not None and not lost(play.error)]
    raised = [p for p in plays if p.failure is None and p.trajectory.ended == "error"]
    for group in _by_cause(broken):
        yield Finding("ending", "fail", _told(group, len(plays)), _fix_of(group[0]))
    for group in _by_cause(raised):
        yield Finding(
            "ending",
            "fail" if len(raised) + len(broken) == len(plays) else "warn",
            _told(group, len(plays)),
            "It counts as the policy's doing and trains with failure_reward (0). If a real model "
            "must not be able to cause it, catch it in the node and let the graph go on.",
        )
    overflown = [p for p in plays if p.trajectory.ended == "context_overflow"]
    if overflown:
        yield Finding(
            "ending",
            "fail" if len(overflown) == len(plays) else "warn",
            f"the context overflowed in {_these(overflown, len(plays))}",
            "Choose a base model with a longer context, or trim the history.",
        )
    well = [p for p in plays if p.failure is None and p.trajectory.ended == "completed"]
    if well and not broken:
        yield Finding("ending", "pass", f"the graph came to its end in {_these(well, len(plays))}")


def check_limits(rehearsal: Rehearsal) -> Iterator[Finding]:
    """The recursion limit and the time limit."""
    plays = rehearsal.plays
    slow = [p for p in plays if p.trajectory.ended == "timeout"]
    if slow:
        where = listed(
            dict.fromkeys(n for p in slow for n in list(p.graph.get("nodes") or ())[-1:])
        )
        yield Finding(
            "limits",
            "fail",
            f"{_these(slow, len(plays))} took more than {rehearsal.timeout:g} s"
            + (f"; the last node to begin was {where}" if where else ""),
            "Find what it waits for (a model or a service that is not there?), or give more time "
            "by --timeout.",
        )
    endless = [p for p in plays if p.trajectory.ended == "recursion_limit"]
    willing = [p for p in endless if p.manner != "stubborn"]
    by_itself = any(p.manner == "brief" for p in endless)  # nothing it said can have asked for it
    if rehearsal.capped is not None and endless and not by_itself:
        yield Finding(
            "limits",
            "warn",
            f"nothing of yours ends a policy that goes on calling tools: the rehearsal stopped "
            f"{_these(endless, len(plays))} after {rehearsal.capped} steps; LangGraph would after "
            "about 10,000",
            'Give rollout(..., config={"recursion_limit": 20}), or a limit in the graph.',
        )
    elif willing:
        yield Finding(
            "limits",
            "warn",
            f"the recursion limit ended {_these(willing, len(plays))}, though the policy had come "
            "to its end",
            "Look for nodes that loop whatever the policy says, or raise the limit.",
        )
    elif endless:
        yield Finding("limits", "pass", f"the recursion limit ends {_these(endless, len(plays))}")
    elif not slow:
        yield Finding("limits", "pass", "every rollout ended before its limits")


def check_interrupts(rehearsal: Rehearsal) -> Iterator[Finding]:
    """Rollouts that wait for a human."""
    stopped = [p for p in rehearsal.plays if p.trajectory.ended == "interrupted"]
    if not stopped:
        return
    values = dict.fromkeys(
        shortened(str(i.get("value")), 120)
        for p in stopped
        for i in p.graph.get("interrupts") or ()
    )
    where = f"interrupt(): {listed(values)}" if values else "a node where it was compiled to stop"
    yield Finding(
        "interrupts",
        "warn",
        f"{_these(stopped, len(rehearsal.plays))} stopped at {where}",
        "In training nobody is there to answer: give rollout an answer (on_interrupt=), or a graph "
        "without the interrupt. What was called until then trains.",
    )


def lost(error: BaseException | None) -> bool:
    """True if a call had lost its rollout; that is told by the check of the recording."""
    return any(isinstance(seen, CaptureError) for seen in chain(error))


def _told(group: Sequence[Play], total: int) -> str:
    error = group[0].error
    assert error is not None
    node = next((n for n in getattr(error, "__notes__", ()) if n.startswith("During task")), "")
    name = node.split("'")[1] if node.count("'") >= 2 else ""
    inside = f" in node {name!r}" if name else ""
    return f"{_these(group, total)} ended by {named(error)}{inside}{place_of(error)}"


def _by_cause(plays: Sequence[Play]) -> list[list[Play]]:
    groups: dict[str, list[Play]] = {}
    for play in plays:
        error = play.error
        cause = type(error).__name__ + ("" if error is None else place_of(error))
        groups.setdefault(cause, []).append(play)
    return list(groups.values())


def _fix_of(play: Play) -> str:
    error = play.error
    text = str(error)
    if isinstance(error, NotImplementedError) and "async" in text:
        return (
            "Rollouts run the graph by `astream`: give it an async checkpointer, such as "
            "InMemorySaver or AsyncSqliteSaver, and async or plain functions."
        )
    others = [asked for asked in play.asked if not asked.ours]
    if others and any(type(e).__module__.partition(".")[0] in _PROVIDERS for e in chain(error)):
        kinds = listed(dict.fromkeys(f"{a.kind} in {a.node}" for a in others))
        return f"Look at {kinds}: its key and address, or put ChatArt() in its place."
    if not play.calls:
        return "It was raised before the policy was asked anything, so no policy can mend it."
    return "A rollout that fails so is dropped from training; its calls and the error are kept."


def _these(plays: Sequence[Play], total: int) -> str:
    return f"{counted(len(plays), total, 'rollout')}{manners(plays)}"
