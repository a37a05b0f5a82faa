"""The phases of a run's steps as a picture: one bar a step, cut by phase, in seconds.

In: `StepTimes`. Out: an SVG file's text, which needs nothing to be looked at but a browser.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from html import escape

from art_core.step_times import PHASES, StepTimes

WIDTH, HEIGHT = 920, 380
_LEFT, _RIGHT, _TOP, _BOTTOM = 56, 180, 30, 44
_COLORS = (
    "#0072B2", "#56B4E9", "#8A8A8A", "#A5803F", "#009E73", "#7A9E00", "#E69F00", "#D55E00",
    "#CC79A7", "#B00020", "#8577E6", "#444444", "#000000",
)  # fmt: skip
"""Of `PHASES`, after Okabe and Ito's palette."""
_MOST_TICKS = 12


def chart(times: Sequence[StepTimes]) -> str:
    """The picture; with no steps it says so."""
    top = _round_up(max((sum(each.seconds.values()) for each in times), default=1.0))
    names = [name for name in _names(times) if any(each.seconds.get(name) for each in times)]
    drawn = [*_grid(top), *_bars(times, names, top), *_legend(times, names)]
    if not times:
        drawn.append(_text(WIDTH / 2, HEIGHT / 2, "no step has been timed", "middle"))
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" role="img" '
        f'font-family="sans-serif" font-size="12"><title>Seconds of each step by phase</title>'
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>{"".join(drawn)}</svg>\n'
    )


def _bars(times: Sequence[StepTimes], names: Sequence[str], top: float) -> Iterator[str]:
    room = (WIDTH - _LEFT - _RIGHT) / max(len(times), 1)
    every = max(1, -(-len(times) // _MOST_TICKS))
    for place, each in enumerate(times):
        x, y = _LEFT + place * room + 0.1 * room, float(HEIGHT - _BOTTOM)
        for name in names:
            seconds = each.seconds.get(name, 0.0)
            height = _pixels(seconds, top)
            y -= height
            said = escape(f"{each.split} step {each.step}: {name} {seconds:.3g} s")
            yield (
                f'<rect x="{x:.1f}" y="{y:.2f}" width="{0.8 * room:.1f}" height="{height:.2f}" '
                f'fill="{_color(name)}"><title>{said}</title></rect>'
            )
        if place % every == 0:
            yield _text(x + 0.4 * room, HEIGHT - _BOTTOM + 18, str(each.step), "middle")


def _grid(top: float) -> Iterator[str]:
    right = WIDTH - _RIGHT
    for part in range(5):
        seconds = top * part / 4
        y = HEIGHT - _BOTTOM - _pixels(seconds, top)
        yield f'<line x1="{_LEFT}" x2="{right}" y1="{y:.1f}" y2="{y:.1f}" stroke="#ddd"/>'
        yield _text(_LEFT - 8, y + 4, f"{seconds:g} s", "end")
    yield _text((_LEFT + right) / 2, HEIGHT - 8, "step", "middle")


def _legend(times: Sequence[StepTimes], names: Sequence[str]) -> Iterator[str]:
    """The phases from the top of a bar down, with their share of all seconds."""
    whole = sum(sum(each.seconds.values()) for each in times) or 1.0
    for place, name in enumerate(reversed(names)):
        y = _TOP + 18 * place
        share = sum(each.seconds.get(name, 0.0) for each in times) / whole
        x = WIDTH - _RIGHT + 14
        yield f'<rect x="{x}" y="{y}" width="11" height="11" fill="{_color(name)}"/>'
        yield _text(x + 17, y + 10, f"{name} {share:.0%}", "start")


def _names(times: Sequence[StepTimes]) -> list[str]:
    others = {name for each in times for name in each.seconds} - set(PHASES)
    return [*PHASES, *sorted(others)]


def _color(name: str) -> str:
    return _COLORS[PHASES.index(name)] if name in PHASES else "#999"


def _pixels(seconds: float, top: float) -> float:
    return (HEIGHT - _TOP - _BOTTOM) * seconds / top


def _round_up(seconds: float) -> float:
    """To 1, 2, 4 or 8 times a power of ten: quarters of it are short numbers."""
    if seconds <= 0:
        return 1.0
    scale = 10.0 ** math.floor(math.log10(seconds))
    return next((n * scale for n in (1, 2, 4, 8) if n * scale >= seconds), 10 * scale)


def _text(x: float, y: float, words: str, anchor: str) -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(words)}</text>'
