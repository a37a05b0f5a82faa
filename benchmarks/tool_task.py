"""A small job for a model of 135M: of three tools call the right one, and copy what it needs.

In: a seed. Out: wishes to train on and others, in other words, to hold out; rollouts of one LLM
call each through plain `art_core`, and their reward, which is a function of the call alone. Left
out: the loop (algorithm_run.py), and a warm-up: the quickstart's supervised step on labelled
examples is not made here, so all that is learned is learned by the algorithm. Examples of each tool
stand in the prompt instead, since what is never sampled is never learned.
"""

from __future__ import annotations

import json
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from openai.types.chat import ChatCompletionMessage

import art_core as art

GROUPS = 6
"""Wishes a step."""
GROUP_SIZE = 8
STEPS = 12
HELD_OUT = 36
MAX_TOKENS = 48
TOOLS = ("lamp", "heater", "timer")
_ARGUMENTS = {"lamp": ("room", "percent"), "heater": ("room", "degrees"), "timer": ("minutes",)}
PARTS = {"tool": 0.3, "values": 0.3, "right": 0.4}
"""What each part of the reward is worth."""

_ROOMS = (
    "kitchen", "hall", "office", "bath", "library", "studio", "school", "shop", "tower", "store",
)  # fmt: skip
_NUMBERS = {"percent": (11, 99), "degrees": (15, 28), "minutes": (3, 58)}
WORDINGS: Mapping[str, Mapping[str, tuple[str, ...]]] = {
    "train": {
        "lamp": (
            "Dim the lamp in the {room} to {percent}.",
            "Light the {room} at {percent} percent.",
            "Lamps in the {room}: {percent} percent.",
            "A lamp at {percent} percent for the {room}, please.",
            "It is dark in the {room}, I need {percent} percent light.",
            "Put the {room} lamp on {percent}.",
        ),
        "heater": (
            "Make the {room} {degrees} degrees.",
            "Warm the {room} up to {degrees} degrees.",
            "I am cold. {degrees} degrees in the {room}, please.",
            "Heating in the {room}: {degrees} degrees.",
            "The {room} should have {degrees} degrees.",
            "It is cold. Bring the {room} to {degrees} degrees.",
        ),
        "timer": (
            "Wake me in {minutes} minutes.",
            "Set a timer for {minutes} minutes.",
            "Tell me when {minutes} minutes are over.",
            "{minutes} minutes for the eggs.",
            "Remind me in {minutes} minutes.",
            "Count down from {minutes} minutes.",
        ),
    },
    "held-out": {
        "lamp": (
            "Turn the lamp in the {room} to {percent} percent.",
            "I want {percent} percent light in the {room}.",
            "Too bright! Only {percent} in the {room}.",
            "Set the {room} lights to {percent}.",
        ),
        "heater": (
            "Heat the {room} to {degrees} degrees.",
            "It is freezing in the {room}, I want {degrees} degrees.",
            "Keep the {room} at {degrees} degrees.",
            "Set the temperature of the {room} to {degrees}.",
        ),
        "timer": (
            "Ring in {minutes} minutes.",
            "The cake needs {minutes} minutes.",
            "Call me after {minutes} minutes.",
            "Start a timer of {minutes} minutes.",
        ),
    },
}
"""By split and tool; no wording is in both splits."""

SPECS: list[dict[str, Any]] = [
    {
        "type": "function",
        "function": {
            "name": tool,
            "description": {"lamp": "Lamps", "heater": "Heating", "timer": "Alarm"}[tool],
            "parameters": {
                "type": "object",
                "properties": {
                    name: {"type": "string" if name == "room" else "integer"}
                    for name in _ARGUMENTS[tool]
                },
            },
        },
    }
    for tool in TOOLS
]


@dataclass(frozen=True)
class Wish:
    """One scenario."""

    message: str
    tool: str
    arguments: dict[str, str]
    """As they must be when written out."""


