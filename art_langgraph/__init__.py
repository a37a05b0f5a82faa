"""Train small open models to do the job of a LangGraph agent.

`ChatArt` stands in the graph, `rollout` plays it; the rest is `import art_core as art`.
"""

from art_langgraph.callbacks import TrajectoryCallbackHandler
from art_langgraph.chat_model import ChatArt
from art_langgraph.chosen_nodes import UnknownNodes
from art_langgraph.free_code import capture, init_chat_model, wrap_rollout
from art_langgraph.playing import NotPlayable
from art_langgraph.rollout import rollout
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
