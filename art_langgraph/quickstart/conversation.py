"""A trajectory as people read it: who said what, which tool was called with what.

In: a trajectory of the shop. Out: its turns, from the customer's message on. Left out: how they are
drawn, and making them safe to draw: the text is as the model wrote it.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from art_core.trajectories import Trajectory


@dataclass(frozen=True)
class Turn:
    """One message."""

    who: str
    """"customer", "assistant", or the name of the tool that answers."""
    text: str
    calls: tuple[str, ...] = ()
    """Tool calls, like `refund(order="A102", amount="20.50")`."""


def turns_of(trajectory: Trajectory) -> list[Turn]:
    """The turns from the customer's message on; the system prompt and the examples are left out."""
    messages = trajectory.messages()
    asked = [i for i, message in enumerate(messages) if message["role"] == "user"]
    names: dict[str, str] = {}
    turns = []
    for message in messages[asked[-1] if asked else 0 :]:
        calls = message.get("tool_calls") or []
        names |= {call["id"]: call["function"]["name"] for call in calls}
        tool = names.get(message.get("tool_call_id", ""), "tool")
        role = str(message["role"])
        turns.append(
            Turn(
                who={"user": "customer", "tool": tool}.get(role, role),
                text=str(message.get("content") or ""),
                calls=tuple(_spelled(call["function"]) for call in calls),
            )
        )
    return turns


def _spelled(function: dict[str, Any]) -> str:
    """A call as Python would write it; arguments that are no object stay as they are."""
    text = str(function["arguments"])
    try:
        given = json.loads(text)
    except ValueError:
        given = None
    if isinstance(given, dict):
        text = ", ".join(f"{key}={json.dumps(v, ensure_ascii=False)}" for key, v in given.items())
    return f"{function['name']}({text})"
