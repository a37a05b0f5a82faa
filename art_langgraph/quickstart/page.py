"""The report as one HTML page that needs nothing beside it: no script, no file, no network.

In: a report, and each held-out customer with the trajectories before and after. Out: HTML. What the
model wrote is text there, letter for letter, whatever it wrote. Left out: the curve (chart.py), the
frame and the look (page.html and page.css, put into one).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from html import escape
from importlib.resources import files
from string import Template
from typing import Any

from art_core.errors import RolloutFailure
from art_core.trajectories import Trajectory, TrajectoryGroup
from art_langgraph.quickstart.chart import curve_svg
from art_langgraph.quickstart.conversation import Turn, turns_of
from art_langgraph.quickstart.customers import PARTS, Customer
from art_langgraph.quickstart.palette import part_color
from art_langgraph.quickstart.wording import duration, number, percent
from art_langgraph.visible import visible

_OPEN = 3
"""Encounters that are shown at once; the others unfold."""

Report = dict[str, Any]


@dataclass(frozen=True)
class Encounter:
    """A held-out customer, served before and after. Each group has one rollout."""

    customer: Customer
    before: TrajectoryGroup
    after: TrajectoryGroup


def page(report: Report, encounters: Sequence[Encounter]) -> str:
    """The page."""
    return Template(_resource("page.html")).substitute(
        look=_resource("page.css"),
        title=f"Quickstart: {_headline(report)}",
        eyebrow=_text(f"{report['settings']['base_model']}, seed {report['seed']}"),
        headline=_headline(report),
        lead=_lead(report),
        tiles="".join(_tiles(report)),
        curve=curve_svg(report),
        legend="".join(_legend(report)),
        tools="".join(_tool_row(name, tool) for name, tool in report["per_tool"].items()),
        encounters=_encounters(encounters),
        parts="".join(_part(name, worth) for name, worth in report["reward_parts"].items()),
        facts="".join(_facts(report)),
        steps="".join(_step_rows(report)),
        step_heads="".join(
            f'<th scope="col">{_text(name)}</th>' for name in report["reward_parts"]
        ),
    )


def _resource(name: str) -> str:
    return files("art_langgraph.quickstart").joinpath(name).read_text("utf-8")


# --- what was reached


def _headline(report: Report) -> str:
    before, after = report["heldout_before"], report["heldout_after"]
    if after >= 0.9 and after > before:
        return "The agent learned its job"
    if after > before:
        return "The agent got better at its job"
    return "The agent has not learned its job yet"


def _lead(report: Report) -> str:
    steps, cores = report["steps"], report["machine"]["usable_cores"]
    return (
        f"A shop's support agent met {report['heldout_customers']} customers it had never seen, in "
        "wordings it was never trained on. Before training it served "
        f'<strong class="before">{percent(report["heldout_before"])}</strong> of them right; after '
        f"{steps} {'step' if steps == 1 else 'steps'} of reinforcement learning, "
        f"{duration(report['seconds'])} on {cores} CPU cores, "
        f'<strong class="after">{percent(report["heldout_after"])}</strong>.'
    )


def _tiles(report: Report) -> Iterator[str]:
    constant = report["constant_answer_baseline"]
    first, last = number(report["reward_first"]), number(report["reward_last"])
    yield _tile(
        "Held-out success",
        f"{percent(report['heldout_before'])} <i>to</i> {percent(report['heldout_after'])}",
        "right tool, right arguments, right answer",
    )
    yield _tile("Reward in training", f"{first} <i>to</i> {last}", "first and last step, of 1")
    yield _tile(
        "Same answer for everybody",
        f"{percent(constant['success'])}",
        f"the best one earns a reward of {constant['reward']:.2f}",
    )
    seconds = report["first_reward_seconds"]
    yield _tile(
        "Time",
        duration(report["seconds"]),
        f"first reward after {duration(seconds)}" if seconds else "download apart",
    )


def _tile(name: str, value: str, note: str) -> str:
    return f"<div><dt>{name}</dt><dd>{value}</dd><dd>{_text(note)}</dd></div>"


def _legend(report: Report) -> Iterator[str]:
    yield '<li><b class="key reward"></b>reward: mean over the rollouts of a step</li>'
    for index, (name, worth) in enumerate(report["reward_parts"].items()):
        style = f"background:{part_color(index)}"
        yield f'<li><b class="key" style="{style}"></b>{_text(name)}, worth {worth:g}</li>'
    yield '<li><b class="key diamond"></b>share of held-out customers served right</li>'
    if report["checks"]:
        yield '<li><b class="key diamond hollow"></b>check on other customers, to stop by</li>'


# --- tool by tool


def _tool_row(name: str, tool: dict[str, float]) -> str:
    return (
        f'<tr><th scope="row"><code>{_text(name)}</code></th>'
        f'<td class="num">{tool["customers"]}</td>'
        f"<td>{_bar(tool['before'], 'before')}</td><td>{_bar(tool['after'], 'after')}</td>"
        f'<td class="num">{tool["reward_before"]:.2f}</td>'
        f'<td class="num">{tool["reward_after"]:.2f}</td></tr>'
    )


def _bar(share: float, when: str) -> str:
    return (
        f'<span class="bar {when}"><span style="width:{share:.1%}"></span></span>'
        f'<span class="share">{percent(share)}</span>'
    )


# --- the customers


def _encounters(encounters: Sequence[Encounter]) -> str:
    """All of them; first those who show what was learned."""
    ordered = sorted(encounters, key=lambda e: not (_is_right(e.after) and not _is_right(e.before)))
    shown = [_encounter(encounter) for encounter in ordered]
    head, rest = "".join(shown[:_OPEN]), "".join(shown[_OPEN:])
    if not rest:
        return head
    count = len(shown) - _OPEN
    return f"{head}<details><summary>{count} more customers</summary>{rest}</details>"


def _encounter(encounter: Encounter) -> str:
    customer = encounter.customer
    return (
        f'<article><h3><span class="who">Customer</span>{_text(customer.message)}</h3>'
        f'<p class="needs">needs <code>{_text(customer.tool)}</code> and the answer '
        f"<code>{_text(customer.fact)}</code></p>"
        f'<div class="pair">{_side(encounter.before, "before")}{_side(encounter.after, "after")}'
        "</div></article>"
    )


def _side(group: TrajectoryGroup, when: str) -> str:
    trajectories = group.trajectories
    if not trajectories:
        failures = "".join(f"<p>{_text(str(failure))}</p>" for failure in group.exceptions)
        calls = [f.trajectory for f in group.exceptions if isinstance(f, RolloutFailure)]
        said = "".join(_turns(trajectory) for trajectory in calls)
        return _section(when, f'{said}<div class="failed">failed by a fault: {failures}</div>', "")
    trajectory, right = trajectories[0], _is_right(group)
    badge = f'<span class="badge {"yes" if right else "no"}">{"right" if right else "wrong"}</span>'
    return _section(when, _turns(trajectory) + _reward(trajectory), badge)


def _is_right(group: TrajectoryGroup) -> bool:
    return any(trajectory.metrics.get("success") for trajectory in group)


def _section(when: str, body: str, badge: str) -> str:
    return f'<section class="{when}"><h4>{when.capitalize()}{badge}</h4>{body}</section>'


def _turns(trajectory: Trajectory) -> str:
    shown = "".join(_turn(turn) for turn in turns_of(trajectory)[1:])
    if trajectory.ended != "completed":
        shown += f'<p class="ended">ended: {_text(trajectory.ended.replace("_", " "))}</p>'
    return shown


def _turn(turn: Turn) -> str:
    if turn.who != "assistant":
        who = f"{_text(turn.who)} returns"
        return (
            f'<div class="turn tool"><span class="who">{who}</span><p>{_text(turn.text)}</p></div>'
        )
    calls = "".join(f"<p><code>{_text(call)}</code></p>" for call in turn.calls)
    parts = []
    if turn.text or not turn.calls:
        said = _text(turn.text) or '<span class="nothing">(nothing)</span>'
        parts.append(f'<div class="turn said"><span class="who">says</span><p>{said}</p></div>')
    if calls:
        parts.append(f'<div class="turn call"><span class="who">calls</span>{calls}</div>')
    return "".join(parts)


def _reward(trajectory: Trajectory) -> str:
    """The reward as a bar: its parts as wide as they are worth, as full as they were earned."""
    segments, words = [], []
    for index, (name, worth) in enumerate(PARTS.items()):
        value = float(trajectory.metrics.get(name, 0.0))
        segments.append(
            f'<span style="flex:{worth:g}"><span style="width:{value:.0%};'
            f'background:{part_color(index)}"></span></span>'
        )
        mark = {0.0: "\N{BALLOT X}", 1.0: "\N{CHECK MARK}"}.get(value, percent(value))
        words.append(f"<li>{_text(name)} {mark}</li>")
    return (
        f'<div class="earned"><b>reward {number(trajectory.reward)}</b>'
        f'<span class="parts" aria-hidden="true">{"".join(segments)}</span>'
        f"<ul>{''.join(words)}</ul></div>"
    )


# --- how it ran


def _part(name: str, worth: float) -> str:
    return f"<li><code>{_text(name)}</code> {worth:g}</li>"


def _facts(report: Report) -> Iterator[str]:
    settings, machine = report["settings"], report["machine"]
    speed = report["tokens_per_second"]
    phases = ", ".join(f"{name} {duration(s)}" for name, s in report["phases"].items())
    stopped = {"learned": "the checks were served right", "max_steps": "the steps were used up"}
    facts = {
        "A step": f"{settings['groups']} customers, {settings['group_size']} rollouts each",
        "Training ended": stopped.get(report["stopped"], report["stopped"]),
        "Learning": f"LoRA of rank {settings['lora']['rank']}, learning rate "
        f"{settings['train']['learning_rate']:g}",
        "Graph": settings["graph"],
        "Time": phases,
        "Sampled": f"{speed:.0f} tokens a second" if speed else "-",
        "Failed rollouts": f"{report['failures']}, by faults that were not the policy's",
        "Machine": f"{machine['usable_cores']} of {machine['cores']} cores, {machine['system']} "
        f"{machine['architecture']}, Python {machine['python']}",
        "Versions": ", ".join(f"{k} {v}" for k, v in report["versions"].items() if v),
    }
    for name, fact in facts.items():
        yield f"<div><dt>{name}</dt><dd>{_text(str(fact))}</dd></div>"


def _step_rows(report: Report) -> Iterator[str]:
    for point in report["curve"]:
        names = ("reward", *report["reward_parts"], "entropy")
        cells = "".join(f'<td class="num">{number(point.get(name))}</td>' for name in names)
        took = [point.get("gather_seconds"), point.get("step_seconds")]
        seconds = " + ".join("-" if s is None else f"{s:.0f}" for s in took)
        yield (
            f'<tr><th scope="row" class="num">{point["step"] + 1}</th>{cells}'
            f'<td class="num">{seconds}</td></tr>'
        )


def _text(text: str) -> str:
    """Text of whomever, as text."""
    return escape(visible(text))
