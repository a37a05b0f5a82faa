"""How figures are written for people, the same in the terminal and on the page."""

from __future__ import annotations


def percent(share: float) -> str:
    """0.333 as "33%"."""
    return f"{share:.0%}"


def duration(seconds: float) -> str:
    """400.2 as "6 min 40 s", 9.3 as "9 s"."""
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest} s" if minutes else f"{rest} s"


def number(value: float | None) -> str:
    """Two decimals; "-" where there is none."""
    return "-" if value is None else f"{value:.2f}"
