"""A rehearsal as one JSON document.

In: a `Rehearsal` and its findings. Out: plain values, ready for `json.dumps`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from art_core.finding import Finding, failed
from art_langgraph.rehearsal.checks.rewards import reward
from art_langgraph.rehearsal.checks.tools import called_tools, offered_tools
from art_langgraph.rehearsal.lineage import Link, lineage
from art_langgraph.rehearsal.played import Play, Rehearsal
from art_langgraph.rehearsal.wording import described

SCRIPTED_LIMITS = (
    "A scripted model played. It shows the wiring: what is asked, recorded, parsed and trained. It "
    "can't show whether a real model uses the tools well, writes what the graph can read, or earns "
    "rewards that differ."
)


def document(rehearsal: Rehearsal, findings: Sequence[Finding]) -> dict[str, Any]:
    """Everything that was seen."""
    return {
        "source": rehearsal.source,
        "player": rehearsal.player,
        "status": "fail" if failed(findings) else "pass",
        "findings": [asdict(finding) for finding in findings],
        "scenarios": len(rehearsal.scenarios),
        "scenarios_made_up": rehearsal.made_up,
        "rollouts": [_play(play) for play in rehearsal.plays],
        "note": SCRIPTED_LIMITS if rehearsal.scripted else None,
    }


def _play(play: Play) -> dict[str, Any]:
    return {
        "scenario": play.scenario,
        "manner": play.manner,
        "ended": "failed" if play.failure is not None else play.trajectory.ended,
        "error": None if play.error is None else f"{type(play.error).__name__}: {play.error}",
        "reward": reward(play),
        "nodes": list(play.graph.get("nodes") or ()),
        "calls": [_call(link) for link in lineage(play.policy_calls)],
        "other_models": [
            {"node": asked.node, "model": described(asked)}
            for asked in play.asked
            if not asked.ours
        ],
        "incomplete": play.incomplete,
    }


def _call(link: Link) -> dict[str, Any]:
    call = link.call
    return {
        "node": call.origin.node,
        "namespace": call.origin.namespace,
        "role": call.origin.role,
        "goes_on_from": link.parent,
        "drift": link.drift,
        "prompt_tokens": 0 if call.prompt_ids is None else len(call.prompt_ids),
        "new_context_tokens": link.context,
        "trained_tokens": trained_tokens(link),
        "trained": said(link),
        "tools_offered": offered_tools(call),
        "tools_called": called_tools(call),
        "streamed": bool(call.request.get("stream")),
        "finish_reason": call.finish_reason,
        "error": call.error,
    }


def trained_tokens(link: Link) -> int:
    """Sampled tokens of a call that enter the loss."""
    ids = link.call.sampled_ids
    return len(ids) if link.call.trainable and ids is not None else 0


def said(link: Link) -> str:
    """What the policy said in a call: its text, and its tool calls as they would be written."""
    message = link.call.message
    calls = [c["function"] for c in message.get("tool_calls") or ()]
    texts = [str(message.get("content") or ""), *(f"{c['name']}({c['arguments']})" for c in calls)]
    return " ".join(filter(None, texts))
