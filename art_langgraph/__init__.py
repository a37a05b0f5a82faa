"""Train small open models to do the job of a LangGraph agent.

`ChatArt` stands in the graph, `rollout` plays it; the rest is `import art_core as art`. LangGraph
and LangChain are loaded when one of these names is first touched, so that the command starts fast.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from art_langgraph.callbacks import TrajectoryCallbackHandler
    from art_langgraph.chat_model import ChatArt
    from art_langgraph.rollouts import (
        NoModelCalls,
        capture,
        init_chat_model,
        rollout,
        wrap_rollout,
    )
    from art_langgraph.training_payload import SamplingOverridden

__all__ = [
    "ChatArt",
    "NoModelCalls",
    "SamplingOverridden",
    "TrajectoryCallbackHandler",
    "capture",
    "init_chat_model",
    "rollout",
    "wrap_rollout",
]


if not TYPE_CHECKING:  # a checker that saw this would take any name for granted
    _HOMES = {
        "ChatArt": "chat_model",
        "SamplingOverridden": "training_payload",
        "TrajectoryCallbackHandler": "callbacks",
    }
    """Where a name is defined, if not in `rollouts`. No module may have the name of another."""

    def __getattr__(name: str) -> object:
        if name not in __all__:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        value = getattr(import_module(f"{__name__}.{_HOMES.get(name, 'rollouts')}"), name)
        globals()[name] = value
        return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
