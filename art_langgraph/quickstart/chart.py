"""The reward curve as SVG inside the page, in the colours of the reader's light or dark.

In: a report. Out: one `<svg>` element that says in words what it shows. It needs no script and no
file beside it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

from art_langgraph.quickstart.palette import part_color
from art_langgraph.quickstart.wording import number, percent

WIDTH, HEIGHT = 920, 380
_LEFT, _RIGHT, _TOP, _BOTTOM = 46, 190, 22, 46
_MOST_TICKS = 10
_LABEL_GAP = 17
"""Pixels between two labels at the lines' ends."""

Points = Sequence[tuple[float, float | None]]


def curve_svg(report: dict[str, Any]) -> str:
    """The curve of `report`."""
    scale = _Scale(max(report["steps"], *(p["step"] for p in report["curve"]), 1))
    lines = [(name, _points(report, name)) for name in report["reward_parts"]]
    reward = _points(report, "reward")
    drawn = [
        *_grid(scale),
        _floor(scale, report["constant_answer_baseline"]["reward"]),
        *(_line(scale, p, "part", part_color(i)) for i, (_, p) in enumerate(lines)),
        _line(scale, reward, "total"),
        *_dots(scale, reward),
        *(_check(scale, check) for check in report["checks"] if check["success"] is not None),
        _mark(scale, 0, report["heldout_before"], "before"),
        _mark(scale, report["steps"], report["heldout_after"], "after"),
        *_end_labels(_ends(scale, report)),
    ]
    told = (
        f"Reward of the training steps, from {number(report['reward_first'])} to "
        f"{number(report['reward_last'])}. Held-out success {percent(report['heldout_before'])} "
        f"before and {percent(report['heldout_after'])} after."
    )
    return (
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-labelledby="curve-told">'
        f'<title id="curve-told">{escape(told)}</title>{"".join(drawn)}</svg>'
    )


class _Scale:
    """Steps and shares to pixels."""

    def __init__(self, last: int) -> None:
        self.last = last

    def x(self, step: float) -> float:
        return round(_LEFT + 14 + (WIDTH - _LEFT - _RIGHT - 28) * step / self.last, 1)

    def y(self, share: float) -> float:
        return round(_TOP + (HEIGHT - _TOP - _BOTTOM) * (1 - share), 1)


def _points(report: dict[str, Any], name: str) -> Points:
    return [(point["step"], point.get(name)) for point in report["curve"]]


def _grid(scale: _Scale) -> Iterator[str]:
    right = WIDTH - _RIGHT
    for share in (0.0, 0.25, 0.5, 0.75, 1.0):
        y = scale.y(share)
        yield f'<line class="grid" x1="{_LEFT}" x2="{right}" y1="{y}" y2="{y}"/>'
        yield f'<text class="tick" x="{_LEFT - 8}" y="{y + 4}" text-anchor="end">{share:g}</text>'
    every = -(-scale.last // _MOST_TICKS)
    for step in range(0, scale.last + 1, every):
        x, y = scale.x(step), HEIGHT - _BOTTOM + 20
        yield f'<text class="tick" x="{x}" y="{y}" text-anchor="middle">{step}</text>'
    x, y = (_LEFT + right) / 2, HEIGHT - 6
    yield f'<text class="tick" x="{x}" y="{y}" text-anchor="middle">steps learned</text>'


def _floor(scale: _Scale, share: float) -> str:
    y = scale.y(share)
    return (
        f'<line class="floor" x1="{_LEFT}" x2="{WIDTH - _RIGHT}" y1="{y}" y2="{y}"/>'
        f'<text class="floor-label" x="{WIDTH - _RIGHT - 4}" y="{y - 6}" text-anchor="end">'
        f"best constant answer {share:.2f}</text>"
    )


def _line(scale: _Scale, points: Points, kind: str, color: str | None = None) -> str:
    """A line with gaps where a value is missing."""
    path, pen = [], "M"
    for step, value in points:
        if value is None:
            pen = "M"
        else:
            path.append(f"{pen}{scale.x(step)} {scale.y(value)}")
            pen = "L"
    style = f' style="stroke:{color}"' if color else ""
    return f'<path class="line {kind}"{style} d="{"".join(path)}"/>' if path else ""


def _dots(scale: _Scale, points: Points) -> Iterator[str]:
    for step, value in points:
        if value is not None:
            yield (
                f'<circle class="dot" cx="{scale.x(step)}" cy="{scale.y(value)}" r="4">'
                f"<title>step {step + 1:g}: reward {value:.2f}</title></circle>"
            )


@dataclass(frozen=True)
class _End:
    """What a line, or the last mark, is called at its right end."""

    y: float
    """Where it would best stand."""
    text: str
    kind: str
    color: str | None = None


def _ends(scale: _Scale, report: dict[str, Any]) -> Iterator[_End]:
    names = ["reward", *report["reward_parts"]]
    for index, name in enumerate(names):
        known = [value for _, value in _points(report, name) if value is not None]
        if known:
            color = part_color(index - 1) if index else None
            text = f"{name} {known[-1]:.2f}"
            yield _End(scale.y(known[-1]), text, "part" if index else "total", color)
    after = report["heldout_after"]
    yield _End(scale.y(after), f"held-out after {percent(after)}", "after")


def _end_labels(ends: Iterable[_End]) -> Iterator[str]:
    """Labels in the right margin, pushed apart where they would overlap."""
    ordered = sorted(ends, key=lambda end: end.y)
    lowest = HEIGHT - _BOTTOM
    above = -math.inf
    left = WIDTH - _RIGHT + 10
    for index, end in enumerate(ordered):
        room_below = lowest - _LABEL_GAP * (len(ordered) - 1 - index)
        y = above = max(min(end.y, room_below), above + _LABEL_GAP)
        style = f' style="stroke:{end.color}"' if end.color else ""
        key = (
            f'<path class="mark after" d="{_diamond(left + 8, y, 6)}"/>'
            if end.kind == "after"
            else f'<path class="line {end.kind}"{style} d="M{left} {y}h16"/>'
        )
        yield key
        yield f'<text class="end {end.kind}" x="{left + 24}" y="{y + 4}">{escape(end.text)}</text>'


def _check(scale: _Scale, check: dict[str, Any]) -> str:
    x, y = scale.x(check["step"]), scale.y(check["success"])
    return (
        f'<path class="check" d="{_diamond(x, y, 6)}">'
        f"<title>check at step {check['step']}: {percent(check['success'])} right</title></path>"
    )


def _mark(scale: _Scale, step: int, success: float, when: str) -> str:
    """A diamond; the one before training is named beside it, the one after in the margin."""
    x, y = scale.x(step), scale.y(success)
    mark = f'<path class="mark {when}" d="{_diamond(x, y, 9)}"/>'
    if when == "after":
        return mark
    text = f"held-out before {percent(success)}"
    return f'{mark}<text class="mark-label" x="{x + 13}" y="{y - 9}">{text}</text>'


def _diamond(x: float, y: float, size: float) -> str:
    return f"M{x} {y - size}L{x + size} {y}L{x} {y + size}L{x - size} {y}Z"
