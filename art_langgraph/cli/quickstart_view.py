"""What the quickstart shows in a terminal, a pipe or a file: words, figures, one conversation.

In: recipes, trajectories, scores, reports. Out: lines and tables. What the model wrote is shown
letter for letter. Left out: bars (`art_core.progress`), and the report's page.
"""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import art_core as art
from art_core import checkpoints
from art_core.rundir import RunDir
from art_langgraph.cli.console import Part, console, say, show_table
from art_langgraph.quickstart.conversation import turns_of
from art_langgraph.quickstart.customers import PARTS, TOOLS
from art_langgraph.quickstart.journal import Journal
from art_langgraph.quickstart.recipe import Recipe
from art_langgraph.quickstart.report import machine
from art_langgraph.quickstart.score import Score
from art_langgraph.quickstart.wording import duration, number, percent
from art_langgraph.visible import visible

_BUILT = {"agent": "LangChain's create_agent", "stategraph": "a StateGraph"}
_WHO = max(map(len, (*TOOLS, "assistant"))) + 2
"""Characters of the column that says who speaks."""
_ROOM = 30
"""Characters of a line that a narrow terminal must leave for a text to be set in."""
_BAR = 20
"""Characters of a reward's bar."""


def introduce(recipe: Recipe, run: RunDir, journal: Journal) -> None:
    """What will happen, and how long it takes."""
    say(("art-langgraph quickstart", "bold"))
    if journal.finished:
        say(f"The run in {visible(str(run.path))} is finished; --fresh starts a new one.")
        return
    cores = machine()["usable_cores"]
    say(
        f"A shop's support agent ({_BUILT[recipe.graph]}, tools {', '.join(TOOLS)}) on "
        f"{visible(recipe.base_model)}, trained here, on {cores} {_plural(cores, 'core')}:"
    )
    if recipe.lessons:
        say(f" 0. it is warmed up: one supervised step on {recipe.lessons} labelled examples")
    say(f" 1. it serves {recipe.held_out} held-out customers")
    say(
        f" 2. it learns by reinforcement, in at most {recipe.max_steps} "
        f"{_plural(recipe.max_steps, 'step')} of {recipe.groups} customers, "
        f"{recipe.group_size} rollouts each"
    )
    say(f" 3. it serves the same {recipe.held_out} again")
    say(
        f"That takes about {recipe.minutes} {_plural(recipe.minutes, 'minute')} on 2 cores, after "
        "the model is fetched. Ctrl-C is safe: every step is saved, and the same command goes on."
    )
    if steps := checkpoints.steps(run):
        learned = steps[-1] - recipe.warm_up_steps
        say((f"Going on from step {learned}, saved in {visible(str(run.path))}.", "bold"))


@dataclass
class Narrator:
    """Shows what a session does; a `session.Watcher`."""

    recipe: Recipe
    bars: bool
    _told: int | None = None
    """Place of the held-out customer whose conversation is told before and after."""

    def warmed_up(self, result: art.TrainResult, seconds: float) -> None:
        """What the labelled examples took."""
        loss = result.metrics["loss"]
        say(
            ("Warm-up", "bold"),
            f": {self.recipe.lessons} labelled examples, {duration(seconds)}, loss {loss:.2f}",
        )

    def first(self, group: art.TrajectoryGroup) -> None:
        """The very first conversation, with its reward in parts."""
        say(("\nThe first customer, before any reinforcement learning:", "bold"))
        _show_conversations(group)

    def examined(self, when: str, score: Score, groups: Sequence[art.TrajectoryGroup]) -> None:
        """The held-out customers' share; and one who was served wrong before, also after."""
        self._show_score(when, score)
        if when == "before":
            wrong = (i for i, g in enumerate(groups) for t in g if not t.metrics["success"])
            self._told = next(wrong, None)
            if self._told:  # the first has just been shown
                say(("\nA customer who was served wrong:", "bold"))
                _show_conversations(groups[self._told])
        elif self._told is not None:
            say(("\nThe customer who was served wrong, after the training:", "bold"))
            _show_conversations(groups[self._told])

    def _show_score(self, when: str, score: Score) -> None:
        of_tools = ", ".join(f"{name} {percent(t.success)}" for name, t in score.tools.items())
        say(
            (f"Held-out {when}: {percent(score.success)} served right", "bold"),
            f" ({of_tools}), mean reward {score.reward:.2f}",
            _failed(score.failures),
        )

    def checked(self, score: Score) -> None:
        """How a check came out."""
        right = f"{percent(score.success)} of {score.customers} other customers served right"
        say(f"check: {right}", _failed(score.failures))

    def step(self, number: int, figures: Mapping[str, float], result: art.TrainResult) -> None:
        """A step's figures: one line, or three where there is somebody to look."""
        learned = result.metrics.get("step_seconds")
        took = [figures["gather_seconds"], *([] if learned is None else [learned])]
        head = f"step {number:>2}/{self.recipe.max_steps}"
        reward = f"reward {figures['reward']:.2f}"
        parts = "  ".join(f"{name} {figures[name]:.2f}" for name in PARTS)
        tools = "  ".join(_tool_shares(figures))
        seconds = " + ".join(f"{s:.0f}" for s in took) + " s"
        if console().is_terminal:
            say((head, "bold"), "  ", *_bar(figures["reward"]), (f"  {reward}", "bold"),
                (f"  {seconds}", "dim"), _failed(figures["failures"]))  # fmt: skip
            say((f"            {parts}", "dim"))
            say((f"            right: {tools}", "dim"))
        else:
            failed = _failed(figures["failures"])
            say(f"{head}  {reward}  {parts}  right: {tools}  {seconds}", failed)
        if not result.trained:
            reasons = "; ".join(result.reasons)
            say((f"            nothing was learned: {visible(reasons)}", "yellow"))


