"""LangChain messages to OpenAI's shape and back."""

from __future__ import annotations

import json
from typing import Any

import pytest
from langchain_core.messages import (
    AIMessage,
    AIMessageChunk,
    BaseMessage,
    ChatMessage,
    HumanMessage,
    SystemMessage,
    ToolCall,
    ToolMessage,
)
from langchain_openai.chat_models.base import _convert_message_to_dict

from art_langgraph.messages import mend_texts, mend_tool_calls, to_langchain, to_openai
from tests.stub_endpoint import call

CONVERSATION: list[dict[str, Any]] = [
    {"role": "system", "content": "s"},
    {"role": "developer", "content": "d"},
    {"role": "user", "content": "q", "name": "ann"},
    {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
    {"role": "assistant", "content": None, "tool_calls": [call("add", '{"a": 1}', "c1")]},
    {"role": "tool", "content": "2", "tool_call_id": "c1"},
    {"role": "assistant", "content": "cut", "tool_calls": [call("add", '{"a": "x', "c2")]},
    {"role": "assistant", "content": "done", "reasoning_content": "easy"},
]


def test_both_ways_give_the_same_messages() -> None:
    assert to_openai(to_langchain(CONVERSATION)) == CONVERSATION


def test_what_langchain_gets() -> None:
    messages = to_langchain(CONVERSATION)
    assert [m.type for m in messages] == [
        "system", "system", "human", "human", "ai", "tool", "ai", "ai",
    ]  # fmt: skip
    called, broken = messages[4], messages[6]
    assert isinstance(called, AIMessage)
    assert isinstance(broken, AIMessage)
    assert called.tool_calls[0]["args"] == {"a": 1}
    assert broken.tool_calls == []
    assert broken.invalid_tool_calls[0]["args"] == '{"a": "x'


@pytest.mark.parametrize(
    "message",
    [
        SystemMessage("s"),
        HumanMessage("q", name="ann"),
        AIMessage("a"),
        AIMessageChunk(content="a"),
        AIMessage("", tool_calls=[{"id": "c", "name": "f", "args": {"ä": 1}}]),
        ToolMessage("r", tool_call_id="c"),
        ChatMessage(content="x", role="critic"),
        SystemMessage("d", additional_kwargs={"__openai_role__": "developer"}),
        HumanMessage([{"type": "text", "text": "t"}]),
    ],
    ids=lambda message: type(message).__name__,
)
def test_openais_shape_is_that_of_chat_openai(message: BaseMessage) -> None:
    assert to_openai([message]) == [_convert_message_to_dict(message)]


@pytest.mark.parametrize("kind", ["tool_call", "tool_use", "reasoning", "thinking"])
def test_blocks_that_chat_openai_does_not_send_are_left_out(kind: str) -> None:
    """LangChain's standard content, and Anthropic's, repeat the calls and hold thoughts."""
    calls = [ToolCall(name="f", args={}, id="c")]
    said = AIMessage([{"type": "text", "text": "t"}, {"type": kind, "id": "c"}], tool_calls=calls)
    (shape,) = to_openai([said])
    assert shape["content"] == [{"type": "text", "text": "t"}]
    assert [c["id"] for c in shape["tool_calls"]] == ["c"]
    (only,) = to_openai([AIMessage([{"type": kind, "id": "c"}], tool_calls=calls)])
    assert only["content"] is None


@pytest.mark.parametrize(
    "given",
    ["q", ["q"], ("user", "q"), [("user", "q")], [["user", "q"]], {"role": "user", "content": "q"}],
    ids=["string", "strings", "tuple", "tuples", "lists", "dict"],
)
def test_forms_of_a_users_message(given: Any) -> None:
    if given == ("user", "q"):
        given = [given]
    assert to_openai(given) == [{"role": "user", "content": "q"}]


def test_a_dict_of_langchains_shape_is_read_too() -> None:
    assert to_openai([{"type": "human", "content": "q"}]) == [{"role": "user", "content": "q"}]


def test_an_unknown_role_is_refused() -> None:
    with pytest.raises(ValueError, match="'critic'"):
        to_langchain([{"role": "critic", "content": "x"}])


@pytest.mark.parametrize(
    ("raw", "mended"),
    [
        ('{"path":"a.txt","text":"hel', {"path": "a.txt", "text": "hel"}),
        ('{"a": [1, 2', {"a": [1, 2]}),
        ('{"a":', {}),
        ("null", {}),
        ("[]", {}),
        ("3", {}),
        ("hello", {}),
        ("", {}),
        (None, {}),
        ('{"a": NaN, "b": [-Infinity, 1.5]}', {"a": None, "b": [None, 1.5]}),
        ('{"a": ' + "[" * 3000, {}),
    ],
)
def test_broken_arguments_are_mended(raw: Any, mended: Any) -> None:
    (message,) = mend_tool_calls([{"role": "assistant", "tool_calls": [call("f", raw)]}])
    sent = message["tool_calls"][0]["function"]["arguments"]
    assert json.loads(sent, parse_constant=pytest.fail) == mended


def test_whole_messages_are_left_alone_and_broken_ones_are_not_changed_in_place() -> None:
    whole = {"role": "assistant", "tool_calls": [call("f", '{"a":1}')]}
    calls = [call("f", '{"a":'), call("g", "{}")]
    broken = {"role": "assistant", "tool_calls": calls}
    mended = mend_tool_calls([whole, broken])
    assert mended[0] is whole
    assert calls[0]["function"]["arguments"] == '{"a":'
    assert [c["function"]["arguments"] for c in mended[1]["tool_calls"]] == ["{}", "{}"]


def test_texts_that_utf8_does_not_know_are_mended() -> None:
    """A file name out of the file system, a text cut in an emoji, and one that was put together."""
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": '"\ud83d"'}}
    plain = {"role": "user", "content": "caf\u00e9 \U0001f600"}
    messages: list[dict[str, Any]] = [
        plain,
        {"role": "tool", "tool_call_id": "c", "content": "a\udce9.txt"},
        {"role": "user", "content": [{"type": "text", "text": "x\ud83d"}, {"type": "image"}]},
        {"role": "user", "content": "\ud83d\ude00"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
    ]
    mended = mend_texts(messages)
    assert mended[0] is plain
    assert mended[1]["content"] == "a\ufffd.txt"
    assert mended[2]["content"] == [{"type": "text", "text": "x\ufffd"}, {"type": "image"}]
    assert mended[3]["content"] == "\U0001f600"
    assert mended[4]["tool_calls"][0]["function"]["arguments"] == '"\ufffd"'
    json.dumps(mended, ensure_ascii=False).encode()
