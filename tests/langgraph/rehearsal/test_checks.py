"""Each check on a graph that has the fault, and on one that has not."""

from __future__ import annotations

from typing import Any

import pytest
from langchain.agents import create_agent
from langchain_core.caches import InMemoryCache
from langchain_core.globals import set_llm_cache
from langchain_core.tools import StructuredTool
from langchain_openai import ChatOpenAI
from langgraph.checkpoint.memory import InMemorySaver
from pydantic import SecretStr

from art_core.errors import CaptureError
from art_core.trajectories import Trajectory
from art_langgraph import ChatArt, LostCalls
from art_langgraph.rehearsal.actor import MANNERS
from art_langgraph.rehearsal.checks import check
from art_langgraph.rehearsal.checks.ending import lost
from art_langgraph.rehearsal.perform import Player, perform
from art_langgraph.rehearsal.scenarios import Scenario
from art_langgraph.rehearsal.stage import ScriptedStage
from tests.langgraph.rehearsal import graphs
from tests.langgraph.rehearsal.theater import (
    HELLO,
    findings,
    of,
    rehearse,
    setting,
    statuses,
)
from tests.stub_endpoint import completion, endpoint

KEY = SecretStr("local")
LIMITED = Scenario(HELLO.input, {"recursion_limit": 12})


def served(trajectory: Trajectory) -> float:
    """1.0 for an answer that tells where the order is."""
    if trajectory.ended != "completed":
        return 0.0
    return float("on its way" in trajectory.state["messages"][-1].text)


async def test_a_sound_agent_passes_every_check() -> None:
    found = await findings(graphs.agent(), LIMITED, reward=served)
    assert {finding.status for finding in found} == {"pass"}
    assert {finding.check for finding in found} >= {
        "ending", "model calls", "recording", "tokens", "token-in", "tools", "sampling", "state",
        "threads", "limits", "length", "rewards",
    }  # fmt: skip


async def test_many_tools_are_all_called_within_the_limit() -> None:
    """40 of them, where 40 supersteps are all that an unlimited graph is given here."""
    tools = [
        StructuredTool.from_function(lambda: "ok", name=f"tool_{i}", description="A tool.")
        for i in range(40)
    ]
    played = await rehearse(create_agent(ChatArt(), tools), group=2)
    thorough = played.plays[0]
    assert thorough.trajectory.ended == "completed"
    assert {run["name"] for run in thorough.graph["tools"]} == {tool.name for tool in tools}
    assert len(thorough.policy_calls) == 11  # 4 tools in each of 10 turns, then the answer


async def test_each_manner_walks_its_own_way() -> None:
    played = await rehearse(graphs.tool_graph(), LIMITED)
    calls = {play.manner: len(play.policy_calls) for play in played.plays}
    # thorough: two tools, one a turn, then the answer; busy: both at once; clumsy: two blunders,
    # then the answer; stubborn: every second of its 12 steps is the model's.
    assert calls == {"thorough": 3, "brief": 1, "busy": 2, "clumsy": 3, "stubborn": 6}
    assert list(calls) == [*MANNERS]
    ends = {play.manner: play.trajectory.ended for play in played.plays}
    assert ends["stubborn"] == "recursion_limit"
    assert {ends[manner] for manner in ("thorough", "brief", "busy", "clumsy")} == {"completed"}


@pytest.mark.parametrize("method", ["json_schema", "function_calling"])
async def test_structured_output_walks_every_branch(method: Any) -> None:
    played = await rehearse(graphs.router(method), Scenario({"question": "My bill?"}))
    first = played.plays[0]
    assert set(first.graph["nodes"]) == {"boss", "billing", "shipping"}
    roles = {call.origin.role for call in first.policy_calls}
    assert roles == {"boss", "worker"}


async def test_a_graph_without_scenarios_gets_one_that_fits_its_input() -> None:
    played = await rehearse(graphs.router())
    (scenario,) = played.scenarios
    assert played.made_up
    assert isinstance(scenario.input["question"], str)
    assert played.plays[0].trajectory.ended == "completed"


async def test_a_graph_that_asks_nobody_fails_and_names_its_nodes() -> None:
    found = await findings(graphs.silent(), HELLO)
    (finding,) = of(found, "model calls")
    assert finding.status == "fail"
    assert "nodes that ran: think" in finding.what
    assert "ChatArt()" in finding.fix


async def test_a_stock_model_is_named_with_its_address() -> None:
    with endpoint(lambda _: completion("ok")) as stub:
        found = await findings(graphs.foreign(stub.base_url), HELLO)
    (finding,) = of(found, "other models")
    assert finding.status == "fail"
    host = stub.base_url.removesuffix("/v1")
    assert f"think: ChatOpenAI gpt-4o at {host}" in finding.what
    assert "sk-none" not in str(found)


