"""What a rollout may be told: which nodes are trained, stores, hooks, other models, its time."""

from __future__ import annotations

import threading
from typing import Any

import pytest
from langchain.agents import create_agent
from langgraph.config import get_store
from langgraph.graph import START, MessagesState, StateGraph
from langgraph.store.memory import InMemoryStore

import art_core as art
from art_core.engine.gate import Gate
from art_core.errors import ConfigError, RolloutFailure
from art_langgraph import ChatArt, UnknownNodes, rollout
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
