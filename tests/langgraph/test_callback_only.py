"""A graph whose chat model must stay: a stock ChatOpenAI at our endpoint, trained token for token.

In most tests the engine is scripted (bytes as tokens, constant logprobs), so that what must be
joined is known; in one the tiny model is really trained.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from langchain.agents import create_agent
from langchain_core.caches import InMemoryCache
from langchain_openai import ChatOpenAI
from langgraph.graph import START, MessagesState, StateGraph

import art_core as art
from art_core.capture import open_scope
from art_core.engine.base import GenerateRequest
from art_core.engine.scripted import LOGPROB
from art_core.errors import NoTrainableTokens
from art_core.records import RecordStore
from art_langgraph import ChatArt, LostCalls, NoModelCalls, TrajectoryCallbackHandler, rollout
from tests.core.small_run import CONFIG, small_model
from tests.langgraph.scripted_shop import ScriptedBackend, written
from tests.stub_endpoint import completion, endpoint

ASK: Any = {"messages": [("user", "2+3?")]}
END_OF_TURN = 257
CALL = written("add", {"a": "2", "b": "3"})


def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


def script(prompt: str, request: GenerateRequest) -> str:
    """Ask for the sum; then say it."""
    return "It is 5." if "<|im_start|>tool\n" in prompt else CALL


@asynccontextmanager
async def registered(tmp_path: Path) -> AsyncIterator[tuple[art.TrainableModel[Any], Any]]:
    model: art.TrainableModel[Any] = art.TrainableModel(
        name="agent", project="p", base_model="scripted", base_path=str(tmp_path)
    )
    async with ScriptedBackend(script) as backend:
        await model.register(backend)
        yield model, backend


def stock(model: art.TrainableModel[Any], **settings: Any) -> ChatOpenAI:
    """What the user has, pointed at our endpoint."""
    return ChatOpenAI(
        base_url=model.inference_base_url,
        api_key="key",
        model=model.name,
        max_retries=0,
        **settings,
    )


@pytest.mark.parametrize("version", ["v0", "v1"])
@pytest.mark.parametrize("streaming", [False, True])
async def test_its_calls_get_the_ids_that_the_server_kept(
    tmp_path: Path, streaming: bool, version: str
) -> None:
    """Whether LangChain shows its content as text, or as blocks that hold the calls too."""
    async with registered(tmp_path) as (model, _):
        llm = stock(model, streaming=streaming, output_version=version)
        agent = create_agent(llm, [add])
        trajectory = await rollout(agent, ASK, model=model)
    first, second = trajectory.calls
    assert first.sampled_ids is not None
    assert second.sampled_ids is not None
    assert first.sampled_ids.tolist() == [*CALL.encode(), END_OF_TURN]
    assert second.sampled_ids.tolist() == [*b"It is 5.", END_OF_TURN]
    assert first.logprobs is not None
    np.testing.assert_allclose(first.logprobs, LOGPROB, rtol=1e-6)
    assert [(c.model, c.step, c.trainable) for c in trajectory.calls] == [("agent", 0, True)] * 2
    assert trajectory.completeness == art.Completeness(
        answered=2, seen=2, kept=2, tokens=len(first.sampled_ids) + len(second.sampled_ids)
    )
    assert len(trajectory.chosen_records() or ()) == 2


async def test_the_handler_tells_who_asked_and_what_the_tools_did(tmp_path: Path) -> None:
    async with registered(tmp_path) as (model, _):
        trajectory = await rollout(create_agent(stock(model), [add]), ASK, model=model)
    origins = [c.origin for c in trajectory.calls]
    assert [(o.node, o.graph_step, o.attempt) for o in origins] == [
        ("model", 1, 1),
        ("model", 3, 1),
    ]
    assert all(o.run_id and o.parent_run_id and o.run_id != o.parent_run_id for o in origins)
    assert all(str(o.namespace).startswith("model:") and o.task_path for o in origins)
    (tool,) = trajectory.metadata["graph"]["tools"]
    assert (tool["name"], tool["node"], tool["error"]) == ("add", "tools", None)
    assert tool["namespace"].startswith("tools:")
    assert tool["run_id"] is not None
    assert tool["parent_run_id"] is not None
    assert tool["call_id"] == trajectory.calls[0].message["tool_calls"][0]["id"]


async def test_a_handler_of_ones_own_is_joined_when_asked(tmp_path: Path) -> None:
    """No `rollout`: a scope, the handler in the graph's config, and `model.join`."""
    async with registered(tmp_path) as (model, _):
        agent = create_agent(stock(model), [add])
        with open_scope() as scope:
            handler = TrajectoryCallbackHandler()
            await agent.ainvoke(ASK, config={"callbacks": [handler]})
            trajectory = art.Trajectory(calls=list(scope.calls))
        assert dict(trajectory.completeness.left_out) == {"no ids": 2}
        await model.join(trajectory)
        await model.join([art.TrajectoryGroup([trajectory])])
    assert [c.trainable for c in trajectory.calls] == [True, True]
    assert handler.nodes == ["model", "tools"]


async def test_both_paths_give_one_record(tmp_path: Path) -> None:
    """A ChatArt and a stock model in one graph, one handler: two calls, each recorded once."""
    async with registered(tmp_path) as (model, _):
        other = stock(model)

        def node(state: Any) -> Any:
            said = ChatArt().invoke(state["messages"])
            return {"messages": [said, other.invoke("2+3?")]}

        graph: Any = StateGraph(MessagesState)
        graph.add_node("node", node)
        graph.add_edge(START, "node")
        trajectory = await rollout(graph, ASK, model=model)
    assert len(trajectory.calls) == 2
    assert len({c.record_id for c in trajectory.calls}) == 2
    assert all(c.trainable for c in trajectory.calls)
    assert [bool(c.response) for c in trajectory.calls] == [True, False]


