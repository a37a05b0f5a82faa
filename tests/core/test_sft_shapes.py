"""Rows of every shape that supervised data comes in, as conversations of one shape."""

from __future__ import annotations

import json
from typing import Any

import pytest
from langchain_core.load import dumpd
from langchain_core.messages import (
    AIMessage,
    HumanMessage,
    SystemMessage,
    ToolMessage,
    messages_to_dict,
)

from art_core.sft.conversation import Conversation, check_conversation
from art_core.sft.shapes import read_row

CALL = {
    "id": "c1",
    "type": "function",
    "function": {"name": "look", "arguments": '{"q": "é"}'},
}
FUNCTION = {"name": "look", "description": "d", "parameters": {"type": "object"}}
TOOLS = [{"type": "function", "function": FUNCTION}]
CONVERSATION: list[dict[str, Any]] = [
    {"role": "system", "content": "s"},
    {"role": "user", "content": "q"},
    {"role": "assistant", "content": "", "tool_calls": [CALL]},
    {"role": "tool", "tool_call_id": "c1", "content": "r"},
    {"role": "assistant", "content": "a"},
]
LANGCHAIN = [
    SystemMessage("s"),
    HumanMessage("q"),
    AIMessage("", tool_calls=[{"name": "look", "args": {"q": "é"}, "id": "c1"}]),
    ToolMessage("r", tool_call_id="c1"),
    AIMessage("a"),
]


def row_of(messages: Any, **more: Any) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(json.dumps({"messages": messages, **more}))
    return found


def test_openai() -> None:
    shape, found = read_row(row_of(CONVERSATION, tools=TOOLS, parallel_tool_calls=False))
    assert shape == "OpenAI"
    assert found == Conversation(CONVERSATION, TOOLS, {2: 1.0, 4: 1.0})


@pytest.mark.parametrize(
    "messages",
    [
        messages_to_dict(LANGCHAIN),
        [message.model_dump() for message in LANGCHAIN],
        [dumpd(message) for message in LANGCHAIN],
    ],
    ids=["messages_to_dict", "model_dump", "dumpd"],
)
def test_langchain(messages: list[dict[str, Any]]) -> None:
    """As langchain-core itself writes them."""
    shape, found = read_row(row_of(messages, tools=[FUNCTION]))
    assert shape == "LangChain"
    assert found == Conversation(CONVERSATION, TOOLS, {2: 1.0, 4: 1.0})


def test_langchain_pairs_and_content_parts() -> None:
    messages = [["system", "s"], ["human", "q"], ["ai", "a"]]
    assert read_row(row_of(messages))[1].messages == [
        {"role": "system", "content": "s"},
        {"role": "user", "content": "q"},
        {"role": "assistant", "content": "a"},
    ]
    parts: list[Any] = [
        {"type": "text", "text": "a"},
        {"type": "tool_use", "name": "look", "input": {}},
    ]
    message = AIMessage(parts, tool_calls=[{"name": "look", "args": {}, "id": "c"}])
    (_, answer) = read_row(row_of(messages_to_dict([HumanMessage("q"), message])))[1].messages
    assert answer["content"] == [{"type": "text", "text": "a"}]
    assert answer["tool_calls"][0]["function"] == {"name": "look", "arguments": "{}"}


def test_a_call_in_the_form_of_2023_is_kept() -> None:
    old = {"name": "look", "arguments": '{"q": 1}'}
    answer = AIMessage("wait", additional_kwargs={"function_call": old})
    _, found = read_row(row_of(messages_to_dict([HumanMessage("q"), answer])))
    assert found.messages[1]["tool_calls"][0]["function"] == old


def test_langchain_calls_that_could_not_be_read_are_refused() -> None:
    broken = {"name": "look", "args": '{"q', "id": "c", "error": None, "type": "invalid_tool_call"}
    message = AIMessage("", invalid_tool_calls=[broken])
    with pytest.raises(ValueError, match="message 1 has tool calls that could not be read"):
        read_row(row_of(messages_to_dict([HumanMessage("q"), message])))


