"""The quickstart's shop, its judge, its loop and how it goes on, without a model.

Figures that are stated are counted by hand: every customer of the small recipe here needs one of
the tools, in turn.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from langchain_core.messages import AIMessage, HumanMessage, ToolMessage

import art_core as art
from art_core.calls import ModelCall
from art_core.capture import Target
from art_core.config import SamplingConfig
from art_core.errors import ConfigError, RolloutFailure, TooManyFailures
from art_core.metrics import MetricsLog
from art_core.rundir import RunDir
from art_core.trajectories import Trajectory, TrajectoryGroup
from art_langgraph import ChatArt, SamplingOverridden, rollout
from art_langgraph.quickstart.baseline import constant_answer
from art_langgraph.quickstart.clientele import make_clientele
from art_langgraph.quickstart.conversation import Turn, turns_of
from art_langgraph.quickstart.customers import PARTS, TOOLS, Customer, judge, succeeded, total
from art_langgraph.quickstart.finish import finish
from art_langgraph.quickstart.journal import Journal
from art_langgraph.quickstart.lessons import lesson
from art_langgraph.quickstart.recipe import Recipe
from art_langgraph.quickstart.score import Score, ToolScore, score
from art_langgraph.quickstart.session import run_session
from art_langgraph.quickstart.shop import (
    EXAMPLES,
    Order,
    Shop,
    shop_tools,
    support_agent,
    support_graph,
)
from tests.langgraph.scripted_shop import ALL, NONE, Notes, Policy, ScriptedBackend, of_tool

SMALL = Recipe(
    lessons=0,
    groups=3,
    group_size=2,
    max_steps=4,
    customers=6,
    held_out=6,
    checks=3,
    stop_reward=0.9,
    max_tokens=200,  # bytes: the scripted engine's tokens
)
ORDER = Order("4711", "Ann Bell", "C512", "delayed", "R101")
pytestmark = pytest.mark.filterwarnings(
    f"ignore::{SamplingOverridden.__module__}.SamplingOverridden"
)


# --- the shop and its customers


def test_the_tools_answer_from_the_database() -> None:
    shop = Shop([ORDER])
    tools = {tool.name: tool for tool in shop_tools(shop)}
    assert set(tools) == set(TOOLS)
    assert "delayed" in tools["order_status"].invoke({"order": "4711"})
    assert "R101" in tools["refund"].invoke({"order": "4711", "amount": "5.00"})
    assert "C512" in tools["look_up"].invoke({"name": "Ann Bell"})
    for name, given in {
        "order_status": {"order": "1"},
        "refund": {"order": "1", "amount": "5.00"},
        "look_up": {"name": "Nobody"},
    }.items():
        assert tools[name].invoke(given).startswith("No ")
    shop.close()


def test_an_order_is_found_by_two_columns_only() -> None:
    shop = Shop([ORDER])
    assert shop.find("name", "Ann Bell") == ORDER
    assert shop.find("number", "' OR '1'='1") is None
    with pytest.raises(ValueError, match="no such column"):
        shop.find("status", "delayed")
    shop.close()


def test_customers_are_the_same_for_a_seed_and_strangers_to_each_other() -> None:
    recipe = Recipe()
    first, again, other = (make_clientele(replace(recipe, seed=seed)) for seed in (0, 0, 1))
    assert first == again
    assert first != other
    every = [*first.training, *first.checks, *first.held_out, *first.lessons]
    parts = (first.training, first.checks, first.held_out, first.lessons)
    sizes = [recipe.customers, recipe.checks, recipe.held_out, recipe.lessons]
    assert [*map(len, parts)] == sizes
    assert len(every) == len(first.orders)
    assert len({order.number for order in first.orders}) == len(first.orders)
    assert len({order.name for order in first.orders}) == len(first.orders)


def test_held_out_customers_use_other_words_about_other_orders() -> None:
    clientele = make_clientele(Recipe())
    trained = {wording(c, clientele.orders) for c in clientele.training}
    held_out = {wording(c, clientele.orders) for c in [*clientele.held_out, *clientele.checks]}
    assert not trained & held_out


def wording(customer: Customer, orders: Sequence[Order]) -> str:
    """The message with its order number, name and amount blanked."""
    text = customer.message
    for order in orders:
        text = text.replace(order.number, "#").replace(order.name, "@")
    amount = customer.arguments.get("amount")
    return text.replace(amount, "$") if amount else text


def test_no_wording_comes_again_before_all_of_its_tool_have() -> None:
    clientele = make_clientele(Recipe())
    for tool in TOOLS:
        words = [wording(c, clientele.orders) for c in clientele.training if c.tool == tool]
        kinds = len(set(words))
        assert kinds >= 10
        for start in range(0, len(words) - kinds + 1, kinds):
            assert len(set(words[start : start + kinds])) == kinds


def test_the_learning_rate_falls_after_the_steady_steps() -> None:
    recipe = Recipe()
    rates = [recipe.train_config(step).learning_rate for step in (0, 4, 5, 13)]
    assert rates == pytest.approx([8e-4, 8e-4, 8e-4 * 0.93, 8e-4 * 0.93**9])  # 4.16e-4


def test_what_did_worse_counts_after_the_steady_steps() -> None:
    recipe = Recipe()
    assert [recipe.train_config(step).negative_weight for step in (0, 4, 5, 13)] == [0, 0, 1, 1]


@pytest.mark.parametrize("seed", range(3))
def test_each_message_holds_what_the_tool_must_be_given(seed: int) -> None:
    clientele = make_clientele(Recipe(seed=seed))
    for customer in [*clientele.training, *clientele.checks, *clientele.held_out]:
        assert all(value in customer.message for value in customer.arguments.values())


def test_steps_take_the_customers_in_turn() -> None:
    clientele = make_clientele(SMALL)  # 6 to train on, 4 a step
    assert clientele.of_step(0, 4) == clientele.training[:4]
    assert clientele.of_step(1, 4) == [*clientele.training[4:], *clientele.training[:2]]


# --- the judge

REFUND = Customer("c", "Refund 5.00 of 4711", "refund", {"order": "4711", "amount": "5.00"}, "R1")


def state(*said: Any) -> dict[str, Any]:
    return {"messages": [*EXAMPLES, HumanMessage(REFUND.message), *said]}


def call(tool: str, **arguments: Any) -> AIMessage:
    return AIMessage("", tool_calls=[{"name": tool, "args": arguments, "id": "1"}])


RIGHT = call("refund", order="4711", amount="5.00")
RETURNED = ToolMessage("Refunded 5.00, reference R1.", tool_call_id="1")


def test_a_customer_who_is_served_right_earns_all_parts() -> None:
    parts = judge(REFUND, state(RIGHT, RETURNED, AIMessage("Done, see R1.")))
    assert parts == dict.fromkeys(PARTS, 1.0)
    assert total(parts) == pytest.approx(sum(PARTS.values())) == pytest.approx(1.0)
    assert succeeded(parts)


@pytest.mark.parametrize(
    "said",
    [
        pytest.param([RIGHT, RETURNED, AIMessage("Done.")], id="the fact is not said"),
        pytest.param([RIGHT, RETURNED, AIMessage("Done, see R12.")], id="another word"),
        pytest.param([RIGHT, RETURNED], id="no answer"),
        pytest.param([RIGHT, RETURNED, RIGHT, RETURNED, AIMessage("R1")], id="refunded twice"),
        pytest.param(
            [call("refund", order="4711"), RETURNED, AIMessage("R1")],
            id="an argument is missing",
        ),
        pytest.param(
            [call("refund", order="4711", amount="50.0"), RETURNED, AIMessage("R1")],
            id="a wrong amount",
        ),
        pytest.param(
            [call("refund", order="4711", amount="5.00", note="x"), RETURNED, AIMessage("R1")],
            id="an argument too many",
        ),
        pytest.param([call("order_status", order="4711"), AIMessage("R1")], id="another tool"),
        pytest.param([AIMessage("R1")], id="no tool"),
    ],
)
def test_anything_less_is_no_success_and_earns_less(said: list[Any]) -> None:
    parts = judge(REFUND, state(*said))
    assert not succeeded(parts)
    assert 0.0 <= total(parts) < 1.0
    assert parts["answer"] == 0.0


@pytest.mark.parametrize("nothing", [None, {}, {"messages": []}, state()])
def test_a_state_without_an_answer_earns_nothing(nothing: Any) -> None:
    """The examples before the customer's message are not the agent's work."""
    assert total(judge(REFUND, nothing)) == 0.0


def test_the_best_constant_answer_serves_one_customer() -> None:
    """Six customers with orders of their own: a fixed call is right for one. The other of its tool
    gets that part, and no order number or name is shared."""
    held_out = make_clientele(SMALL).held_out
    constant = constant_answer(held_out)
    assert constant.success == pytest.approx(1 / 6)
    assert constant.reward == pytest.approx((1.0 + PARTS["tool"]) / 6)
    assert constant.arguments in [c.arguments for c in held_out]


# --- both ways to build the agent


@pytest.fixture
async def served() -> AsyncIterator[Target]:
    """A policy that knows every tool."""
    async with ScriptedBackend(Policy(make_clientele(SMALL), [ALL])) as backend:
        yield Target(backend.server.base_url, "key", "scripted", SamplingConfig(), trains=True)


@pytest.mark.parametrize("tool", TOOLS)
async def test_both_graphs_make_the_same_calls(served: Target, tool: str) -> None:
    clientele = make_clientele(SMALL)
    customer = of_tool(clientele.held_out, tool)
    played = []
    for build in (support_agent, support_graph):
        shop = Shop(clientele.orders)
        asked: Any = {"messages": [*EXAMPLES, ("user", customer.message)]}
        trajectory = await rollout(
            build(ChatArt(max_tokens=SMALL.max_tokens), shop), asked, model=served
        )
        assert succeeded(judge(customer, trajectory.state))
        played.append(trajectory)
        shop.close()
    one, other = (trajectory.calls for trajectory in played)
    assert len(one) == len(other) == 2
    for left, right in zip(one, other, strict=True):
        np.testing.assert_array_equal(left.prompt_ids, right.prompt_ids)
        np.testing.assert_array_equal(left.sampled_ids, right.sampled_ids)
    assert [t.who for t in turns_of(played[0])] == ["customer", "assistant", tool, "assistant"]


# --- conversations and scores


def spoken(*messages: dict[str, Any]) -> Trajectory:
    asked: dict[str, Any] = {"messages": list(messages[:-1])}
    answered = ModelCall("r", "m", 0, request=asked, message=messages[-1], finish_reason="stop")
    return Trajectory(calls=[answered])


def test_turns_begin_with_the_customer_and_spell_calls() -> None:
    arguments = '{"order": "4711", "amount": 5, "note": "caf\\u00e9"}'
    asked = {"id": "a", "type": "function", "function": {"name": "refund", "arguments": arguments}}
    broken = {"id": "b", "type": "function", "function": {"name": "x", "arguments": "[1"}}
    trajectory = spoken(
        {"role": "system", "content": "You help."},
        {"role": "user", "content": "an example"},
        {"role": "assistant", "content": "its answer"},
        {"role": "user", "content": "Refund 5"},
        {"role": "assistant", "content": None, "tool_calls": [asked, broken]},
        {"role": "tool", "content": "R1", "tool_call_id": "a"},
        {"role": "assistant", "content": "See R1"},
    )
    assert turns_of(trajectory) == [
        Turn("customer", "Refund 5"),
        Turn("assistant", "", ('refund(order="4711", amount=5, note="café")', "x([1)")),
        Turn("refund", "R1"),
        Turn("assistant", "See R1"),
    ]
    assert turns_of(Trajectory()) == []


def graded(tool: str, success: bool, reward: float) -> Trajectory:
    return Trajectory(reward=reward, metrics={"success": success}, metadata={"tool": tool})


def test_a_failed_rollout_counts_as_served_badly() -> None:
    customers = [replace(REFUND, tool=tool) for tool in ("a", "b", "a", "b")]
    failure = RolloutFailure("the network", trajectory=Trajectory())
    groups = [
        TrajectoryGroup([graded("a", True, 1.0)]),
        TrajectoryGroup([graded("b", False, 0.5)]),
        TrajectoryGroup([graded("a", True, 1.0)]),
        TrajectoryGroup([failure]),
    ]
    found = score(customers, groups, step=3)
    assert found == Score(
        step=3,
        customers=4,
        success=0.5,
        reward=0.625,
        failures=1,
        tools={"a": ToolScore(2, 1.0, 1.0), "b": ToolScore(2, 0.0, 0.25)},
    )
    assert found.weakest == 0.0
    assert Score.from_json(asdict(found)) == found


# --- a whole run


def make_model(path: Path) -> art.TrainableModel:
    return art.TrainableModel(
        name="shop", project="quickstart", base_model="scripted", base_path=str(path)
    )


async def play(
    path: Path, recipe: Recipe, policy: Policy, notes: Notes, idle: Sequence[int] = ()
) -> Journal:
    """A start of the run in `path`, until its end or an exception."""
    model = make_model(path)
    journal = Journal(model, recipe)
    async with ScriptedBackend(policy, idle) as backend:
        await run_session(model, backend, recipe, journal, notes)
    return journal


def learner(recipe: Recipe, *known: Sequence[str]) -> Policy:
    return Policy(make_clientele(recipe), known)


async def test_a_run_is_warmed_up_once_before_all_else(tmp_path: Path) -> None:
    """Three labelled examples, one of each tool, are one step; the first customer comes after it.
    Interrupted in the step after it, the run goes on without them."""

    def interrupt(step: int) -> None:
        raise KeyboardInterrupt

    recipe = replace(SMALL, lessons=3, max_steps=2, stop_reward=1.1)
    policy = learner(recipe, NONE, TOOLS[:1], ALL)
    model = make_model(tmp_path)
    notes = Notes(on_step=interrupt)
    async with ScriptedBackend(policy) as backend:
        with pytest.raises(KeyboardInterrupt):
            await run_session(model, backend, recipe, Journal(model, recipe), notes)
        assert [one.metadata["tool"] for one in backend.lessons] == [*TOOLS]
    assert notes.told == ["warm-up", "first", "before", "step 1"]
    journal = await play(tmp_path, recipe, policy, again := Notes())
    assert again.told == ["step 2", "after"]
    assert journal.before is not None
    assert journal.before.step == 1
    assert journal.before.success == pytest.approx(1 / 3)
    assert list(journal.phases)[:2] == ["load", "warm_up"]


def test_a_lesson_is_served_right_and_teaches_nothing_of_the_prompt() -> None:
    clientele = make_clientele(replace(SMALL, lessons=3))
    shop = Shop(clientele.orders)
    for customer in clientele.lessons:
        messages = lesson(customer, shop).messages()
        asked = [i for i, m in enumerate(messages) if m["role"] == "user"][-1]
        assert messages[asked]["content"] == customer.message
        assert customer.fact in messages[-1]["content"]
        answers = [m for m in messages if m["role"] == "assistant"]
        assert [m.get("weight") for m in answers] == [*[0] * (len(answers) - 2), None, None]
    shop.close()


async def test_a_run_learns_stops_when_it_has_and_is_measured_on_strangers(tmp_path: Path) -> None:
    """Step 0 knows one tool of three, step 1 all: its rollouts earn 1.0, so the checks begin after
    the second step, are served right, and end the training."""
    notes = Notes()
    journal = await play(tmp_path, SMALL, learner(SMALL, TOOLS[:1], ALL), notes)
    steps = ["step 1", "step 2", "check"]
    assert notes.told == ["first", "before", *steps, "after"]
    assert journal.stopped == "learned"
    assert journal.before is not None
    assert journal.after is not None
    assert (journal.before.step, journal.after.step) == (0, 2)
    assert journal.before.success == pytest.approx(1 / 3)
    assert journal.after.success == 1.0
    assert journal.after.reward == pytest.approx(1.0)
    assert [t.success for t in journal.before.tools.values()].count(1.0) == 1
    assert set(journal.phases) == {"load", "before", "learn", "after"}
    assert journal.first_reward_seconds is not None
    assert 0.0 < journal.first_reward_seconds < journal.seconds

    history = MetricsLog(RunDir.at(tmp_path, "quickstart", "shop").history).read()
    train = [record.values for record in history if record.split == "train"]
    assert train[0]["reward"] == pytest.approx(1 / 3)
    assert train[1]["reward"] == pytest.approx(1.0)
    assert [figures[f"success/{TOOLS[0]}"] for figures in train] == [1.0, 1.0]
    assert all(isinstance(figures["gather_seconds"], float) for figures in train)
    assert [(r.split, r.step) for r in history if r.split != "train"] == [
        ("test", 0),
        ("test", 2),
        ("val", 2),
    ]


async def test_a_good_step_alone_does_not_end_the_training(tmp_path: Path) -> None:
    """The training customers are served right, the checks are not: it goes on to its last step."""
    recipe = replace(SMALL, max_steps=2)
    clientele = make_clientele(recipe)
    policy = Policy(replace(clientele, checks=[]), [ALL])
    policy._customers += [replace(c, tool="nothing") for c in clientele.checks]
    notes = Notes()
    journal = await play(tmp_path, recipe, policy, notes)
    assert notes.told[2:] == ["step 1", "check", "step 2", "check", "after"]
    assert journal.stopped == "max_steps"


async def test_a_policy_is_checked_once(tmp_path: Path) -> None:
    """Nothing is learned in steps 2 and 3: their numbers go on, the policy is that of step 1."""
    recipe = replace(SMALL, max_steps=4, stop_success=1.1)  # never enough
    notes = Notes()
    await play(tmp_path, recipe, learner(recipe, ALL), notes, idle=(2, 3))
    steps = ["step 1", "check", "step 2", "step 3", "step 4", "check"]
    assert notes.told[2:] == [*steps, "after"]
    assert notes.steps == [1, 1, 1, 2]


async def test_an_interrupted_run_goes_on_where_it_was(tmp_path: Path) -> None:
    """Ctrl-C after step 1 (here as the exception that it is): the second start neither serves the
    held-out customers again nor learns the first step again, and its seconds add up."""

    def interrupt(step: int) -> None:
        raise KeyboardInterrupt

    recipe = replace(SMALL, max_steps=2, stop_reward=1.1)
    policy = learner(recipe, NONE, ALL)
    with pytest.raises(KeyboardInterrupt):
        await play(tmp_path, recipe, policy, Notes(on_step=interrupt))
    halfway = Journal(make_model(tmp_path), recipe)
    assert not halfway.finished
    assert not halfway.is_new
    assert halfway.before is not None
    assert halfway.before.success == 0.0

    notes = Notes()
    journal = await play(tmp_path, recipe, policy, notes)
    assert notes.told == ["step 2", "after"]
    assert journal.before == halfway.before
    assert journal.after is not None
    assert journal.after.success == 1.0
    assert journal.first_reward_seconds == halfway.first_reward_seconds
    assert journal.seconds > halfway.seconds


async def test_a_cancelled_run_keeps_its_place(tmp_path: Path) -> None:
    """Ctrl-C while rollouts are played: the command cancels the session's task."""
    recipe = replace(SMALL, max_steps=2, stop_reward=1.1)
    policy = learner(recipe, ALL)
    asked = asyncio.Event()

    def script(prompt: str, request: Any) -> str:
        if request.adapter.step == 1:
            asked.set()
        return policy(prompt, request)

    model = make_model(tmp_path)
    journal = Journal(model, recipe)
    async with ScriptedBackend(script) as backend:
        backend.engine.delay = 0.01
        work = run_session(model, backend, recipe, journal, Notes())
        task = asyncio.create_task(work)
        waits = asyncio.create_task(asked.wait())
        await asyncio.wait([task, waits], return_when=asyncio.FIRST_COMPLETED)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
    notes = Notes()
    await play(tmp_path, recipe, policy, notes)
    assert notes.told == ["step 2", "after"]


