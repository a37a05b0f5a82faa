"""The reward curve as a PNG, by matplotlib, which is imported when it is drawn.

In: a report. Out: a picture: the reward of each step with its parts, the held-out marks before and
after, the constant answer as a floor. Left out: the same curve for the page (chart.py), which
follows the reader's light or dark.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from art_langgraph.quickstart.palette import AFTER, BEFORE, REWARD, part_color


def draw_curve(report: dict[str, Any], path: Path) -> None:
    """Draw the curve of `report` into the file `path`, 1600 x 900 pixels."""
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    figure = Figure(figsize=(10, 5.625), dpi=160, layout="constrained")
    axes = figure.add_subplot()
    steps = [point["step"] for point in report["curve"]]
    for index, name in enumerate(report["reward_parts"]):
        values = [_number(point.get(name)) for point in report["curve"]]
        axes.plot(steps, values, color=part_color(index), linewidth=1.2, label=name)
    values = [_number(point["reward"]) for point in report["curve"]]
    axes.plot(steps, values, color=REWARD, linewidth=3, marker="o", label="reward (training)")
    floor = report["constant_answer_baseline"]["reward"]
    axes.axhline(floor, color="0.55", linewidth=1, linestyle=":", label="best constant answer")
    marks = ((0, "before", BEFORE), (report["steps"], "after", AFTER))
    for step, when, color in marks:
        success = report[f"heldout_{when}"]
        label = f"held-out success {when}: {success:.0%}"
        axes.plot([step], [success], "D", color=color, markersize=11, zorder=5, label=label)
    axes.set_xlim(-0.4, max(report["steps"], 1) + 0.4)
    axes.set_ylim(-0.02, 1.05)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set_xlabel("steps learned")
    axes.set_ylabel("mean over the rollouts of a step")
    axes.set_title(
        f"{report['settings']['base_model']}, seed {report['seed']}", loc="left", parse_math=False
    )
    axes.grid(axis="y", alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(loc="center left", bbox_to_anchor=(1.0, 0.5), frameon=False)
    figure.savefig(path, format="png")


def _number(value: float | None) -> float:
    """A gap where there is no value."""
    return math.nan if value is None else value
