"""Middleware that chooses, repeats or adds model calls: each of them is a record of its own."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from langchain.agents import create_agent
from langchain.agents.middleware import (
    LLMToolEmulator,
    LLMToolSelectorMiddleware,
    ModelCallLimitMiddleware,
    ModelFallbackMiddleware,
    ModelRequest,
    ModelResponse,
    ModelRetryMiddleware,
    SummarizationMiddleware,
    dynamic_prompt,
    wrap_model_call,
)
from langchain_core.messages import AIMessage

from art_langgraph import ChatArt
from tests.langgraph.proofs.evidence import histories, origins, said
from tests.langgraph.proofs.house import House, Talk, look, uses


def looks(talk: Talk) -> str:
    """Look twice, then answer."""
    seen = talk.count("tool")
    return uses("look", q=str(seen)) if seen < 2 else f"I saw {seen}."


async def test_models_chosen_call_by_call_are_policies_of_their_own() -> None:
    small, large = ChatArt(role="small"), ChatArt(role="large")

    @wrap_model_call
    async def choose(
        request: ModelRequest, handler: Callable[[ModelRequest], Awaitable[ModelResponse]]
    ) -> ModelResponse:
        model = large if len(request.messages) > 2 else small
        return await handler(request.override(model=model))

    agent = create_agent(ChatArt(role="unused"), [look], middleware=[choose])
    with House(looks) as house:
        trajectory = await house.play(agent, models={"large": house.target("helper")})
    assert [(c.model, c.step, c.origin.role) for c in trajectory.calls] == [
        ("agent", 3, "small"),
        ("helper", 1, "large"),
        ("helper", 1, "large"),
    ]
    assert [talk.model for talk in house.asked] == ["agent", "helper", "helper"]


async def test_a_summary_is_a_call_and_begins_a_new_history() -> None:
    """Trigger at 4 messages, keep 1: before the third model call, the first turns are summed up."""

    summing = SummarizationMiddleware(
        ChatArt(role="summary"),
        trigger=("messages", 4),
        keep=("messages", 2),
        summary_prompt="Sum up: seen {messages}",
    )

    def script(talk: Talk) -> str:
        if talk.user.startswith("Sum up"):
            return "Looked at 0."
        return looks(talk) if "Looked at 0." not in talk.user else "Done."

    with House(script) as house:
        trajectory = await house.play(create_agent(ChatArt(), [look], middleware=[summing]))
    first, second = uses("look", q="0"), uses("look", q="1")
    assert [said(c) for c in trajectory.calls] == [first, second, "Looked at 0.", "Done."]
    assert histories(trajectory) == sorted([[first, second], ["Looked at 0."], ["Done."]])
    assert origins(trajectory, "node", "role")[2] == (
        "SummarizationMiddleware.before_model",
        "summary",
    )


async def test_a_model_call_that_failed_is_tried_again_by_the_middleware() -> None:
    again = ModelRetryMiddleware(max_retries=2, initial_delay=0.0, jitter=False)
    agent = create_agent(ChatArt(max_retries=0), [look], middleware=[again])
    with House(looks) as house:
        house.faults.extend([503, 503])
        trajectory = await house.play(agent)
    assert [c.error is None for c in trajectory.calls] == [False, False, True, True, True]
    assert "HTTP 503" in str(trajectory.calls[0].error)
    assert len(histories(trajectory)) == 1
    assert len({c.origin.run_id for c in trajectory.calls}) == 5
    assert trajectory.ended == "completed"


async def test_an_http_attempt_that_failed_is_tried_again_by_the_client() -> None:
    with House(looks) as house:
        house.faults.append(503)
        trajectory = await house.play(create_agent(ChatArt(max_retries=1), [look]))
    assert [c.error is None for c in trajectory.calls] == [False, True, True, True]
    assert trajectory.calls[0].origin == trajectory.calls[1].origin


async def test_an_answer_that_was_rejected_is_still_a_sample() -> None:
    """A wrapper asks twice and keeps the second answer: the first one was sampled too."""

    @wrap_model_call
    async def twice(
        request: ModelRequest, handler: Callable[[ModelRequest], Awaitable[ModelResponse]]
    ) -> ModelResponse:
        await handler(request)
        return await handler(request)

    words = iter(["bad", "good"])
    with House(lambda _: next(words)) as house:
        trajectory = await house.play(create_agent(ChatArt(), [], middleware=[twice]))
    assert histories(trajectory) == [["bad"], ["good"]]
    assert trajectory.state["messages"][-1].content == "good"


async def test_the_model_to_fall_back_on_is_recorded_beside_the_one_that_failed() -> None:
    fallback = ModelFallbackMiddleware(ChatArt(role="backup"))
    agent = create_agent(ChatArt(max_retries=0), [], middleware=[fallback])
    with House(lambda _: "ok") as house:
        house.faults.append(500)
        trajectory = await house.play(agent, models={"backup": house.target("helper")})
    assert [(c.model, c.error is None, c.origin.role) for c in trajectory.calls] == [
        ("agent", False, None),
        ("helper", True, "backup"),
    ]


@pytest.mark.parametrize(("behavior", "ended"), [("end", "completed"), ("error", "error")])
async def test_a_limit_of_calls_ends_the_run_and_keeps_them(behavior: Any, ended: str) -> None:
    limit = ModelCallLimitMiddleware(run_limit=2, exit_behavior=behavior)
    agent = create_agent(ChatArt(), [look], middleware=[limit])
    with House(lambda talk: uses("look", q=str(talk.count("tool")))) as house:
        trajectory = await house.play(agent)
    assert trajectory.ended == ended
    assert histories(trajectory) == [[uses("look", q="0"), uses("look", q="1")]]
    assert trajectory.reward == (None if ended == "completed" else 0.0)


async def test_a_model_that_selects_tools() -> None:
    def see(q: str) -> str:
        """See something."""
        return q

    selector = LLMToolSelectorMiddleware(model=ChatArt(role="selector"), max_tools=1)

    def says(talk: Talk) -> str:
        if "most relevant tools" in talk.system:
            return '{"tools": ["look"]}'
        return looks(talk)

    agent = create_agent(ChatArt(), [look, see], middleware=[selector])
    with House(says) as house:
        trajectory = await house.play(agent)
    roles = [c.origin.role for c in trajectory.calls]
    assert roles == ["selector", None] * 3
    policy = [c for c in trajectory.calls if c.origin.role is None]
    assert {t["function"]["name"] for c in policy for t in c.request["tools"]} == {"look"}


async def test_a_model_that_plays_the_tools() -> None:
    emulator = LLMToolEmulator(model=ChatArt(role="world"))

    def says(talk: Talk) -> str:
        return looks(talk) if "<tools>" in talk.system else "as if seen"

    agent = create_agent(ChatArt(), [look], middleware=[emulator])
    with House(says) as house:
        trajectory = await house.play(agent)
    assert origins(trajectory, "node", "role") == [
        ("model", None),
        ("tools", "world"),
        ("model", None),
        ("tools", "world"),
        ("model", None),
    ]
    answers = [uses("look", q="0"), uses("look", q="1"), "I saw 2."]
    assert histories(trajectory) == sorted([answers, ["as if seen"], ["as if seen"]])


async def test_a_prompt_that_changes_at_every_call_gives_branches() -> None:
    @dynamic_prompt
    def counted(request: ModelRequest) -> str:
        return f"Message {len(request.messages)}."

    with House(looks) as house:
        trajectory = await house.play(create_agent(ChatArt(), [look], middleware=[counted]))
    assert len(histories(trajectory)) == 3
    assert not house.service.drifts


async def test_an_answer_that_middleware_rewrites_is_trained_as_it_was_sampled() -> None:
    """What the graph keeps is its own business; the next prompt has the new text, as text."""

    @wrap_model_call
    async def polite(
        request: ModelRequest, handler: Callable[[ModelRequest], Awaitable[ModelResponse]]
    ) -> ModelResponse:
        response = await handler(request)
        message = response.result[0]
        assert isinstance(message, AIMessage)
        changed = message.model_copy(update={"content": f"Please: {message.content}"})
        return ModelResponse(result=[changed])

    def says(talk: Talk) -> str:
        return f"Hm.\n{uses('look', q='0')}" if talk.role == "user" else "Yes."

    with House(says) as house:
        trajectory = await house.play(create_agent(ChatArt(), [look], middleware=[polite]))
    assert trajectory.state["messages"][-1].content == "Please: Yes."
    assert histories(trajectory) == [[f"Hm.\n{uses('look', q='0')}"], ["Yes."]]
    assert "Please: Hm." in house.asked[1].turns[2][1]