async def test_a_stock_model_that_is_not_there_is_told_as_the_cause() -> None:
    found = await findings(graphs.foreign("http://127.0.0.1:9/v1"), HELLO)
    (finding,) = of(found, "ending")
    assert finding.status == "fail"
    assert "all 5 rollouts ended by OpenAIConnectionError" in finding.what
    assert "graphs.py:" in finding.what
    assert "ChatOpenAI in think" in finding.fix


async def test_a_call_in_a_bare_thread_is_found() -> None:
    found = await findings(graphs.in_bare_thread(), HELLO)
    (finding,) = of(found, "recording")
    assert finding.status == "fail"
    assert "graphs.py:" in finding.what
    assert "ContextThreadPoolExecutor" in finding.fix
    assert not of(found, "ending")  # told once


async def test_state_that_outlives_a_rollout_is_found() -> None:
    found = await findings(graphs.with_memory(), HELLO)
    (finding,) = of(found, "state")
    assert finding.status == "fail"
    assert "in think" in finding.what


async def test_a_clock_in_the_prompt_is_only_told() -> None:
    found = await findings(graphs.with_clock(), HELLO)
    (finding,) = of(found, "state")
    assert finding.status == "warn"
    assert "It is " in finding.what


async def test_what_a_tool_changes_for_the_next_rollout_is_told() -> None:
    done: set[str] = set()

    def refund(order: str) -> str:
        """Refund an order."""
        again = order in done
        done.add(order)
        return "already refunded" if again else "refunded"

    found = await findings(create_agent(ChatArt(), [refund]), LIMITED)
    (finding,) = of(found, "state")
    assert finding.status == "warn"
    assert "'refunded' against 'already refunded'" in finding.what


async def test_a_thread_id_in_a_scenario_is_of_no_use() -> None:
    scenario = Scenario(HELLO.input, {"configurable": {"thread_id": "1"}, "recursion_limit": 12})
    assert statuses(await findings(graphs.agent(), scenario), "threads") == ["warn"]
    assert statuses(await findings(graphs.agent(), LIMITED), "threads") == ["pass"]


@pytest.mark.parametrize(
    ("asked", "status"),
    [
        ({}, "pass"),
        ({"temperature": 1.0}, "pass"),
        ({"temperature": 0}, "warn"),
        ({"top_p": 0.5}, "warn"),
        ({"seed": 7}, "warn"),
        ({"n": 2}, "fail"),
    ],
)
async def test_what_would_make_a_group_alike(asked: dict[str, Any], status: str) -> None:
    found = await findings(graphs.one_node(graphs.said(ChatArt(**asked))), HELLO)
    (finding,) = of(found, "sampling")
    assert finding.status == status
    assert all(f"{name}={value!r}" in finding.what for name, value in asked.items()
               if status != "pass")  # fmt: skip


async def test_a_cached_node_fails() -> None:
    found = await findings(graphs.cached(), HELLO)
    (finding,) = of(found, "caches")
    assert finding.status == "fail"
    assert "think" in finding.what
    assert not of(await findings(graphs.tool_graph(), LIMITED), "caches")


async def test_a_cached_node_that_asks_no_model_is_only_told() -> None:
    (finding,) = of(await findings(graphs.cached_lookup(), HELLO), "caches")
    assert finding.status == "warn"
    assert "look, which asked the policy nothing" in finding.what


async def test_langchains_cache_is_passed_by() -> None:
    with setting(set_llm_cache, InMemoryCache(), None):
        played = await findings(graphs.one_node(graphs.said(ChatArt())), HELLO)
    assert statuses(played, "caches") == ["pass"]
    assert "5 calls to the policy" in of(played, "model calls")[0].what


async def test_an_interrupt_is_told_with_its_question() -> None:
    found = await findings(graphs.asking(), HELLO)
    (finding,) = of(found, "interrupts")
    assert finding.status == "warn"
    assert "May I send this?" in finding.what
    assert not of(await findings(graphs.agent(), LIMITED), "interrupts")


async def test_a_stop_that_was_compiled_in_asks_nothing() -> None:
    graph = graphs.tool_graph()
    graph.checkpointer, graph.interrupt_before_nodes = InMemorySaver(), ["tools"]
    (finding,) = of(await findings(graph, HELLO), "interrupts")
    assert "4 of 5 rollouts" in finding.what  # the brief one calls no tool
    assert "stopped at a node where it was compiled to stop" in finding.what


async def test_an_exception_on_the_policys_words_has_its_place() -> None:
    found = await findings(graphs.parsing(), HELLO)
    (finding,) = of(found, "ending")
    assert finding.status == "fail"  # no rollout came to its end
    assert "JSONDecodeError" in finding.what
    assert "graphs.py:" in finding.what
    assert "in node 'think'" in finding.what


