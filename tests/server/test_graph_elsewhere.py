"""A graph that runs none of our code, as on LangGraph Platform: ChatOpenAI at a rollout's URL."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from langchain_core.messages import HumanMessage
from langchain_openai import ChatOpenAI
from langgraph.graph import END, START, MessagesState, StateGraph
from pydantic import SecretStr

import art_core as art
from tests.core.small_run import CONFIG
from tests.server.server_process import KEY, ServerProcess

pytest.importorskip("fastapi", reason="art-langgraph[server] is not installed")


@pytest.fixture(scope="module")
def server(tiny_llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    with ServerProcess(tmp_path_factory.mktemp("server"), tiny_llama) as process:
        yield process


def graph(llm: ChatOpenAI) -> Any:
    """Two nodes, each of which asks the model once."""

    def ask(state: MessagesState) -> dict[str, Any]:
        return {"messages": [llm.invoke(state["messages"])]}

    def again(state: MessagesState) -> dict[str, Any]:
        said = llm.invoke([*state["messages"], HumanMessage("And then?")])
        return {"messages": [HumanMessage("And then?"), said]}

    builder = StateGraph(MessagesState)
    builder.add_node("ask", ask)
    builder.add_node("again", again)
    builder.add_edge(START, "ask")
    builder.add_edge("ask", "again")
    builder.add_edge("again", END)
    return builder.compile()


@pytest.mark.parametrize("streaming", [False, True])
async def test_its_calls_are_a_trajectory_that_trains(
    server: ServerProcess, tiny_llama: Path, streaming: bool
) -> None:
    async with server.backend() as backend:
        model = server.model(tiny_llama, name=f"graph-{streaming}".lower())
        await model.register(backend)
        trajectories = []
        for reward in (0.0, 1.0):
            url = await backend.rollout_url(model)
            llm = ChatOpenAI(
                base_url=url.base_url,
                api_key=SecretStr(KEY),
                model=model.name,
                streaming=streaming,
                max_tokens=6,
            )
            await graph(llm).ainvoke({"messages": [HumanMessage("Hi")]})
            trajectory = await backend.trajectory(url.rollout_id)
            first, second = trajectory.calls
            assert first.trainable
            assert second.trainable
            assert second.messages[0] == first.messages[0]
            assert first.prompt_ids is not None
            assert first.sampled_ids is not None
            assert second.prompt_ids is not None
            told = [*first.prompt_ids.tolist(), *first.sampled_ids.tolist()]
            assert second.prompt_ids.tolist()[: len(told)] == told, "token in, without our client"
            trajectory.reward = reward
            trajectories.append(trajectory)
        result = await model.train([art.TrajectoryGroup(trajectories)], CONFIG)
    assert (result.step, result.trained) == (1, True)
