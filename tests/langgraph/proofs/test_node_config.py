"""What a node does with its config: its own callbacks, metadata, none at all, or a chain's."""

from __future__ import annotations

from typing import Any

import pytest
from langchain_core.callbacks import BaseCallbackHandler
from langchain_core.prompts import ChatPromptTemplate
from langchain_core.runnables import RunnableConfig, RunnableLambda
from langgraph.graph import START, MessagesState, StateGraph

from art_langgraph import ChatArt
from tests.langgraph.proofs.evidence import histories, origins, said
from tests.langgraph.proofs.house import House, Talk


def one_node(node: Any) -> Any:
    graph: Any = StateGraph(MessagesState)
    graph.add_node("node", node)
    graph.add_edge(START, "node")
    return graph


def echo(talk: Talk) -> str:
    return f"re {talk.last}"


class Mine(BaseCallbackHandler):
    """A user's own handler."""

    def __init__(self) -> None:
        self.ended = 0

    def on_llm_end(self, *_: Any, **__: Any) -> None:
        self.ended += 1


CONFIGS: dict[str, Any] = {
    "none": lambda own, config: None,
    "own callbacks": lambda own, config: {"callbacks": [own]},
    "empty": lambda own, config: {"callbacks": [], "metadata": {}, "tags": []},
    "the node's": lambda own, config: config,
    "another run name": lambda own, config: {"run_name": "mine", "configurable": {"a": 1}},
}


@pytest.mark.parametrize("kind", CONFIGS)
@pytest.mark.parametrize("is_async", [True, False])
async def test_a_nodes_own_config_loses_nothing(kind: str, is_async: bool) -> None:
    own = Mine()

    def node(state: Any, config: RunnableConfig) -> Any:
        given = CONFIGS[kind](own, config)
        return {"messages": [ChatArt().invoke(state["messages"], given)]}

    async def anode(state: Any, config: RunnableConfig) -> Any:
        given = CONFIGS[kind](own, config)
        return {"messages": [await ChatArt().ainvoke(state["messages"], given)]}

    with House(echo) as house:
        trajectory = await house.play(one_node(anode if is_async else node))
    assert histories(trajectory) == [["re go"]]
    assert own.ended == (kind == "own callbacks")
    assert origins(trajectory, "attempt", "graph_step") == [(1, 1)]


async def test_a_model_inside_a_chain_inside_a_node() -> None:
    """Prompt | model | function, bound, with a config of its own: still one call with its node."""
    prompt = ChatPromptTemplate.from_messages([("system", "Be {mood}."), ("user", "{q}")])
    piped = (
        prompt
        | ChatArt().bind(stop=["END"]).with_config({"tags": ["piped"], "callbacks": [Mine()]})
        | RunnableLambda(lambda message: message)
    )

    async def node(state: Any) -> Any:
        return {"messages": [await piped.ainvoke({"mood": "kind", "q": "hi"})]}

    with House(lambda talk: f"{talk.system} hello END more") as house:
        trajectory = await house.play(one_node(node))
    assert [said(c) for c in trajectory.calls] == ["Be kind. hello END"]
    assert trajectory.state["messages"][-1].content == "Be kind. hello "
    assert origins(trajectory, "node") == [("node",)]
    assert trajectory.calls[0].sampling.stop == ("END",)
