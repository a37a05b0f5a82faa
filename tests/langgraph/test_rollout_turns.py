"""Rollouts of several turns: interrupts that are answered, and trajectories that are continued."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from langchain.agents import create_agent
from langchain_core.messages import AIMessage
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.func import entrypoint
from langgraph.graph import START, MessagesState, StateGraph
from langgraph.types import Command, Interrupt, interrupt

from art_core.errors import ConfigError, RolloutFailure
from art_core.trajectories import Trajectory, choice_key
from art_core.types import Choice
from art_langgraph import ChatArt, NotPlayable, rollout
from tests.stub_endpoint import Asked, completion, endpoint

ASK: Any = {"messages": [("user", "1+2?")]}


def asks(question: str) -> Any:
    """A node that says something, then asks a human."""

    def node(state: Any) -> Any:
        return {"messages": [AIMessage(f"{question}: {interrupt(question)}")]}

    return node


def human(*questions: str, saver: Any = None) -> Any:
    """A model's node, then one for each question, all of them side by side."""
    graph: Any = StateGraph(MessagesState)
    graph.add_node("model", lambda state: {"messages": [ChatArt().invoke(state["messages"])]})
    graph.add_edge(START, "model")
    for question in questions:
        graph.add_node(question, asks(question))
        graph.add_edge("model", question)
    return graph.compile(checkpointer=saver or InMemorySaver())


def said(trajectory: Trajectory) -> list[str]:
    return sorted(m.content for m in trajectory.state["messages"][2:])


def sampled(trajectory: Trajectory) -> list[list[int] | None]:
    return [None if c.sampled_ids is None else c.sampled_ids.tolist() for c in trajectory.calls]


# --- interrupts


@pytest.mark.parametrize("is_async", [True, False])
async def test_an_interrupt_is_answered(is_async: bool) -> None:
    asked: list[Any] = []

    def answer(interrupts: Sequence[Interrupt]) -> Any:
        asked.extend(i.value for i in interrupts)
        return "yes"

    async def aanswer(interrupts: Sequence[Interrupt]) -> Any:
        return answer(interrupts)

    with endpoint([completion("a", [1])]) as stub:
        trajectory = await rollout(
            human("sure?"),
            ASK,
            model=stub.target(),
            on_interrupt=aanswer if is_async else answer,
        )
    assert asked == ["sure?"]
    assert (trajectory.ended, said(trajectory)) == ("completed", ["sure?: yes"])
    assert "interrupts" not in trajectory.metadata["graph"]
    assert sampled(trajectory) == [[1]]


async def test_a_dict_answers_one_interrupt_as_it_is() -> None:
    """A value that looks like a map of ids is no map of ids."""
    with endpoint([completion("a", [1])]) as stub:
        trajectory = await rollout(
            human("sure?"), ASK, model=stub.target(), on_interrupt=lambda _: {"decisions": ["ok"]}
        )
    assert said(trajectory) == ["sure?: {'decisions': ['ok']}"]


async def test_several_interrupts_at_once_are_answered_by_id() -> None:
    with endpoint([completion("a", [1])]) as stub:
        trajectory = await rollout(
            human("left", "right"),
            ASK,
            model=stub.target(),
            on_interrupt=lambda those: {i.id: f"not {i.value}" for i in those},
        )
    assert said(trajectory) == ["left: not left", "right: not right"]


async def test_one_of_several_may_be_answered_first() -> None:
    seen: list[list[str]] = []

    def answer(interrupts: Sequence[Interrupt]) -> Any:
        seen.append(sorted(i.value for i in interrupts))
        return {interrupts[0].id: "one"} if len(interrupts) > 1 else "two"

    with endpoint([completion("a", [1])]) as stub:
        trajectory = await rollout(
            human("left", "right"), ASK, model=stub.target(), on_interrupt=answer
        )
    assert trajectory.ended == "completed"
    assert (len(seen), seen[0], len(seen[1])) == (2, ["left", "right"], 1)


async def test_a_command_resumes_as_it_says() -> None:
    def answer(interrupts: Sequence[Interrupt]) -> Any:
        return Command(resume={i.id: "by command" for i in interrupts})

    with endpoint([completion("a", [1])]) as stub:
        trajectory = await rollout(human("q"), ASK, model=stub.target(), on_interrupt=answer)
    assert said(trajectory) == ["q: by command"]


async def test_one_value_for_several_interrupts_is_refused_with_their_ids() -> None:
    with endpoint([completion("a", [1])]) as stub, pytest.raises(RolloutFailure) as raised:
        await rollout(
            human("left", "right"), ASK, model=stub.target(), on_interrupt=lambda _: "yes"
        )
    assert isinstance(raised.value.__cause__, ConfigError)
    assert "asked 2 things at once" in str(raised.value)
    assert "'left'" in str(raised.value)
    assert sampled(raised.value.trajectory) == [[1]]


async def test_interrupts_without_end_are_bounded() -> None:
    def node(state: Any) -> Any:
        return Command(goto="node", update={"messages": [AIMessage(interrupt("again?"))]})

    graph: Any = StateGraph(MessagesState)
    graph.add_node("node", node)
    graph.add_edge(START, "node")
    answered: list[int] = []

    def answer(interrupts: Sequence[Interrupt]) -> str:
        answered.append(len(interrupts))
        return "yes"

    with endpoint([]) as stub, pytest.warns(match="without a call"):
        trajectory = await rollout(
            graph.compile(checkpointer=InMemorySaver()),
            ASK,
            model=stub.target(),
            on_interrupt=answer,
            max_interrupts=3,
        )
    assert answered == [1, 1, 1]
    assert trajectory.ended == "interrupted"
    assert trajectory.logs == ["the graph asked again after 3 interrupts were answered"]