async def test_exceptions_of_two_kinds_leave_no_rollout_too() -> None:
    found = await findings(graphs.failing_either_way(), HELLO)
    assert statuses(found, "ending") == ["fail", "fail"]


async def test_an_exception_before_any_call_is_nobodys_policy() -> None:
    found = await findings(graphs.failing_first(), HELLO)
    (finding,) = of(found, "ending")
    assert finding.status == "fail"
    assert "KeyError: 'DATABASE'" in finding.what
    assert "before the policy was asked" in finding.fix


async def test_a_tool_that_raises_is_named_with_its_arguments() -> None:
    found = await findings(graphs.failing_tool(), LIMITED)
    warned = [finding for finding in of(found, "tools") if finding.status == "warn"]
    (finding,) = warned
    assert "look_up raised LookupError: no order 10437" in finding.what
    assert statuses(await findings(graphs.agent(), LIMITED), "tools") == ["pass"]


async def test_a_stream_that_was_left_is_told() -> None:
    found = await findings(graphs.leaving_streams(), HELLO)
    assert statuses(found, "streams") == ["warn"]
    assert statuses(found, "tokens") == ["fail"]  # it was the only one
    assert statuses(await findings(graphs.reading_streams(), HELLO), "streams") == ["pass"]


async def test_a_rollout_that_takes_too_long_is_told_with_its_node() -> None:
    found = await findings(graphs.slow(), HELLO, timeout=0.2, group=2)
    (finding,) = of(found, "limits")
    assert finding.status == "fail"
    assert "wait" in finding.what


async def test_a_policy_that_never_stops_needs_a_limit() -> None:
    (finding,) = of(await findings(graphs.tool_graph(), HELLO), "limits")
    assert finding.status == "warn"
    assert "recursion_limit" in finding.fix
    assert statuses(await findings(graphs.tool_graph(), LIMITED), "limits") == ["pass"]


@pytest.mark.parametrize("scenario", [LIMITED, HELLO])
async def test_a_graph_that_never_stops_is_told(scenario: Scenario) -> None:
    (finding,) = of(await findings(graphs.looping(), scenario), "limits")
    assert finding.status == "warn"
    assert "though the policy had come to its end" in finding.what


async def test_answers_that_are_cut_are_told() -> None:
    found = await findings(graphs.tool_graph(max_tokens=8), LIMITED)
    assert statuses(found, "length") == ["pass", "warn"]
    assert "max_tokens=8" in of(found, "length")[1].what
    assert statuses(await findings(graphs.tool_graph(), LIMITED), "length") == ["pass"]


async def test_a_prompt_longer_than_a_small_models_context_is_told() -> None:
    long = Scenario({"messages": [{"role": "user", "content": "a b " * 5000}]})
    found = await findings(graphs.one_node(graphs.said(ChatArt())), long, group=1)
    assert statuses(found, "length") == ["warn"]


async def test_appended_history_has_no_drift() -> None:
    (finding,) = of(await findings(graphs.rewriting(), HELLO, group=1), "token-in")
    assert finding.status == "pass"
    assert "1 call went on" in finding.what


async def test_tokens_that_do_not_go_on_are_drift() -> None:
    """A server that renders history anew: every prompt has the ids 11, 12, 13."""
    with endpoint(lambda _: completion("ok")) as stub:
        player = Player("a server", stub.target())
        found = check(await perform(graphs.rewriting(), player, [HELLO], group=1))
    (finding,) = of(found, "token-in")
    assert finding.status == "warn"
    assert "think: answer rewritten" in finding.what


async def test_a_server_without_token_ids_fails_and_the_node_is_named() -> None:
    with endpoint(lambda _: completion("ok", None, prompt_ids=None)) as stub:
        graph = graphs.one_node(graphs.said(ChatArt()))
        found = check(await perform(graph, Player("a server", stub.target()), [HELLO], group=2))
    (finding,) = of(found, "tokens")
    assert finding.status == "fail"
    assert "2 calls of think can't be trained" in finding.what


async def test_a_request_that_the_endpoint_refuses_is_told_with_its_reason() -> None:
    image = {"type": "image_url", "image_url": {"url": "https://example.com/a.png"}}
    scenario = Scenario({"messages": [{"role": "user", "content": [image]}]})
    found = await findings(graphs.one_node(graphs.said(ChatArt())), scenario, group=2)
    (finding,) = of(found, "ending")
    assert finding.status == "fail"
    assert "image_url" in finding.what


# --- rewards


async def test_rewards_that_differ_pass() -> None:
    (finding,) = of(await findings(graphs.agent(), LIMITED, reward=served), "rewards")
    assert finding.status == "pass"
    assert "from 0 to 1" in finding.what


