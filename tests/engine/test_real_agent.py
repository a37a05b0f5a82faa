"""A LangGraph agent on SmolLM2 behind the embedded engine: no drift, and what was sampled is what
the trainer computes.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch", reason="art-langgraph[train] is not installed")

import torch
from langchain.agents import create_agent
from langchain.agents.middleware import ModelCallLimitMiddleware
from langchain_core.messages import AIMessage, AnyMessage, HumanMessage
from langgraph.graph import END, START, MessagesState, StateGraph

from art_core.batch.forest import plant
from art_core.batch.sample import Sample
from art_core.capture import Target
from art_core.config import SamplingConfig
from art_core.nn.lora import LoraModel
from art_core.training.logprobs import entry_logprobs
from art_core.trajectories import Trajectory
from art_langgraph import ChatArt, rollout
from tests.engine.conformance import JSON_FORMAT, ids_of, logprobs_of, prompt_of
from tests.engine.house import NAMES, House, Plain, write_adapters

pytestmark = pytest.mark.model

MEAN, WORST = 1e-5, 2e-4
"""Nats, in float32: DESIGN section 8. Batch noise alone is 5e-5."""


@pytest.fixture(scope="module")
def adapters(smollm2: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return write_adapters(smollm2, tmp_path_factory.mktemp("adapters"), scale=0.02)


@pytest.fixture(scope="module")
def house(smollm2: Path, adapters: dict[str, Path]) -> Iterator[House]:
    made = House(smollm2, adapters)
    yield made
    made.close()


@pytest.fixture(scope="module")
def plain(smollm2: Path, adapters: dict[str, Path]) -> Plain:
    return Plain(smollm2, adapters)


def check_bounds(differences: Any) -> None:
    assert np.mean(differences) <= MEAN
    assert np.max(differences) <= WORST


# The model alone


async def test_an_answer_by_a_schema_is_json(house: House, plain: Plain) -> None:
    served = house.served(plain, noise=WORST)
    question = "Is a sunny holiday good or bad? Are you sure? Answer in JSON."
    done = await served.chat("base", question, response_format=JSON_FORMAT, max_tokens=60)
    answer = json.loads(done.choices[0].message.content or "")
    assert answer.keys() == {"mood", "sure"}
    record_id = done.system_fingerprint or ""
    assert house.records.get([record_id])[record_id, 0].sampling.distorted


async def test_it_ends_its_turn_by_itself(house: House, plain: Plain) -> None:
    served = house.served(plain, noise=WORST)
    words = [("user", "Capital of France?"), ("assistant", "Paris."), ("user", "Of Italy?")]
    messages = [{"role": role, "content": content} for role, content in words]
    done = await served.chat("base", messages=messages, temperature=0, max_tokens=40)
    assert done.choices[0].finish_reason == "stop"
    assert ids_of(done)[-1] in served.eos_ids


async def test_adapters_side_by_side_are_what_peft_computes(house: House, plain: Plain) -> None:
    served = house.served(plain, noise=WORST)
    names = ["base", *NAMES]
    done = await asyncio.gather(
        *(served.chat(name, f"Question {i}?", max_tokens=12) for i, name in enumerate(names))
    )
    differences: list[float] = []
    for name, answer in zip(names, done, strict=True):
        ids = ids_of(answer)
        logprobs = plain.logits(name, prompt_of(answer), ids).log_softmax(-1)
        wanted = logprobs[torch.arange(len(ids)), ids].tolist()
        differences += [abs(a - b) for a, b in zip(logprobs_of(answer), wanted, strict=True)]
    check_bounds(differences)


# An agent


def order_status(order_id: str) -> str:
    """Status of an order"""
    return f"Order {order_id} is shipped."


def refund(order_id: str, amount: str) -> str:
    """Refund an amount"""
    return f"Refunded {amount}, reference R{order_id}."


def example(message: str, tool: str, **arguments: str) -> list[AnyMessage]:
    call = json.dumps({"name": tool, "arguments": arguments})
    return [HumanMessage(message), AIMessage(f"<tool_call>\n{call}\n</tool_call>")]


EXAMPLES = [
    *example("Please refund 20.50 for order 1002.", "refund", order_id="1002", amount="20.50"),
    *example("Where is my order 1001?", "order_status", order_id="1001"),
]
QUESTIONS = ["Where is my order 1007?", "Please refund 9.99 for order 1004."]


def asked(state: MessagesState) -> int:
    """How many questions the customer has asked."""
    return sum(m.type == "human" for m in state["messages"]) - len(EXAMPLES) // 2


def conversation() -> Any:
    """A support agent and a customer who asks twice, whatever the answers are."""
    support = create_agent(
        ChatArt(),
        [order_status, refund],
        system_prompt="Call one tool, then say what it returned.",
        middleware=[ModelCallLimitMiddleware(run_limit=2)],  # a small model may call for ever
    )

    def customer(state: MessagesState) -> dict[str, Any]:
        return {"messages": [HumanMessage(QUESTIONS[asked(state)])]}

    def what_next(state: MessagesState) -> str:
        return END if asked(state) == len(QUESTIONS) else "customer"

    graph = StateGraph(MessagesState)
    graph.add_node("customer", customer)
    graph.add_node("support", support)
    graph.add_edge(START, "customer")
    graph.add_edge("customer", "support")
    graph.add_conditional_edges("support", what_next)
    return graph.compile()


@pytest.fixture(scope="module")
def played(house: House) -> list[Trajectory]:
    """Four rollouts side by side, at least two calls each, under the adapter that is live."""
    sampling = SamplingConfig(temperature=0.8, max_tokens=40)
    target = Target(house.server.base_url, "none", "agent", sampling, trains=True)
    graph = conversation()

    async def play() -> list[Trajectory]:
        return await asyncio.gather(
            *(
                rollout(graph, {"messages": EXAMPLES}, model=target, rollout_id=f"agent-{i}")
                for i in range(4)
            )
        )

    return asyncio.run(play())


def test_the_agent_played_and_called_tools(played: list[Trajectory]) -> None:
    assert [trajectory.ended for trajectory in played] == ["completed"] * 4
    assert all(len(trajectory.calls) >= 2 for trajectory in played)
    assert all(call.trainable for trajectory in played for call in trajectory.calls)
    assert {call.step for trajectory in played for call in trajectory.calls} == {2}
    reasons = [call.finish_reason for trajectory in played for call in trajectory.calls]
    assert "tool_calls" in reasons


def test_every_prompt_goes_on_from_the_call_before(house: House, played: list[Trajectory]) -> None:
    assert house.service.drifts == {}
    for trajectory in played:
        for before, call in zip(trajectory.calls, trajectory.calls[1:], strict=False):
            assert before.prompt_ids is not None
            assert before.sampled_ids is not None
            assert call.prompt_ids is not None
            head = np.concatenate([before.prompt_ids, before.sampled_ids])
            np.testing.assert_array_equal(call.prompt_ids[: len(head)], head)


async def test_the_trainer_computes_the_logprobs_that_were_sampled(
    house: House, played: list[Trajectory]
) -> None:
    """All calls as one tree, through the trainer's own attention and head."""
    calls = [(call, i) for i, trajectory in enumerate(played) for call in trajectory.calls]
    samples = [
        Sample.of(call, advantage=1.0, weight=1.0, index=n, trajectory=i)
        for n, (call, i) in enumerate(calls)
    ]
    [row] = plant(samples, 16_384)
    assert not row.entries.distorted.any()

    def compute(model: LoraModel) -> list[float]:
        model.activate("live")
        with torch.inference_mode():
            logprobs: list[float] = entry_logprobs(model, row)[0].tolist()
        return logprobs

    trained = await house.engine.exclusive(compute)
    differences = np.abs(np.array(trained) - row.entries.logprob)
    assert len(differences) > 100
    check_bounds(differences)
