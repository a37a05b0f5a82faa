"""How a rehearsal is shown: the rollouts, what of them is trained, and what the checks found.

In: a `Rehearsal` and findings. Out: lines on stdout. Text of models, tools and users is shown
letter for letter. Left out: JSON (`rehearsal.report`).
"""

from __future__ import annotations

import textwrap
from collections import Counter
from collections.abc import Sequence

from art_core.plural import plural
from art_langgraph.cli.console import console, say
from art_langgraph.rehearsal.actor import MANNERS
from art_langgraph.rehearsal.checks.rewards import reward
from art_langgraph.rehearsal.finding import Finding, Status, failed
from art_langgraph.rehearsal.lineage import Link, lineage
from art_langgraph.rehearsal.played import Play, Rehearsal
from art_langgraph.rehearsal.report import SCRIPTED_LIMITS, said, trained_tokens
from art_langgraph.rehearsal.wording import asker, shortened
from art_langgraph.visible import visible

_STYLES: dict[Status, str] = {
    "pass": "green",
    "warn": "yellow",
    "fail": "bold red",
    "skipped": "dim",
}
_COUNTED: dict[Status, str] = {
    "pass": "passed",
    "warn": "to look at",
    "fail": "failed",
    "skipped": "skipped",
}
_CALLS = 8
"""Calls of a rollout that are shown."""
_ROOM = 30
"""Characters of a line that a narrow terminal must leave for a text to be set in."""
_TEXT = 100
"""Characters of an answer that are shown."""


def show_rehearsal(rehearsal: Rehearsal, findings: Sequence[Finding], seconds: float) -> None:
    """Everything, the verdict last."""
    _show_head(rehearsal)
    for play in rehearsal.plays:
        _show_play(play, rehearsal)
    shown = next((play for play in rehearsal.plays if play.policy_calls), None)
    if shown is not None:
        _show_masks(shown)
    say()
    for finding in findings:
        _show_finding(finding, max(len(f.check) for f in findings))
    say()
    _show_verdict(rehearsal, findings, seconds)


def _show_head(rehearsal: Rehearsal) -> None:
    who = "a scripted model" if rehearsal.scripted else visible(rehearsal.player)
    count = plural(len(rehearsal.scenarios), "scenario")
    made = " (made up; give yours by --scenarios)" if rehearsal.made_up else ""
    say(("art-langgraph rehearse ", "bold"), (visible(rehearsal.source), "bold"))
    say(f"{who} plays {count}{made}, {plural(len(rehearsal.plays), 'rollout')} in all;")
    say("your tools ran for real" + (", with made-up arguments" if rehearsal.scripted else ""))
    say()


def _show_play(play: Play, rehearsal: Rehearsal) -> None:
    calls = play.policy_calls
    tokens = sum(trained_tokens(link) for link in lineage(calls))
    ended = "failed" if play.failure is not None else play.trajectory.ended
    scenario = f"{play.scenario + 1}. " if len(rehearsal.scenarios) > 1 else ""
    worth = reward(play) if rehearsal.rewarded else None
    earned = "" if worth is None else f"  reward {worth:g}"
    head = f"  {scenario}{play.manner:<9} {plural(len(calls), 'call'):>9} {tokens:>7,} trained"
    told = MANNERS.get(play.manner)
    say(head, (f"  {ended}", _ended_style(ended)), earned, (f"  {told}" if told else "", "dim"))


def _ended_style(ended: str) -> str:
    return {"completed": "green", "failed": "bold red"}.get(ended, "yellow")


def _show_masks(play: Play) -> None:
    links = lineage(play.policy_calls)
    say()
    say(f"The first rollout's calls, «what is trained» of each; by nodes: {_nodes(links)}")
    for number, link in enumerate(links[:_CALLS], start=1):
        _show_mask(number, link)
    if len(links) > _CALLS:
        say((f"  and {plural(len(links) - _CALLS, 'call')} more", "dim"))


def _show_mask(number: int, link: Link) -> None:
    before = "begins" if link.parent is None else f"goes on from {link.parent + 1}"
    trained = trained_tokens(link)
    say(
        f"  {number} {visible(asker(link.call.origin))} ",
        (f"{before}, {link.context:,} tokens of context, then {trained:,} trained ", "dim"),
        (f"«{visible(shortened(said(link), _TEXT))}»", "green" if trained else "red"),
    )


def _nodes(links: Sequence[Link]) -> str:
    counts = Counter(asker(link.call.origin) for link in links)
    return visible(", ".join(f"{node} ({count})" for node, count in counts.items()))


def _show_finding(finding: Finding, width: int) -> None:
    head = f"{finding.check:<{width}}  "
    indent = 8 + len(head)
    say((f"{finding.status:<8}", _STYLES[finding.status]), head, _set_in(finding.what, indent))
    if finding.fix:
        room = indent if console().is_terminal else 4
        say((" " * room + _set_in(finding.fix, room), "dim"))


def _set_in(text: str, indent: int) -> str:
    """`text` in lines that begin under its first, where there is somebody to look and room."""
    out, whole = console(), visible(text)
    if not out.is_terminal or out.width - indent < _ROOM:
        return whole
    return ("\n" + " " * indent).join(textwrap.wrap(whole, out.width - indent) or [""])


def _show_verdict(rehearsal: Rehearsal, findings: Sequence[Finding], seconds: float) -> None:
    counts = Counter(finding.status for finding in findings)
    told = ", ".join(f"{counts[s]} {word}" for s, word in _COUNTED.items() if counts[s])
    bad = failed(findings)
    verdict = "This agent can't be trained as it is" if bad else "This agent can be trained"
    say((verdict, "bold red" if bad else "bold green"), f": {told}, in {seconds:.0f} s.")
    if rehearsal.scripted:
        say((f"{SCRIPTED_LIMITS} --model SmolLM2-135M-Instruct plays a real one.", "dim"))