async def test_no_reward_is_skipped_by_name() -> None:
    (finding,) = of(await findings(graphs.agent(), LIMITED), "rewards")
    assert finding.status == "skipped"
    assert "--reward" in finding.fix


async def test_equal_rewards_fail() -> None:
    async def always(trajectory: Trajectory, scenario: Any) -> float:
        assert scenario == LIMITED.line
        return 0.5

    (finding,) = of(await findings(graphs.agent(), LIMITED, reward=always), "rewards")
    assert finding.status == "fail"
    assert "(0.5)" in finding.what
    assert "--model" in finding.fix


async def test_a_reward_that_the_script_never_earns_is_a_warning() -> None:
    """An exact answer, say: a model may give it, so the agent is not at fault."""
    found = await findings(graphs.agent(), LIMITED, reward=lambda _: 0.0)
    (finding,) = of(found, "rewards")
    assert finding.status == "warn"
    assert "--model" in finding.fix


@pytest.mark.parametrize("value", [None, float("nan"), "good"])
async def test_a_reward_that_is_no_number_fails(value: Any) -> None:
    found = await findings(graphs.agent(), LIMITED, reward=lambda _: value)
    (finding,) = of(found, "rewards")
    assert finding.status == "fail"
    assert repr(value) in finding.what


async def test_a_reward_that_raises_is_told_with_how_the_rollout_ended() -> None:
    def careless(trajectory: Trajectory) -> float:
        if trajectory.ended != "completed":
            raise IndexError("no last message")
        return float(len(trajectory.calls))

    found = await findings(graphs.agent(), LIMITED, reward=careless)
    wrong, spread = of(found, "rewards")
    assert (wrong.status, spread.status) == ("fail", "pass")
    assert "1 of 5 rollouts that ended by recursion_limit" in wrong.what
    assert "test_checks.py:" in wrong.what


async def test_groups_of_one_have_nothing_to_differ_from() -> None:
    other = Scenario({"messages": [{"role": "user", "content": "And 10438?"}]})
    found = await findings(graphs.agent(), LIMITED, other, reward=served, group=1)
    (finding,) = of(found, "rewards")
    assert finding.status == "skipped"
    assert "--group" in finding.fix


# --- stock clients


@pytest.mark.parametrize(
    ("asked", "expected"),
    [({}, []), ({"temperature": 0.7}, []), ({"temperature": 0}, ["fail"]), ({"seed": 7}, ["fail"])],
)
async def test_a_stock_client_whose_group_would_be_alike(
    asked: dict[str, Any], expected: list[str]
) -> None:
    with ScriptedStage() as stage:
        await stage.prepare()
        player = Player("scripted", stage.target(), stage.records, stage.open)
        llm = ChatOpenAI(model="stock", base_url=stage.base_url, api_key=KEY, **asked)
        found = check(await perform(graphs.one_node(graphs.said(llm)), player, [HELLO]))
    assert statuses(found, "model calls") == ["pass"]
    assert statuses(found, "sampling") == expected


async def test_what_an_address_holds_beside_the_host_is_not_shown() -> None:
    with endpoint(lambda _: completion("ok")) as stub:
        url = stub.base_url.replace("http://", "http://ann:hunter2@") + "?key=hunter3"
        found = await findings(graphs.foreign(url), HELLO)
    (finding,) = of(found, "other models")
    assert f"ChatOpenAI gpt-4o at {stub.base_url}" in finding.what
    assert "hunter" not in str(found)


async def test_tool_calls_of_which_none_can_be_read_are_told() -> None:
    with endpoint(lambda _: completion('<tool_call>\n{"name": "order')) as stub:
        found = check(
            await perform(graphs.tool_graph(), Player("a server", stub.target()), [HELLO])
        )
    (finding,) = of(found, "tools")
    assert finding.status == "warn"
    assert "5 that could not be" in finding.what


def test_a_lost_call_among_several_exceptions_is_seen() -> None:
    assert lost(ExceptionGroup("two", [ValueError("x"), CaptureError("lost")]))
    assert not lost(ExceptionGroup("one", [ValueError("x")]))


async def test_a_stock_client_in_a_bare_thread_is_told_what_to_do() -> None:
    with ScriptedStage() as stage:
        await stage.prepare()
        player = Player("scripted", stage.target(), stage.records, stage.open)
        llm = ChatOpenAI(model="stock", base_url=stage.base_url, api_key=KEY)
        with pytest.warns(LostCalls):
            played = await perform(graphs.in_bare_thread(llm), player, [HELLO], group=1)
    (finding,) = of(check(played), "recording")
    assert finding.status == "warn"
    assert "ContextThreadPoolExecutor" in finding.fix
