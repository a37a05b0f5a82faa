"""What a rollout may be told: which nodes are trained, stores, hooks, other models, its time."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from langchain.agents import create_agent
from langchain_openai import ChatOpenAI
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.config import get_store
from langgraph.graph import START, MessagesState, StateGraph
from langgraph.store.memory import InMemoryStore
from langgraph.types import interrupt

import art_core as art
from art_core.capture import Target
from art_core.engine.gate import Gate
from art_core.errors import ConfigError, RolloutFailure
from art_langgraph import ChatArt, TrajectoryCallbackHandler, UnknownNodes, capture, rollout
from tests.stub_endpoint import Answer, completion, endpoint

ASK: Any = {"messages": [("user", "1+2?")]}


def ask(state: Any) -> Any:
    return {"messages": [ChatArt().invoke("q")]}


def in_a_row(**nodes: Any) -> Any:
    """A graph of nodes, one after the other."""
    graph: Any = StateGraph(MessagesState)
    before = START
    for name, node in nodes.items():
        graph.add_node(name, node)
        graph.add_edge(before, name)
        before = name
    return graph


def team() -> Any:
    """Two sub-agents whose inner node has the same name, and a node beside them."""
    inner = in_a_row(agent=ask)
    return in_a_row(plan=ask, left=inner.compile(), right=inner.compile())


# --- which nodes are trained


@pytest.mark.parametrize(
    ("nodes", "trained"),
    [
        (None, ["plan", "left", "right"]),
        (["plan"], ["plan"]),
        ("left", ["left"]),
        (["left/agent", "plan"], ["plan", "left"]),
        (["agent"], ["left", "right"]),
        ((), []),
    ],
)
async def test_chosen_nodes_are_trained_and_the_rest_is_context(
    nodes: Any, trained: list[str]
) -> None:
    with endpoint([completion("x", [i]) for i in range(3)]) as stub:
        trajectory = await rollout(team(), ASK, model=stub.target(), train_nodes=nodes)
    places = [str(c.origin.namespace).partition(":")[0] for c in trajectory.calls]
    assert places == ["plan", "left", "right"]
    whole = [p for p, c in zip(places, trajectory.calls, strict=True) if c.trainable]
    assert whole == trained
    report = trajectory.completeness
    assert (report.kept, report.is_whole) == (len(trained), True)
    assert report.left_out.get("outside the chosen nodes", 0) == 3 - len(trained)
    assert len(trajectory.chosen_records() or ()) == len(trained)


async def test_chosen_nodes_that_are_none_name_those_that_ran() -> None:
    with endpoint([completion("x", [1])] * 3) as stub, pytest.raises(RolloutFailure) as raised:
        await rollout(team(), ASK, model=stub.target(), train_nodes=["planner"])
    assert isinstance(raised.value.__cause__, ConfigError)
    assert "got ['planner'], expected nodes that ran: 'plan', 'left'" in str(raised.value)
    assert len(raised.value.trajectory.calls) == 3


async def test_one_wrong_name_among_right_ones_is_warned_of() -> None:
    with endpoint([completion("x", [1])] * 3) as stub:
        with pytest.warns(UnknownNodes, match=r"\['planner'\]; nodes that ran: 'plan'"):
            await rollout(team(), ASK, model=stub.target(), train_nodes=["plan", "planner"])


async def test_a_chosen_node_that_was_not_reached_is_no_fault() -> None:
    graph: Any = in_a_row(plan=ask)
    graph.add_node("act", ask)
    graph.add_conditional_edges("plan", lambda _: "__end__", ["act", "__end__"])
    with endpoint([completion("x", [1])]) as stub:
        trajectory = await rollout(graph, ASK, model=stub.target(), train_nodes=["act"])
    assert trajectory.completeness.kept == 0


# --- stores and hooks


def remembers(state: Any) -> Any:
    store = get_store()
    known = store.search(("notes",))
    store.put(("notes",), str(len(known)), {"seen": True})
    reply = ChatArt().invoke("q")
    return {"messages": [reply, ("ai", str(len(known)))]}


@pytest.mark.parametrize(("shared", "found"), [(True, ["0", "1"]), (False, ["0", "0"])])
async def test_a_store_is_shared_or_each_rollout_has_its_own(
    shared: bool, found: list[str]
) -> None:
    store: Any = InMemoryStore() if shared else InMemoryStore
    graph = in_a_row(node=remembers)
    with endpoint([completion("x", [1])] * 2) as stub:
        played = [await rollout(graph, ASK, model=stub.target(), store=store) for _ in "ab"]
    assert [t.state["messages"][-1].content for t in played] == found


async def test_hooks_stand_around_the_graph_whatever_becomes_of_it() -> None:
    seen: list[Any] = []

    async def set_up(trajectory: art.Trajectory) -> None:
        trajectory.metadata["database"] = "fresh"
        seen.append("up")

    def tear_down(trajectory: art.Trajectory) -> None:
        seen.append((trajectory.metadata["database"], type(trajectory.exception).__name__))

    def fails(state: Any) -> Any:
        ask(state)
        raise ValueError("bad output")

    with endpoint([completion("x", [1])] * 2) as stub:
        for node in (ask, fails):
            await rollout(
                in_a_row(node=node),
                ASK,
                model=stub.target(),
                set_up=set_up,
                tear_down=tear_down,
            )
    assert seen == ["up", ("fresh", "NoneType"), "up", ("fresh", "ValueError")]


@pytest.mark.parametrize(("which", "calls"), [("set_up", 0), ("tear_down", 1)])
async def test_a_hook_that_fails_is_no_fault_of_the_policy(which: str, calls: int) -> None:
    def fails(trajectory: art.Trajectory) -> None:
        raise OSError("no database")

    hooks: Any = {which: fails}
    with endpoint([completion("x", [1])]) as stub, pytest.raises(RolloutFailure) as raised:
        await rollout(in_a_row(node=ask), ASK, model=stub.target(), **hooks)
    assert f"{which} failed (OSError: no database)" in str(raised.value)
    assert isinstance(raised.value.__cause__, OSError)
    assert len(raised.value.trajectory.calls) == calls


async def test_a_tear_down_that_fails_does_not_hide_what_the_graph_raised() -> None:
    def fails(state: Any) -> Any:
        ask(state)
        raise ValueError("bad output")

    def tear_down(trajectory: art.Trajectory) -> None:
        raise OSError("no database")

    with endpoint([completion("x", [1])]) as stub, pytest.raises(RolloutFailure) as raised:
        await rollout(in_a_row(node=fails), ASK, model=stub.target(), tear_down=tear_down)
    said = "tear_down failed (OSError: no database), after the graph had (ValueError: bad output)"
    assert said in str(raised.value)
    assert isinstance(raised.value.__cause__, OSError)
    trajectory = raised.value.trajectory
    assert isinstance(trajectory.exception, ValueError)
    assert (trajectory.ended, len(trajectory.calls)) == ("error", 1)
    assert trajectory.metadata["graph"]["nodes"] == ["node"]
    assert len(trajectory.messages()) == 2


@pytest.mark.parametrize("is_async", [False, True])
async def test_a_fault_of_on_interrupt_is_no_fault_of_the_policy(is_async: bool) -> None:
    def node(state: Any) -> Any:
        ask(state)
        return {"messages": [("user", interrupt("go on?"))]}

    def fails(asked: Any) -> Any:
        raise KeyError("no answer to that")

    async def fails_later(asked: Any) -> Any:
        fails(asked)

    with endpoint([completion("x", [1])]) as stub, pytest.raises(RolloutFailure) as raised:
        await rollout(
            in_a_row(node=node),
            ASK,
            model=stub.target(),
            checkpointer=InMemorySaver,
            on_interrupt=fails_later if is_async else fails,
        )
    assert "on_interrupt failed (KeyError: 'no answer to that')" in str(raised.value)
    assert isinstance(raised.value.__cause__, KeyError)
    trajectory = raised.value.trajectory
    assert (trajectory.ended, trajectory.reward) == ("error", None)
    assert isinstance(trajectory.exception, KeyError)
    assert [c.trainable for c in trajectory.calls] == [True]


def waits_twice() -> Any:
    """A graph that asks the model and then its user, twice."""

    def node(state: Any) -> Any:
        ask(state)
        return {"messages": [("user", interrupt("go on?"))]}

    return in_a_row(node=node, again=node)


async def test_an_answer_that_never_comes_is_no_fault_of_the_policy() -> None:
    """The rollout's own limit bounds it, and it is the environment that ran into it."""

    async def never(asked: Any) -> Any:
        await asyncio.Event().wait()

    with endpoint([completion("x", [1])] * 2) as stub, pytest.raises(RolloutFailure) as raised:
        await rollout(
            waits_twice(),
            ASK,
            model=stub.target(),
            checkpointer=InMemorySaver,
            on_interrupt=never,
            timeout=0.3,
        )
    assert "on_interrupt failed (TimeoutError: no answer after 0.3 s)" in str(raised.value)
    trajectory = raised.value.trajectory
    assert (trajectory.ended, trajectory.reward, len(trajectory.calls)) == ("error", None, 1)


