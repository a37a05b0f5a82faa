"""Scenarios out of files and out of input schemas."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any, NotRequired, TypedDict

import pytest
from langchain_core.runnables import Runnable, RunnableLambda
from langgraph.graph import START, StateGraph
from langgraph.graph.message import add_messages
from langgraph.pregel.remote import RemoteGraph

from art_core.errors import ConfigError
from art_langgraph.rehearsal.scenarios import (
    TASK,
    Scenario,
    fitted,
    made_up_scenario,
    read_scenarios,
)
from tests.langgraph.rehearsal import graphs

MESSAGES = '{"messages": [{"role": "user", "content": "Hi"}]}'


def test_a_line_is_an_input_or_holds_one(tmp_path: Path) -> None:
    file = tmp_path / "scenarios.jsonl"
    file.write_text(
        f'\ufeff{MESSAGES}\n\n"a text"\n'
        '{"input": {"x": 1}, "config": {"recursion_limit": 9}, "context": {"user": "ann"}}\n'
        '{"input": 1, "answer": 2}\n',
        "utf-8",
    )
    plain, text, whole, own = read_scenarios(file)
    assert plain.input == {"messages": [{"role": "user", "content": "Hi"}]}
    assert text.input == "a text"
    assert (whole.input, whole.config, whole.context) == (
        {"x": 1}, {"recursion_limit": 9}, {"user": "ann"},
    )  # fmt: skip
    assert own.input == {"input": 1, "answer": 2}  # a state of its own, with a part of that name


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("", "there are no scenarios"),
        ("{'single': 'quotes'}\n", "scenarios.jsonl:1 is no JSON"),
        ('{"input": 1, "config": []}\n{"input": 1, "config": 3}\n', "config in"),
    ],
)
def test_a_file_that_holds_none_is_one_message(tmp_path: Path, text: str, told: str) -> None:
    file = tmp_path / "scenarios.jsonl"
    file.write_text(text, "utf-8")
    with pytest.raises(ConfigError, match=told):
        read_scenarios(file)


def test_a_file_that_is_not_there_is_one_message(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="can't be read"):
        read_scenarios(tmp_path / "none.jsonl")


def test_a_text_may_hold_any_line_end_but_the_files(tmp_path: Path) -> None:
    file = tmp_path / "scenarios.jsonl"
    file.write_text('"one\u2028line\u0085"\r\n"two"\n', "utf-8", newline="")
    assert [s.input for s in read_scenarios(file)] == ["one\u2028line\u0085", "two"]


def test_a_line_may_say_more_than_what_goes_in() -> None:
    """What the reward wants to know stands beside "input", or beside the graph's own parts."""
    inner = {"messages": [("user", "hi")]}
    line = {"input": inner, "config": {"tags": ["a"]}, "answer": "4"}
    made = fitted(Scenario(line, line=line), graphs.agent())
    assert (made.input, made.config, made.line) == (inner, {"tags": ["a"]}, line)
    beside = Scenario({**inner, "answer": "4"})
    assert fitted(beside, graphs.agent()) is beside


@pytest.mark.parametrize("key", ["task", "input"])
def test_a_line_without_anything_that_goes_in_is_told_how(key: str) -> None:
    line = {key: "Where is 7?", "answer": "here"}
    with pytest.raises(ConfigError, match="nothing that goes into the graph") as raised:
        fitted(Scenario(line, line=line), graphs.agent())
    proposed = json.loads(raised.value.fix.partition("reward: ")[2])
    assert proposed["input"] == {"messages": [{"role": "user", "content": "Where is 7?"}]}
    assert fitted(Scenario(proposed, line=proposed), graphs.agent()).input == proposed["input"]


@pytest.mark.parametrize("given", ["a text", {}, ["x"]])
def test_what_else_goes_in_is_the_graphs_affair(given: Any) -> None:
    scenario = Scenario(given)
    assert fitted(scenario, graphs.agent()) is scenario
    anything = Scenario({"x": 1})
    assert fitted(anything, RunnableLambda(lambda x: x)) is anything


def test_a_messages_graph_is_asked_something() -> None:
    scenario = made_up_scenario(graphs.agent())
    assert scenario.input == {"messages": [{"role": "user", "content": TASK}]}


def test_typing_typed_dicts_work_on_every_python() -> None:
    """pydantic refuses `typing.TypedDict` before Python 3.12."""
    scenario = made_up_scenario(graphs.router())
    assert scenario.input["question"] == TASK


def test_what_the_input_requires_beside_messages_is_given() -> None:
    class State(TypedDict):
        messages: Annotated[list[Any], add_messages]
        customer: str
        note: NotRequired[str]

    graph = StateGraph(State)
    graph.add_node("think", lambda state: {})
    graph.add_edge(START, "think")
    made = made_up_scenario(graph.compile()).input
    assert made.keys() == {"messages", "customer"}
    assert isinstance(made["customer"], str)


def test_a_runnable_without_types_needs_scenarios() -> None:
    class Mine(Runnable):  # type: ignore[type-arg]  # as users write it
        def invoke(self, input: Any, config: Any = None, **kwargs: Any) -> Any:
            return input

    with pytest.raises(ConfigError, match="--scenarios"):
        made_up_scenario(Mine())


def test_a_graph_elsewhere_needs_scenarios() -> None:
    with pytest.raises(ConfigError, match="--scenarios"):
        made_up_scenario(RemoteGraph("agent", client=object(), sync_client=object()))  # type: ignore[arg-type]  # never asked


def test_an_input_that_says_nothing_needs_scenarios() -> None:
    def anything(given: Any) -> Any:
        return given

    with pytest.raises(ConfigError, match="--scenarios"):
        made_up_scenario(RunnableLambda(anything))
