"""Tools: offered, called, refused, failing."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

from art_core.calls import ModelCall
from art_core.plural import plural
from art_langgraph.rehearsal.finding import Finding
from art_langgraph.rehearsal.played import Rehearsal
from art_langgraph.rehearsal.wording import listed, shortened


def check_tools(rehearsal: Rehearsal) -> Iterator[Finding]:
    """What came of the tools."""
    calls = [call for play in rehearsal.plays for call in play.policy_calls]
    offered = dict.fromkeys(name for call in calls for name in offered_tools(call))
    if not offered:
        return
    called = Counter(name for call in calls for name in called_tools(call))
    broken = sum(broken_calls(call) for call in calls)
    foreign = sum(called.values()) - sum(called[name] for name in offered)
    told = f"{plural(len(offered), 'tool')} offered, {plural(sum(called.values()), 'call')} parsed"
    unparsed = f", {broken} that could not be" if broken else ""
    strange = f", {foreign} of tools that are not there" if foreign else ""
    unread = bool(broken) and not called
    yield Finding(
        "tools",
        "warn" if unread else "pass",
        f"{told}{unparsed}{strange}",
        "No call could be read, so no tool can earn anything: raise max_tokens if answers are cut, "
        "show an example of a call in the prompt, or choose a stronger base model."
        if unread
        else "",
    )
    never = [name for name in offered if not called[name]]
    if never and rehearsal.scripted:
        yield Finding(
            "tools",
            "warn",
            f"the rollouts ended before these tools were called: {listed(never)}",
            "Look at what ends the graph early, or give scenarios that leave more turns.",
        )
    yield from _errors(rehearsal)


def _errors(rehearsal: Rehearsal) -> Iterator[Finding]:
    """Tools that raised, by name and kind of error; but for the wrong arguments sent on purpose."""
    seen: dict[tuple[str, str], list[Mapping[str, Any]]] = {}
    for play in rehearsal.plays:
        # An error that a tool lets through is also the error of the tool that called it: the one
        # that was started last raised it.
        raised = {run.get("error"): run for run in play.graph.get("tools") or ()}
        for run in raised.values():
            if run.get("error") and not (
                play.manner == "clumsy" and "wrong_arg" in run["arguments"]
            ):
                kind = str(run["error"]).partition(":")[0]
                seen.setdefault((run["name"], kind), []).append(run)
    for (name, _), runs in seen.items():
        yield Finding(
            "tools",
            "warn",
            f"tool {name} raised {shortened(runs[0]['error'], 160)} on arguments that fit its "
            f"schema: {shortened(str(runs[0]['arguments']), 100)} ({plural(len(runs), 'time')})",
            "A policy will send such too. Let the tool return what is wrong, so that the policy "
            "can learn from it, or narrow the schema.",
        )


def offered_tools(call: ModelCall) -> list[str]:
    """Names of the tools in a request."""
    return [tool["function"]["name"] for tool in call.request.get("tools") or ()]


def called_tools(call: ModelCall) -> list[str]:
    """Names of the tools that an answer calls."""
    return [c["function"]["name"] for c in call.message.get("tool_calls") or ()]


def broken_calls(call: ModelCall) -> int:
    """Calls in an answer that nobody can make: unfinished, or no JSON object for arguments."""
    text = call.message.get("content")
    unparsed = text.count("<tool_call>") if isinstance(text, str) and offered_tools(call) else 0
    for made in call.message.get("tool_calls") or ():
        try:
            unparsed += not isinstance(json.loads(made["function"]["arguments"] or "{}"), dict)
        except ValueError:
            unparsed += 1
    return unparsed