@pytest.mark.parametrize("is_async", [False, True])
async def test_slow_answers_do_not_use_up_the_policys_time(is_async: bool) -> None:
    """Two answers of 1.1 s each, within a limit of 2 s: the graph alone takes far less."""

    async def slow(asked: Any) -> str:
        await asyncio.sleep(1.1)
        return "yes"

    def blocks(asked: Any) -> str:
        time.sleep(1.1)
        return "yes"

    with endpoint([completion("x", [1])] * 4) as stub:
        trajectory = await rollout(
            waits_twice(),
            ASK,
            model=stub.target(),
            checkpointer=InMemorySaver,
            on_interrupt=slow if is_async else blocks,
            timeout=2.0,
        )
    assert trajectory.ended == "completed"
    assert trajectory.exception is None


async def test_a_graph_that_fails_to_close_is_no_fault_of_the_policy() -> None:
    @asynccontextmanager
    async def opened() -> AsyncIterator[Any]:
        yield in_a_row(node=ask)
        raise OSError("the session did not close")

    with endpoint([completion("x", [1])]) as stub, pytest.raises(RolloutFailure) as raised:
        await rollout(opened, ASK, model=stub.target())
    assert isinstance(raised.value.__cause__, OSError)
    assert len(raised.value.trajectory.calls) == 1


