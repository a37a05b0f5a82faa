"""A LangChain agent on our own endpoint: every id that the engine sampled arrives in its call.

The engine is scripted (bytes as tokens, constant logprobs), so that what must be recorded is known.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from langchain.agents import create_agent
from langchain_openai import ChatOpenAI

from art_core.capture import Target
from art_core.config import SamplingConfig
from art_core.engine.base import GenerateRequest
from art_core.engine.openai_routes import ChatService, ModelRegistry, create_app
from art_core.engine.scripted import LOGPROB, ScriptedEngine
from art_core.engine.serving import LoopbackServer
from art_core.records import RecordStore
from art_langgraph import ChatArt, capture, rollout

CALL = '<tool_call>\n{"name": "add", "arguments": {"a":  2, "b": 3}}\n</tool_call>'
ASK: Any = {"messages": [("user", "2+3?")]}
END_OF_TURN = 257


def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


def script(prompt: str, request: GenerateRequest) -> str:
    """Ask for the sum; then say it. Spells JSON in a way that no library would dump it again."""
    return "It is 5." if "<|im_start|>tool\n" in prompt else f"I add.\n{CALL}"


class Served:
    """The endpoint and what is behind it."""

    def __init__(self, context_length: int = 32_768) -> None:
        self.engine = ScriptedEngine(script, context_length=context_length)
        self.records = RecordStore(None)
        registry = ModelRegistry("scripted")
        self.server = LoopbackServer(
            create_app(ChatService(self.engine, self.records, registry)), api_key="k"
        )

    def target(self, key: str = "k") -> Target:
        return Target(self.server.base_url, key, "scripted", SamplingConfig(), trains=True)


@pytest.fixture
def served() -> Iterator[Served]:
    served = Served()
    with served.server:
        yield served


async def test_an_agents_calls_are_the_engines_tokens(served: Served) -> None:
    trajectory = await rollout(create_agent(ChatArt(), [add]), ASK, model=served.target())
    first, second = trajectory.calls
    assert trajectory.state["messages"][-1].content == "It is 5."
    assert first.sampled_ids is not None
    assert second.sampled_ids is not None
    assert first.sampled_ids.tolist() == [*f"I add.\n{CALL}".encode(), END_OF_TURN]
    assert second.sampled_ids.tolist() == [*b"It is 5.", END_OF_TURN]
    assert first.logprobs is not None
    np.testing.assert_allclose(first.logprobs, LOGPROB, rtol=1e-6)
    assert [c.trainable for c in trajectory.calls] == [True, True]
    assert [c.sampling.temperature for c in trajectory.calls] == [1.0, 1.0]
    assert all(c.sampling.seed is not None for c in trajectory.calls)


async def test_the_second_prompt_goes_on_from_the_first_answer(served: Served) -> None:
    """Token-in through a real agent: LangChain dumps the arguments again, the ids stay."""
    trajectory = await rollout(create_agent(ChatArt(), [add]), ASK, model=served.target())
    first, second = trajectory.calls
    assert first.prompt_ids is not None
    assert first.sampled_ids is not None
    assert second.prompt_ids is not None
    before = np.concatenate([first.prompt_ids, first.sampled_ids])
    np.testing.assert_array_equal(second.prompt_ids[: len(before)], before)
    assert '"a": 2, "b": 3' in str(second.request["messages"])  # spelled otherwise by LangChain


async def test_calls_and_the_servers_records_are_the_same(served: Served) -> None:
    trajectory = await rollout(create_agent(ChatArt(), [add]), ASK, model=served.target())
    assert trajectory.rollout_id is not None
    records = served.records.of_rollout(trajectory.rollout_id)
    assert [r.key for r in records] == [c.key for c in trajectory.calls]
    for record, kept in zip(records, trajectory.calls, strict=True):
        np.testing.assert_array_equal(record.prompt_ids, kept.prompt_ids)
        np.testing.assert_array_equal(record.sampled_ids, kept.sampled_ids)
        assert record.sampling == kept.sampling
        assert record.message == kept.message


async def test_a_streaming_agent_gives_the_same_calls(served: Served) -> None:
    plain = await rollout(create_agent(ChatArt(), [add]), ASK, model=served.target())
    agent = create_agent(ChatArt(streaming=True), [add])
    stream = await rollout(agent, ASK, model=served.target())
    assert [c.error for c in stream.calls] == [None, None]
    for one, other in zip(plain.calls, stream.calls, strict=True):
        np.testing.assert_array_equal(one.sampled_ids, other.sampled_ids)
        np.testing.assert_array_equal(one.prompt_ids, other.prompt_ids)
        assert one.message["content"] == other.message["content"]
        assert other.request["stream"] is True


async def test_many_rollouts_at_once(served: Served) -> None:
    agent = create_agent(ChatArt(), [add])
    target = served.target()
    played = await asyncio.gather(*(rollout(agent, ASK, model=target) for _ in range(16)))
    assert [len(t.calls) for t in played] == [2] * 16
    assert all(c.trainable for t in played for c in t.calls)
    assert len({c.record_id for t in played for c in t.calls}) == 32


async def test_a_prompt_that_does_not_fit_ends_the_rollout_as_the_policys_fault() -> None:
    served = Served(context_length=64)
    with served.server:
        trajectory = await rollout(create_agent(ChatArt(), [add]), ASK, model=served.target())
    assert (trajectory.ended, trajectory.reward) == ("context_overflow", 0.0)
    assert [c.trainable for c in trajectory.calls] == [False]
    assert "context_length_exceeded" in str(trajectory.calls[0].error)


@pytest.mark.parametrize("streaming", [False, True])
async def test_a_stock_chat_model_leaves_the_record_id_by_which_it_can_be_joined(
    served: Served, streaming: bool
) -> None:
    """A graph whose chat model must stay, with only the callback handler attached."""
    stock = ChatOpenAI(
        base_url=served.server.base_url, api_key="k", model="scripted", streaming=streaming
    )
    trajectory = await rollout(create_agent(stock, [add]), ASK, model=served.target())
    found = served.records.get([c.record_id for c in trajectory.calls])
    assert sorted(found) == sorted(c.key for c in trajectory.calls)
    assert len(found) == 2


async def test_a_wrong_key_says_so(served: Served) -> None:
    with pytest.raises(Exception, match="401"):
        async with capture(served.target(key="wrong")):
            await ChatArt(max_retries=0).ainvoke("hi")
