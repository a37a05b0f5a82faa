"""Train small open models to do the job of a LangGraph agent.

`ChatArt` stands in the graph, `rollout` plays it; the rest is `import art_core as art`.
"""

from art_langgraph.callbacks import TrajectoryCallbackHandler
from art_langgraph.chat_model import ChatArt
from art_langgraph.rollout import (
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