def show_result(report: dict[str, Any], run: RunDir, out: Path) -> None:
    """The table at the end, and where everything lies."""
    constant = report["constant_answer_baseline"]
    rows = [
        ["held-out served right", percent(report["heldout_before"]),
         percent(report["heldout_after"])],
        *([f"  {visible(name)}", percent(tool["before"]), percent(tool["after"])]
          for name, tool in report["per_tool"].items()),
        ["held-out reward", number(report["heldout_reward_before"]),
         number(report["heldout_reward_after"])],
        ["training reward", number(report["reward_first"]), number(report["reward_last"])],
    ]  # fmt: skip
    say()
    show_table(["", "before", "after"], rows)
    say(
        f"{report['steps']} {_plural(report['steps'], 'step')} in {duration(report['seconds'])}. "
        f"One and the same answer for everybody would serve {percent(constant['success'])} right, "
        f"reward {constant['reward']:.2f}.",
        _failed(report["failures"]),
    )
    say(("report  ", "dim"), visible(str(out / "index.html")))
    folder = run.checkpoints / f"{report['checkpoint']:04d}"
    where = str(folder) if folder.exists() else f"step {report['checkpoint']}, on the server"
    say(("model   ", "dim"), visible(where))
    say(("the loop that did it, one page  ", "dim"), "art_langgraph/quickstart/loop.py")


def _show_conversations(group: art.TrajectoryGroup) -> None:
    """A group's conversations, each with its reward in parts."""
    for trajectory in group:
        _show_conversation(trajectory)
        parts = " + ".join(
            f"{name} {worth * trajectory.metrics[name]:.2f}" for name, worth in PARTS.items()
        )
        reward = number(trajectory.reward)
        say((f"  {'reward':<{_WHO}}", "dim"), (reward, "bold"), f" = {parts}")
    say()


def _show_conversation(trajectory: art.Trajectory) -> None:
    for turn in turns_of(trajectory):
        who = f"  {visible(turn.who):<{_WHO}}"
        if turn.text or not turn.calls:
            _show_turn(who, turn.text or "(nothing)")
        for call in turn.calls:
            _show_turn(who, f"calls {call}")
    if trajectory.ended != "completed":
        _show_turn(f"  {'ended':<{_WHO}}", trajectory.ended)


def _show_turn(who: str, text: str) -> None:
    """One turn; the lines after the first are set in as far as the first."""
    out = console()
    lines = visible(text).split("\n")
    if out.is_terminal and (room := out.width - len(who)) >= _ROOM:
        lines = [part for line in lines for part in textwrap.wrap(line, room) or [""]]
    say((who, "dim"), ("\n" + " " * len(who)).join(lines))


def _bar(share: float) -> Iterator[Part]:
    glyph, rest = ("#", ".") if console().options.ascii_only else ("━", "─")
    done = round(_BAR * min(max(share, 0.0), 1.0))
    yield (glyph * done, "green")
    yield (rest * (_BAR - done), "dim")


def _tool_shares(figures: Mapping[str, float]) -> Iterator[str]:
    for name in TOOLS:
        if (share := figures.get(f"success/{name}")) is not None:
            yield f"{name} {percent(share)}"


def _failed(count: float) -> Part:
    """Nothing, or how many rollouts failed."""
    return (f"  {count:.0f} {_plural(round(count), 'rollout')} failed", "bold red") if count else ""


def _plural(count: int, word: str) -> str:
    return word if count == 1 else f"{word}s"