async def test_a_record_that_the_server_has_lost_is_said(tmp_path: Path) -> None:
    async with registered(tmp_path) as (model, backend):
        whole, backend.records = backend.records, RecordStore(None)  # the disk was lost
        trajectory = await rollout(create_agent(stock(model), [add]), ASK, model=model)
        backend.records = whole
    assert dict(trajectory.completeness.left_out) == {"no server record": 2}


async def test_a_cached_answer_is_a_replay_and_no_sample(tmp_path: Path) -> None:
    """LangChain's cache answers the second rollout: its call is context, and says why."""
    async with registered(tmp_path) as (model, _):
        agent = create_agent(stock(model, cache=InMemoryCache()), [])
        ask: Any = {"messages": [{"role": "user", "content": "hi", "id": "1"}]}
        played = [await rollout(agent, ask, model=model) for _ in range(2)]
    assert [[c.left_out for c in t.calls] for t in played] == [[None], ["cache replay"]]
    assert [t.completeness.kept for t in played] == [1, 0]
    assert played[0].calls[0].message["content"] == played[1].calls[0].message["content"]


async def test_calls_that_no_callback_saw_are_counted_loudly(tmp_path: Path) -> None:
    """Case 013, fallback: bare threads carry no callbacks; the rollout is not called whole."""
    async with registered(tmp_path) as (model, _):
        llm = stock(model)

        def node(state: Any) -> Any:
            with ThreadPoolExecutor() as executor:
                return {"messages": list(executor.map(llm.invoke, ["2+3?", "3+4?"]))}

        graph: Any = StateGraph(MessagesState)
        graph.add_node("node", node)
        graph.add_node("ask", lambda state: {"messages": [llm.invoke("4+5?")]})
        graph.add_edge(START, "node")
        graph.add_edge("node", "ask")
        with pytest.warns(LostCalls, match=r"2 answers in the last state.*nodes that ran: node"):
            trajectory = await rollout(graph, ASK, model=model)
        seen_before: Any = {"messages": trajectory.state["messages"]}
        again = await rollout(create_agent(llm, []), seen_before, model=model)
    assert len(trajectory.calls) == 1
    assert not trajectory.completeness.is_whole
    assert again.completeness.is_whole


async def test_many_rollouts_at_once_do_not_mix(tmp_path: Path) -> None:
    async with registered(tmp_path) as (model, _):
        agent = create_agent(stock(model), [add])
        played = await asyncio.gather(*(rollout(agent, ASK, model=model) for _ in range(16)))
    assert [len(t.calls) for t in played] == [2] * 16
    assert len({c.record_id for t in played for c in t.calls}) == 32
    assert all(c.trainable for t in played for c in t.calls)


async def test_a_stock_client_is_really_trained(tiny_llama: Path, tmp_path: Path) -> None:
    """The whole way: rollouts of a stock ChatOpenAI, joined, one step learned on the CPU."""
    pytest.importorskip("torch", reason="art-langgraph[train] is not installed")
    model = small_model(tiny_llama, tmp_path)
    async with art.LocalBackend(show_progress=False) as backend:
        await model.register(backend)
        agent = create_agent(stock(model), [])

        async def play(reward: float) -> art.Trajectory:
            trajectory = await rollout(agent, ASK, model=model)
            trajectory.reward = reward
            return trajectory

        group = art.TrajectoryGroup(play(reward) for reward in (1.0, 0.0))
        groups = await art.gather_trajectory_groups([group], progress=False)
        result = await model.train(groups, CONFIG)
    assert result.trained
    assert result.step == 1
    assert all(t.completeness.is_whole for t in groups[0])


async def test_a_step_without_any_token_says_which_half_is_missing(
    tiny_llama: Path, tmp_path: Path
) -> None:
    pytest.importorskip("torch", reason="art-langgraph[train] is not installed")
    model = small_model(tiny_llama, tmp_path)
    async with art.LocalBackend(show_progress=False) as backend:
        await model.register(backend)
        agent = create_agent(stock(model), [])
        played = [await rollout(agent, ASK, model=model) for _ in range(2)]
        for trajectory, reward in zip(played, (1.0, 0.0), strict=True):
            trajectory.reward = reward
            trajectory.calls = [_of_no_record(call) for call in trajectory.calls]
            trajectory.messages_and_choices = []
        with pytest.raises(NoTrainableTokens, match="left out: 1 no server record"):
            await model.train([art.TrajectoryGroup(played)], CONFIG)


def _of_no_record(call: art.ModelCall) -> art.ModelCall:
    return replace(
        call, record_id="0" * 20, prompt_ids=None, sampled_ids=None, logprobs=None, left_out=None
    )


async def test_a_graph_at_another_provider_warns_with_its_address(tmp_path: Path) -> None:
    async with registered(tmp_path) as (model, _):
        with endpoint([completion("hi", None, prompt_ids=None)]) as hosted:
            other = ChatOpenAI(base_url=hosted.base_url, api_key="k", model="gpt-4o")
            with pytest.warns(NoModelCalls, match=rf"gpt-4o \(ChatOpenAI at {hosted.base_url}\)"):
                trajectory = await rollout(create_agent(other, []), ASK, model=model)
    assert dict(trajectory.completeness.left_out) == {"other model": 1}
