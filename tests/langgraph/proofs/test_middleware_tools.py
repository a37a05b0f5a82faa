"""Middleware around tools and messages: retries, limits, edited history, hidden text, approval."""

from __future__ import annotations

from typing import Any

import pytest
from langchain.agents import create_agent
from langchain.agents.middleware import (
    ClearToolUsesEdit,
    ContextEditingMiddleware,
    HumanInTheLoopMiddleware,
    PIIMiddleware,
    TodoListMiddleware,
    ToolCallLimitMiddleware,
    ToolRetryMiddleware,
)
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.types import Command

from art_langgraph import ChatArt, capture
from tests.langgraph.proofs.evidence import histories, origins
from tests.langgraph.proofs.house import House, Talk, look, uses


def looks(talk: Talk) -> str:
    """Look three times, then answer."""
    seen = talk.count("tool")
    return uses("look", q=str(seen)) if seen < 3 else f"I saw {seen}."


FOUR_TURNS = [*(uses("look", q=str(i)) for i in range(3)), "I saw 3."]


async def test_a_tool_that_is_tried_again_costs_no_model_call() -> None:
    tries: list[str] = []

    def look(q: str) -> str:
        """Look something up."""
        tries.append(q)
        if len(tries) == 1:
            raise ConnectionError("gone")
        return f"seen {q}"

    again = ToolRetryMiddleware(max_retries=1, initial_delay=0.0, jitter=False)
    with House(looks) as house:
        trajectory = await house.play(create_agent(ChatArt(), [look], middleware=[again]))
    assert tries == ["0", "0", "1", "2"]
    assert histories(trajectory) == [FOUR_TURNS]


async def test_a_limit_of_tool_calls_is_told_to_the_model() -> None:
    limit = ToolCallLimitMiddleware(run_limit=1, exit_behavior="continue")
    with House(looks) as house:
        trajectory = await house.play(create_agent(ChatArt(), [look], middleware=[limit]))
    assert histories(trajectory) == [FOUR_TURNS]
    assert len(trajectory.metadata["graph"]["tools"]) == 1


async def test_cleared_tool_results_branch_where_the_history_changed() -> None:
    """Keep one result: the third and fourth prompts show older ones as "[cleared]"."""
    clear = ContextEditingMiddleware(edits=[ClearToolUsesEdit(trigger=1, keep=1)])
    with House(looks) as house:
        trajectory = await house.play(create_agent(ChatArt(), [look], middleware=[clear]))
    assert histories(trajectory) == sorted([FOUR_TURNS[:2], FOUR_TURNS[2:3], FOUR_TURNS[3:]])
    shown = [text for role, text in house.asked[3].turns if role == "tool"]
    assert shown == ["[cleared]", "[cleared]", "seen 2"]
    assert not house.service.drifts


async def test_hidden_text_is_not_what_was_sampled() -> None:
    """The graph's state says [REDACTED_EMAIL]; the policy is trained on what it wrote."""
    hide = PIIMiddleware("email", apply_to_input=True, apply_to_output=True)
    with House(lambda _: "Write to a@b.no") as house:
        trajectory = await house.play(create_agent(ChatArt(), [], middleware=[hide]), "I am c@d.no")
    assert trajectory.state["messages"][-1].content == "Write to [REDACTED_EMAIL]"
    assert histories(trajectory) == [["Write to a@b.no"]]
    assert house.asked[0].user == "I am [REDACTED_EMAIL]"


async def test_a_list_of_things_to_do_is_kept_by_the_model_itself() -> None:
    todo = uses("write_todos", todos=[{"content": "look", "status": "pending"}])

    def says(talk: Talk) -> str:
        return todo if talk.role == "user" else "On it."

    with House(says) as house:
        agent = create_agent(ChatArt(), [], middleware=[TodoListMiddleware()])
        trajectory = await house.play(agent)
    assert trajectory.state["todos"] == [{"content": "look", "status": "pending"}]
    assert histories(trajectory) == [[todo, "On it."]]


# --- approval

ONE_LOOK = uses("look", q="a")
DECISIONS: dict[str, tuple[dict[str, Any], str]] = {
    "approve": ({"type": "approve"}, "seen a"),
    "edit": ({"type": "edit", "edited_action": {"name": "look", "args": {"q": "b"}}}, "seen b"),
    "reject": ({"type": "reject", "message": "Never."}, "Never."),
}
"""Decision, and how what the tool then says ends."""


@pytest.mark.parametrize("decision", DECISIONS)
async def test_a_tool_call_waits_for_approval_and_the_conversation_goes_on(decision: str) -> None:
    """Asked and answered in one scope: one trajectory, one history, the call sampled once."""
    given, result = DECISIONS[decision]

    def says(talk: Talk) -> str:
        return ONE_LOOK if talk.role == "user" else "Done."

    approval = HumanInTheLoopMiddleware({"look": True})
    agent = create_agent(ChatArt(), [look], middleware=[approval], checkpointer=InMemorySaver())
    thread: Any = {"configurable": {"thread_id": "t"}}
    ask: Any = {"messages": [("user", "go")]}
    with House(says) as house:
        async with capture(house.target()) as trajectory:
            waiting = await agent.ainvoke(ask, thread)
            state = await agent.ainvoke(Command(resume={"decisions": [given]}), thread)
        house.prove(trajectory)
    (question,) = waiting["__interrupt__"]
    assert question.value["action_requests"][0]["args"] == {"q": "a"}
    (told,) = [m.content for m in state["messages"] if m.type == "tool"]
    assert told.endswith(result)
    assert histories(trajectory) == [[ONE_LOOK, "Done."]]
    assert origins(trajectory, "node", "attempt") == [("model", 1), ("model", 1)]


async def test_a_run_that_waits_for_approval_is_a_trajectory_that_says_so() -> None:
    approval = HumanInTheLoopMiddleware({"look": True})
    agent = create_agent(ChatArt(), [look], middleware=[approval], checkpointer=InMemorySaver())
    with House(lambda talk: ONE_LOOK if talk.role == "user" else "Done.") as house:
        asked = await house.play(agent)
        thread = {"configurable": {"thread_id": asked.metadata["graph"]["thread_id"]}}
        answered = await house.play(
            agent, Command(resume={"decisions": [{"type": "approve"}]}), config=thread
        )
    assert (asked.ended, answered.ended) == ("interrupted", "completed")
    assert [histories(t) for t in (asked, answered)] == [[[ONE_LOOK]], [["Done."]]]
    assert len({c.key for t in (asked, answered) for c in t.calls}) == 2


async def test_approval_given_on_the_way_and_later_is_one_trajectory_and_one_history() -> None:
    """Answered by `on_interrupt`, or by a resume that continues the trajectory: the same ids."""
    approval = HumanInTheLoopMiddleware({"look": True})
    agent = create_agent(ChatArt(), [look], middleware=[approval], checkpointer=InMemorySaver())
    decision = {"decisions": [{"type": "approve"}]}
    with House(lambda talk: ONE_LOOK if talk.role == "user" else "Done.") as house:
        at_once = await house.play(agent, on_interrupt=lambda _: decision)
        waiting = await house.play(agent)
        assert (waiting.ended, len(waiting.calls)) == ("interrupted", 1)
        later = await house.play(agent, Command(resume=decision), continue_=waiting)
    assert [t.ended for t in (at_once, later)] == ["completed", "completed"]
    assert [histories(t) for t in (at_once, later)] == [[[ONE_LOOK, "Done."]]] * 2
    assert not house.service.drifts