def written(tool: str, arguments: Mapping[str, str]) -> str:
    """A call as the model writes it."""
    given = {name: v if name == "room" else int(v) for name, v in arguments.items()}
    call = json.dumps({"name": tool, "arguments": given})
    return f"<tool_call>\n{call}\n</tool_call>"


EXAMPLES: list[dict[str, Any]] = [
    {"role": "system", "content": "You run a house. Answer each wish with one tool call."},
    *(
        message
        for wish, tool, arguments in (
            ("The bedroom at 22 degrees, please.", "heater", {"room": "bedroom", "degrees": "22"}),
            ("Give me an alarm in 35 minutes.", "timer", {"minutes": "35"}),
            ("Lamp in the porch: 60.", "lamp", {"room": "porch", "percent": "60"}),
            ("Let me know in 12 minutes.", "timer", {"minutes": "12"}),
            ("Bright lamp in the shed, 85 percent.", "lamp", {"room": "shed", "percent": "85"}),
            ("Warmth for the sauna, 27 degrees.", "heater", {"room": "sauna", "degrees": "27"}),
        )
        for message in (
            {"role": "user", "content": wish},
            {"role": "assistant", "content": written(tool, arguments)},
        )
    ),
]


def make_wishes(seed: int, split: str, count: int) -> list[Wish]:
    """Wishes of a split, the tools in turn; no wording of a tool comes again before all have."""
    rng = random.Random(f"{seed}/{split}")
    decks: dict[str, list[str]] = {tool: [] for tool in TOOLS}
    wishes = []
    for i in range(count):
        tool = TOOLS[i % len(TOOLS)]
        if not decks[tool]:
            wordings = WORDINGS[split][tool]
            decks[tool] = rng.sample(wordings, len(wordings))
        drawn = {"room": rng.choice(_ROOMS)}
        drawn |= {name: str(rng.randint(*span)) for name, span in _NUMBERS.items()}
        wanted = {name: drawn[name] for name in _ARGUMENTS[tool]}
        wishes.append(Wish(decks[tool].pop().format(**drawn), tool, wanted))
    return wishes


def judge(wish: Wish, message: ChatCompletionMessage) -> dict[str, float]:
    """The reward's parts, each 0 to 1. "values" pays for copying, whatever the tool and the names:
    a ladder from what a small model does by chance to what it should do."""
    calls = message.tool_calls or []
    parts = dict.fromkeys(PARTS, 0.0)
    if len(calls) != 1 or calls[0].type != "function":
        return parts
    given = {k: str(v) for k, v in json.loads(calls[0].function.arguments).items()}
    copied = sum(value in given.values() for value in wish.arguments.values())
    parts["tool"] = float(calls[0].function.name == wish.tool)
    parts["values"] = copied / max(len(wish.arguments), len(given))
    parts["right"] = parts["tool"] * (given == wish.arguments)
    return parts


def total(parts: Mapping[str, float]) -> float:
    """The reward."""
    return sum(PARTS[name] * value for name, value in parts.items())


async def fulfil(
    model: art.TrainableModel[Any], wish: Wish, *, greedy: bool = False
) -> art.Trajectory:
    """One rollout."""
    settings: dict[str, Any] = {"temperature": 0} if greedy else {}
    messages: list[Any] = [*EXAMPLES, {"role": "user", "content": wish.message}]
    specs: list[Any] = SPECS
    completion = await model.openai_client().chat.completions.create(
        model=model.name, messages=messages, tools=specs, max_tokens=MAX_TOKENS, **settings
    )
    parts = judge(wish, completion.choices[0].message)
    right = float(total(parts) == 1.0)
    return art.Trajectory(
        messages_and_choices=[*messages, completion.choices[0]],
        reward=total(parts),
        metrics={**parts, "success": right, f"success/{wish.tool}": right},
    )


def of_step(wishes: Sequence[Wish], step: int) -> list[Wish]:
    """The wishes of a training step, counted from 0: the next ones in turn."""
    return [wishes[(step * GROUPS + i) % len(wishes)] for i in range(GROUPS)]