async def test_a_finished_run_may_be_given_more_steps(tmp_path: Path) -> None:
    short = replace(SMALL, max_steps=1, stop_reward=1.1)
    policy = learner(short, ALL)
    assert (await play(tmp_path, short, policy, Notes())).finished
    assert Journal(make_model(tmp_path), short).finished
    longer = replace(short, max_steps=3)
    assert not Journal(make_model(tmp_path), longer).finished
    notes = Notes()
    journal = await play(tmp_path, longer, policy, notes)
    assert notes.told == ["step 2", "step 3", "after"]
    assert journal.after is not None
    assert journal.after.step == 3


async def test_a_run_goes_on_only_with_its_own_recipe(tmp_path: Path) -> None:
    await play(tmp_path, replace(SMALL, max_steps=1), learner(SMALL, ALL), Notes())
    train = SMALL.train.model_copy(update={"learning_rate": 1.0})
    fault = r"other settings: got \{'train.learning_rate': 1.0\}, expected .*--fresh"
    with pytest.raises(ConfigError, match=fault):
        Journal(make_model(tmp_path), replace(SMALL, train=train))


async def test_a_run_whose_rollouts_fail_stops_and_says_why(tmp_path: Path) -> None:
    def fail(prompt: str, request: Any) -> str:
        raise RuntimeError("no more power")

    model = make_model(tmp_path)
    journal = Journal(model, SMALL)
    async with ScriptedBackend(fail) as backend:
        with pytest.raises(TooManyFailures, match="no more power"):
            await run_session(model, backend, SMALL, journal, Notes())
    assert journal.before is None


# --- finish


async def test_finish_lets_its_work_end_before_a_cancel_goes_on() -> None:
    done: list[str] = []

    async def work() -> None:
        await asyncio.sleep(0.05)
        done.append("work")

    task = asyncio.create_task(finish(work()))
    await asyncio.sleep(0.01)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert done == ["work"]


async def test_finish_returns_and_raises_what_its_work_does() -> None:
    async def work(fails: bool) -> int:
        await asyncio.sleep(0.01)
        if fails:
            raise ValueError("broken")
        return 7

    assert await finish(work(False)) == 7
    with pytest.raises(ValueError, match="broken"):
        await finish(work(True))
    task = asyncio.create_task(finish(work(True)))
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(ValueError, match="broken"):
        await task