async def test_a_negative_bound_is_refused() -> None:
    with pytest.raises(ConfigError, match="max_interrupts: got -1"):
        await rollout(human("q"), ASK, on_interrupt=lambda _: "yes", max_interrupts=-1)


async def test_all_interrupts_are_told_where_nobody_answers() -> None:
    with endpoint([completion("a", [1])]) as stub:
        trajectory = await rollout(human("left", "right"), ASK, model=stub.target())
    assert trajectory.ended == "interrupted"
    told = trajectory.metadata["graph"]["interrupts"]
    assert sorted(i["value"] for i in told) == ["'left'", "'right'"]
    assert "on_interrupt=" in trajectory.logs[0]


@pytest.mark.parametrize("given", ["class", "instance", "graph"])
async def test_on_interrupt_needs_a_checkpointer_which_may_be_given(given: str) -> None:
    def node(state: Any) -> Any:
        reply = ChatArt().invoke(state["messages"])
        return {"messages": [reply, AIMessage(str(interrupt("q")))]}

    graph: Any = StateGraph(MessagesState)
    graph.add_node("node", node)
    graph.add_edge(START, "node")
    with endpoint([completion("a", [1])] * 2) as stub:
        if given == "graph":
            with pytest.raises(NotPlayable, match="needs a graph with a checkpointer"):
                await rollout(graph, ASK, model=stub.target(), on_interrupt=lambda _: "yes")
            assert stub.requests == []
            return
        saver: Any = InMemorySaver if given == "class" else InMemorySaver()
        trajectory = await rollout(
            graph, ASK, model=stub.target(), on_interrupt=lambda _: "yes", checkpointer=saver
        )
    assert trajectory.state["messages"][-1].content == "yes"
    assert sampled(trajectory) == [[1], [1]]  # LangGraph runs the node again from its start


# --- the next turn of a user


def counts(asked: Asked) -> dict[str, Any]:
    """Says how many messages it was asked with; prompt ids grow as the messages do."""
    number = len(asked.body["messages"])
    prompt = [index for turn in range(number) for index in ((50,) if turn % 2 == 0 else (turn,))]
    return completion(str(number), [number], prompt_ids=prompt)


async def test_a_trajectory_is_continued_in_its_thread() -> None:
    agent = create_agent(ChatArt(), [], checkpointer=InMemorySaver())
    with endpoint(counts) as stub:
        target = stub.target()
        trajectory = await rollout(agent, ASK, model=target, metadata={"scenario": "s"})
        again: Any = {"messages": [("user", "and then?")]}
        same = await rollout(agent, again, model=target, continue_=trajectory, metadata={"turn": 2})
    assert same is trajectory
    assert sampled(trajectory) == [[1], [3]]
    assert trajectory.metadata["scenario"] == "s"
    assert trajectory.metadata["turn"] == 2
    assert [m.content for m in trajectory.state["messages"]] == ["1+2?", "1", "and then?", "3"]
    kept = [choice_key(i) for i in trajectory.messages_and_choices if isinstance(i, Choice)]
    assert kept == [c.key for c in trajectory.calls]
    assert trajectory.additional_histories == []
    assert {a.headers["x-art-rollout"] for a in stub.requests} == {trajectory.rollout_id}


async def test_an_interrupted_trajectory_is_continued_by_its_answer() -> None:
    graph = human("sure?")
    with endpoint([completion("a", [1])]) as stub:
        trajectory = await rollout(graph, ASK, model=stub.target())
        assert trajectory.ended == "interrupted"
        await rollout(graph, Command(resume="yes"), model=stub.target(), continue_=trajectory)
    assert (trajectory.ended, said(trajectory)) == ("completed", ["sure?: yes"])
    assert sampled(trajectory) == [[1]]
    assert trajectory.metadata["graph"]["nodes"] == ["model", "sure?"]


async def test_continuing_needs_a_memory_and_says_so() -> None:
    """The trajectory is as it was before."""
    with endpoint([completion("a", [1])] * 3) as stub:
        target = stub.target()
        bare = create_agent(ChatArt(), [])
        trajectory = await rollout(bare, ASK, model=target)
        with pytest.raises(NotPlayable, match="continue_ needs a graph with a checkpointer"):
            await rollout(bare, ASK, model=target, continue_=trajectory)

        def fresh() -> Any:
            return create_agent(ChatArt(), [], checkpointer=InMemorySaver())

        with pytest.raises(NotPlayable, match="does not know the thread"):
            await rollout(fresh, ASK, model=target, continue_=trajectory)
        with pytest.raises(ConfigError, match="names no thread"):
            await rollout(fresh, ASK, model=target, continue_=Trajectory())
    assert (trajectory.ended, sampled(trajectory)) == ("completed", [[1]])


async def test_a_functional_graph_asks_too() -> None:
    @entrypoint(checkpointer=InMemorySaver())
    async def workflow(text: str) -> str:
        reply = await ChatArt().ainvoke(text)
        return f"{reply.content} {interrupt('sure?')}"

    with endpoint([completion("a", [1])] * 2) as stub:
        trajectory = await rollout(
            workflow, "hi", model=stub.target(), on_interrupt=lambda _: "yes"
        )
    assert trajectory.state == "a yes"