class Unreachable:
    """A model whose backend answers calls, and can't be asked for its records."""

    def __init__(self, target: Target) -> None:
        self._target = target

    def target(self, step: int | None = None, evaluation: bool = False) -> Target:
        return self._target

    async def join(self, trajectories: Any) -> None:
        raise ConnectionError("the backend is gone")


def ask_stock(stub: Any) -> Any:
    """A node whose call gives no ids to the client, only the id of a record."""
    model = ChatOpenAI(base_url=stub.base_url, api_key="k", model="agent", max_retries=0)
    return lambda state: {"messages": [model.invoke("q")]}


RECORDED = completion("x", [1], system_fingerprint="0123456789abcdef0123")


async def test_a_join_that_fails_loses_nothing() -> None:
    with endpoint([RECORDED]) as stub, pytest.raises(RolloutFailure) as raised:
        await rollout(in_a_row(node=ask_stock(stub)), ASK, model=Unreachable(stub.target()))
    assert "can't be had (ConnectionError: the backend is gone)" in str(raised.value)
    assert isinstance(raised.value.__cause__, ConnectionError)
    trajectory = raised.value.trajectory
    assert trajectory.ended == "error"
    assert [c.record_id for c in trajectory.calls] == ["0123456789abcdef0123"]
    assert trajectory.metadata["graph"]["nodes"] == ["node"]
    assert len(trajectory.messages()) == 2


async def test_a_join_that_fails_after_the_graph_has_hides_nothing() -> None:
    def fails(state: Any) -> Any:
        raise ValueError("bad output")

    with endpoint([RECORDED]) as stub:
        graph = in_a_row(node=ask_stock(stub), next=fails)
        with pytest.raises(RolloutFailure) as raised:
            await rollout(graph, ASK, model=Unreachable(stub.target()))
    assert "after the graph had (ValueError: bad output)" in str(raised.value)
    assert isinstance(raised.value.trajectory.exception, ValueError)