def test_sharegpt() -> None:
    turns = [
        {"from": "human", "value": "q"},
        {"from": "function_call", "value": '{"name": "look", "arguments": {"q": "é"}}'},
        {"from": "observation", "value": "r"},
        {"from": "gpt", "value": "a", "weight": 0.5},
    ]
    shape, found = read_row(
        {"conversations": turns, "system": "s", "tools": json.dumps([FUNCTION]), "id": "x"}
    )
    assert shape == "ShareGPT"
    assert found.weights == {2: 1.0, 4: 0.5}
    assert found.tools == TOOLS
    assert [(m["role"], m["content"]) for m in found.messages] == [
        ("system", "s"), ("user", "q"), ("assistant", ""), ("tool", "r"), ("assistant", "a"),
    ]  # fmt: skip
    assert found.messages[2]["tool_calls"][0]["function"] == {
        "name": "look",
        "arguments": '{"q": "é"}',
    }
    assert found.warnings == ()


def test_openai_rows_of_2023() -> None:
    old = {"role": "assistant", "content": None, "function_call": CALL["function"]}
    result = {"role": "function", "name": "look", "content": "r"}
    end = {"role": "assistant", "content": "a"}
    found = read_row(row_of([CONVERSATION[1], old, result, end], functions=[FUNCTION]))[1]
    assert found.messages[1]["tool_calls"][0]["function"] == CALL["function"]
    assert "function_call" not in found.messages[1]
    assert found.tools == TOOLS


@pytest.mark.parametrize(
    ("weights", "trained"),
    [
        ((None, None), {1: 1.0, 3: 1.0}),
        ((0, 1), {1: 0.0, 3: 1.0}),
        ((0.5, 1), {1: 0.5, 3: 1.0}),
        ((False, True), {1: 0.0, 3: 1.0}),
    ],
)
def test_weights(weights: tuple[Any, Any], trained: dict[int, float]) -> None:
    """Case 082: bools are 0 and 1, others count as they are."""
    messages = alternating(weights)
    found = check_conversation(messages)
    assert found.weights == trained
    assert found.warnings == ()
    assert all("weight" not in message for message in found.messages)


def alternating(weights: tuple[Any, Any]) -> list[dict[str, Any]]:
    messages = []
    for weight in weights:
        given = {} if weight is None else {"weight": weight}
        messages += [
            {"role": "user", "content": "q"},
            {"role": "assistant", "content": "a", **given},
        ]
    return messages


@pytest.mark.parametrize(
    "weight",
    ["0", -1, float("nan"), float("inf"), [1], 1e308, pytest.param(10**400, id="no float")],
)
def test_weights_that_are_refused(weight: Any) -> None:
    with pytest.raises(ValueError, match="the weight of message 3 must be a number from 0 on"):
        check_conversation(alternating((1, weight)))


def test_what_is_ignored_is_told_once() -> None:
    """Case 082: a weight of the user's, and a key that somebody else's trainer reads."""
    messages = alternating((None, None))
    messages[0]["weight"] = messages[2]["weight"] = 1
    messages[1]["train"] = False
    assert check_conversation(messages).warnings == (
        "the weight of a user message; only answers are trained",
        'unknown key "train" in a message',
    )


def test_what_is_context_only_may_be_broken() -> None:
    broken = {"id": "c", "type": "function", "function": {"name": "f", "arguments": '{"q'}}
    messages = [
        USER,
        {"role": "assistant", "tool_calls": [broken], "weight": 0},
        {"role": "assistant", "content": "", "weight": 0},
        {"role": "assistant", "content": "a"},
    ]
    assert check_conversation(messages).trained == [3]


USER = {"role": "user", "content": "q"}
DEEP = "[" * 100_000 + "]" * 100_000
"""JSON that Python's reader can't follow."""


