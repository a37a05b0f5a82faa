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
    from art_langgraph.chosen_nodes import UnknownNodes
    from art_langgraph.free_code import capture, init_chat_model, wrap_rollout
    from art_langgraph.playing import NotPlayable
    from art_langgraph.rollouts import rollout
    from art_langgraph.sources import open_graph
    from art_langgraph.told import LostCalls, NoModelCalls
    from art_langgraph.training_payload import SamplingOverridden

__all__ = [
    "ChatArt",
    "LostCalls",
    "NoModelCalls",
    "NotPlayable",
    "SamplingOverridden",
    "TrajectoryCallbackHandler",
    "UnknownNodes",
    "capture",
    "init_chat_model",
    "open_graph",
    "rollout",
    "wrap_rollout",
]


if not TYPE_CHECKING:  # a checker that saw this would take any name for granted
    _HOMES = {
        "ChatArt": "chat_model",
        "LostCalls": "told",
        "NoModelCalls": "told",
        "NotPlayable": "playing",
        "SamplingOverridden": "training_payload",
        "TrajectoryCallbackHandler": "callbacks",
        "UnknownNodes": "chosen_nodes",
        "capture": "free_code",
        "init_chat_model": "free_code",
        "open_graph": "sources",
        "rollout": "rollouts",
        "wrap_rollout": "free_code",
    }
    """Where each name is defined. No module may have the name of another."""

    def __getattr__(name: str) -> object:
        if name not in _HOMES:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        value = getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
        globals()[name] = value
        return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