async def test_a_join_that_fails_does_not_hide_an_exception_of_free_code() -> None:
    config: Any = {"callbacks": [TrajectoryCallbackHandler()]}
    seen: list[art.Trajectory] = []

    async def played(stub: Any) -> None:
        async with capture(Unreachable(stub.target())) as trajectory:
            seen.append(trajectory)
            in_a_row(node=ask_stock(stub)).compile().invoke(ASK, config)
            raise ValueError("mine")

    with endpoint([RECORDED]) as stub, pytest.raises(ValueError, match="mine") as raised:
        await played(stub)
    assert "the backend is gone" in raised.value.__notes__[0]
    assert len(seen[0].calls) == 1


# --- models


@pytest.mark.parametrize("name", ["graph", "incomplete"])
async def test_metadata_that_the_rollout_writes_itself_is_refused_before_it_plays(
    name: str,
) -> None:
    with endpoint([]) as stub:
        with pytest.raises(ConfigError, match=f"metadata: got .'{name}'."):
            await rollout(StateGraph(MessagesState), {}, model=stub.target(), metadata={name: "a"})
    assert stub.requests == []


async def test_a_hosted_model_plays_as_a_baseline() -> None:
    """Its calls are context; the conversation can be judged all the same."""
    with endpoint([completion("hi", None, prompt_ids=None)]) as hosted:
        model: art.Model[Any] = art.Model(
            name="big",
            project="p",
            inference_base_url=hosted.base_url,
            inference_api_key="k",
            inference_model_name="gpt-4o",
        )
        trajectory = await rollout(create_agent(ChatArt(), []), ASK, model=model)
    assert hosted.bodies[0]["model"] == "gpt-4o"
    assert "return_token_ids" not in hosted.bodies[0]
    assert dict(trajectory.completeness.left_out) == {"other model": 1}
    assert trajectory.completeness.is_whole
    assert [m["content"] for m in trajectory.messages()] == ["1+2?", "hi"]


async def test_a_judge_with_a_client_of_its_own_is_another_model() -> None:
    """An `art.Model` that a node asks by its OpenAI client: context, and no gap in the record."""
    with endpoint([completion("a", [1])]) as stub, endpoint([completion("b", None)]) as hosted:
        judge: art.Model[Any] = art.Model(
            name="judge", project="p", inference_base_url=hosted.base_url, inference_api_key="k"
        )

        async def node(state: Any) -> Any:
            said = await ChatArt().ainvoke("q")
            asked: Any = [{"role": "user", "content": "good?"}]
            client = judge.openai_client()
            await client.chat.completions.create(model=judge.name, messages=asked)
            return {"messages": [said]}

        trajectory = await rollout(in_a_row(node=node), ASK, model=stub.target())
    assert dict(trajectory.completeness.left_out) == {"other model": 1}
    assert trajectory.completeness.is_whole
    assert len(trajectory.additional_histories) == 0


async def test_a_role_may_be_hosted_and_another_pinned() -> None:
    def node(state: Any) -> Any:
        plan = ChatArt(role="planner").invoke("plan")
        return {"messages": [plan, ChatArt().invoke("act")]}

    with endpoint([completion("plan", None, prompt_ids=None)]) as hosted:
        baseline: art.Model[Any] = art.Model(
            name="gpt-4o", project="p", inference_base_url=hosted.base_url
        )
        with endpoint([completion("x", [1])] * 2) as stub:
            models: Any = {"planner": baseline, "critic": "agent@1"}
            trajectory = await rollout(in_a_row(node=node), ASK, model=stub.target(), models=models)
    assert [(c.model, c.step, c.left_out) for c in trajectory.calls] == [
        ("gpt-4o", None, "other model"),
        ("agent", 3, None),
    ]
    assert trajectory.completeness.kept == 1


# --- time


async def test_time_in_which_calls_are_held_is_not_charged() -> None:
    """The answer comes after three times the limit; the gate was closed all the while."""
    gate, until = Gate(), threading.Event()
    gate.hold()

    def train() -> None:
        until.set()
        gate.release()

    opening = threading.Timer(0.6, train)
    opening.start()
    with endpoint([Answer(completion("x", [1]), until=until)]) as stub:
        trajectory = await rollout(in_a_row(node=ask), ASK, model=stub.target(), timeout=0.2)
    opening.join()
    assert trajectory.ended == "completed"
    assert trajectory.completeness.kept == 1