@pytest.mark.parametrize(
    ("row", "why"),
    [
        ({"prompt": "a", "completion": "b"}, 'has no "messages"'),
        ({"messages": []}, "something in it"),
        ({"messages": {}}, "must be a list"),
        ({"messages": ["hi"]}, "message 0 must be an object"),
        ({"messages": [USER]}, "no assistant message"),
        ({"messages": [USER, {"role": "bot", "content": "a"}]}, 'has the role "bot"'),
        ({"messages": [USER, {"role": "assistant"}]}, "an empty answer"),
        ({"messages": [USER, {"role": "assistant", "content": 3}]}, "must be a text, not 3"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
            'a part of type "image_url"',
        ),
        (
            {"messages": [USER, {"role": "assistant", "tool_calls": [{"id": "c"}]}]},
            "names no function",
        ),
        (
            {
                "messages": [
                    USER,
                    {
                        "role": "assistant",
                        "tool_calls": [{"function": {"name": "f", "arguments": '{"a'}}],
                    },
                ]
            },
            "are not JSON",
        ),
        (
            {
                "messages": [
                    USER,
                    {
                        "role": "assistant",
                        "tool_calls": [{"function": {"name": "f", "arguments": "[1]"}}],
                    },
                ]
            },
            "must be an object",
        ),
        ({"messages": alternating((1, 1)), "tools": [{"type": "function"}]}, "tool 0 has no name"),
        (
            {"messages": [USER, {"role": "assistant", "tool_calls": [{"function": {"name": ""}}]}]},
            "names no function",
        ),
        ({"messages": alternating((1, 1)), "tools": "look"}, "tools must be a list"),
        ({"conversations": [{"from": "alien", "value": "x"}]}, 'is from "alien"'),
        ({"conversations": [{"from": "function_call", "value": "x"}]}, "not JSON"),
        ({"conversations": "x"}, "must be a list"),
        ({"messages": [{"type": "remove", "id": "1"}]}, "no message of LangChain"),
        ({"messages": [{"type": "ai", "content": "a", "tool_calls": 3}]}, "must be a list, not 3"),
        (
            {"messages": [{"role": "assistant", "tool_calls": 3, "function_call": {"name": "f"}}]},
            "must be a list, not 3",
        ),
        ({"conversations": [{"from": "function_call", "value": DEEP}]}, "not JSON"),
        ({"conversations": [], "tools": DEEP}, "not JSON"),
        (
            {"messages": [USER, {"role": "assistant", "content": "a", "reasoning_content": 3}]},
            "the reasoning_content of message 1 must be a text, not 3",
        ),
    ],
)
def test_rows_that_are_refused(row: dict[str, Any], why: str) -> None:
    with pytest.raises(ValueError) as caught:  # noqa: PT011 - the message is looked at
        read_row(row)
    assert why in str(caught.value)


def calling(arguments: Any) -> dict[str, Any]:
    call = {"function": {"name": "f", "arguments": arguments}}
    return {"messages": [USER, {"role": "assistant", "tool_calls": [call]}]}


@pytest.mark.parametrize(
    "arguments", ["null", "[]", "0", [], 0, False, '{"a": NaN}', '{"a": -Infinity}']
)
def test_arguments_that_a_template_would_show_as_text_are_not_learned(arguments: Any) -> None:
    """The engine takes such a call for broken: `{"arguments": null}` would be learned as text."""
    with pytest.raises(ValueError, match="the arguments of tool call 0 of message 1"):
        read_row(calling(arguments))


@pytest.mark.parametrize("arguments", [None, "", " ", {}, "{}"])
def test_a_call_may_have_no_arguments(arguments: Any) -> None:
    assert read_row(calling(arguments))[1].trained == [1]


def test_a_long_value_is_not_told_whole() -> None:
    with pytest.raises(ValueError) as caught:  # noqa: PT011 - the message is looked at
        read_row({"messages": [USER, {"role": "assistant", "content": {"x": "secret" * 100}}]})
    assert len(str(caught.value)) < 160
