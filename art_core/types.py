"""Aliases under ART's names: `Messages`, `Tools`, `MessagesAndChoices`."""

from __future__ import annotations

from typing import Any, TypeAlias

from openai.types.chat.chat_completion import Choice

Message: TypeAlias = dict[str, Any]
Messages: TypeAlias = list[Message]
Tools: TypeAlias = list[dict[str, Any]]
MessagesAndChoices: TypeAlias = list[Message | Choice]

__all__ = ["Choice", "Message", "Messages", "MessagesAndChoices", "Tools"]
