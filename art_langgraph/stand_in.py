"""The model that `ChatArt(otherwise=...)` hands a call to where no policy is found.

In: a chat model of any provider, and the settings of a call as ChatOpenAI has them. Out: the
settings in that model's own terms.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from langchain_core.language_models import BaseChatModel
from langchain_openai.chat_models.base import BaseChatOpenAI

from art_core.errors import ConfigError

_OPENAI_ONLY = ("tools", "tool_choice", "parallel_tool_calls", "strict")


def settings_for(other: BaseChatModel, settings: Mapping[str, Any]) -> dict[str, Any]:
    """The settings of a call, as `other` takes them.

    Raises:
        ConfigError: a `response_format`, which only OpenAI's own classes know.
    """
    if isinstance(other, BaseChatOpenAI):
        return dict(settings)
    if "response_format" in settings:
        raise ConfigError(
            "otherwise= does not know response_format",
            got=type(other).__name__,
            fix='Use with_structured_output(..., method="function_calling").',
        )
    plain = {name: value for name, value in settings.items() if name not in _OPENAI_ONLY}
    if not settings.get("tools"):
        return plain
    choice = _plain_choice(settings.get("tool_choice"))
    bound = other.bind_tools(settings["tools"], tool_choice=choice)
    return {**getattr(bound, "kwargs", {}), **plain}


def _plain_choice(choice: Any) -> Any:
    """A tool choice as every chat model's `bind_tools` knows it."""
    if isinstance(choice, Mapping):
        return choice["function"]["name"]
    return "any" if choice == "required" else choice
