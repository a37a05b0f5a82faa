"""Messages in normal form: what templates get, and when two messages are the same."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

import pytest

from art_core.engine.api_errors import ApiError
from art_core.engine.messages import identity, strict_loads, template_messages, turn_keys


def call(arguments: Any, name: str = "look", call_id: str = "c1") -> dict[str, Any]:
    return {
        "id": call_id,
        "type": "function",
        "function": {"name": name, "arguments": arguments},
    }


def one(message: dict[str, Any]) -> dict[str, Any]:
    return template_messages([message])[0]


@pytest.mark.parametrize(
    ("role", "shown"),
    [("developer", "system"), ("function", "tool"), ("system", "system"), ("user", "user")],
)
def test_roles_that_templates_do_not_know_are_rendered_as_those_they_know(
    role: str, shown: str
) -> None:
    assert one({"role": role, "content": "x"})["role"] == shown


def test_text_parts_are_joined_and_no_content_is_empty_text() -> None:
    parts = [{"type": "text", "text": "a "}, {"type": "text", "text": "b"}]
    assert one({"role": "user", "content": parts})["content"] == "a b"
    assert one({"role": "assistant", "content": None})["content"] == ""
    assert one({"role": "assistant"})["content"] == ""


@pytest.mark.parametrize("kind", ["image_url", "input_audio", "file"])
def test_a_part_that_is_no_text_is_refused_by_name(kind: str) -> None:
    messages: list[dict[str, Any]] = [
        {"role": "system", "content": "s"},
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": kind, kind: {}}]},
    ]
    with pytest.raises(ApiError, match=f"'{kind}'") as fault:
        template_messages(messages)
    assert fault.value.param == "messages.[1].content.[1]"


def test_arguments_are_parsed_on_a_copy() -> None:
    """Case 031: the wire has a JSON string, templates want a mapping."""
    message = {"role": "assistant", "content": None, "tool_calls": [call('{"city": "Oslo"}')]}
    before = deepcopy(message)
    assert one(message)["tool_calls"][0]["function"]["arguments"] == {"city": "Oslo"}
    assert message == before


@pytest.mark.parametrize("raw", ["", "  ", None])
def test_no_arguments_are_an_empty_object(raw: str | None) -> None:
    """Case 003, first call."""
    shown = one({"role": "assistant", "tool_calls": [call(raw)]})
    assert shown["tool_calls"][0]["function"]["arguments"] == {}


@pytest.mark.parametrize(
    "raw", ['{"path":"a.txt","text":"hel', "null", "[]", '{"a": NaN}', "3", r'{"a": "\ud83d"}']
)
def test_a_broken_call_in_history_stays_as_the_text_it_is(raw: str) -> None:
    """Cases 003 and 005: it is neither refused nor turned into another call."""
    shown = one({"role": "assistant", "content": "so", "tool_calls": [call(raw), call("{}")]})
    assert shown["content"] == (
        f'so\n<tool_call>\n{{"name": "look", "arguments": {raw}}}\n</tool_call>'
    )
    assert [c["function"]["arguments"] for c in shown["tool_calls"]] == [{}]


@pytest.mark.parametrize(
    ("message", "says"),
    [
        ("hi", "not an object"),
        ({"role": "bot", "content": "x"}, "'bot'"),
        ({"content": "x"}, "unknown message role: got None"),
        ({"role": "user", "content": 3}, "got 3"),
        ({"role": "assistant", "tool_calls": [{"id": "c"}]}, "names no function"),
        ({"role": "assistant", "tool_calls": {"id": "c"}}, "not a list"),
        ({"role": "assistant", "function_call": {"name": "x"}}, "function_call"),
    ],
)
def test_what_can_not_be_rendered_is_refused(message: Any, says: str) -> None:
    with pytest.raises(ApiError, match=says):
        template_messages([message])


def test_normal_form_is_final() -> None:
    messages: list[dict[str, Any]] = [
        {"role": "developer", "content": [{"type": "text", "text": "s"}]},
        {"role": "assistant", "content": None, "tool_calls": [call('{"a": 1}'), call("{")]},
        {"role": "tool", "tool_call_id": "c1", "content": "r"},
    ]
    once = template_messages(messages)
    assert template_messages(once) == once


SAME = [
    ({"content": "x"}, {"content": [{"type": "text", "text": "x"}]}),
    ({"content": ""}, {"content": None}),
    ({"content": "x\n"}, {"content": "x"}),
    (
        {"content": None, "tool_calls": [call('{"a":1,"b":[true]}')]},
        {"content": "", "tool_calls": [call('{ "b": [true], "a": 1 }', call_id="other")]},
    ),
    ({"tool_calls": [call('{"a":"\\u00e9"}')]}, {"tool_calls": [call('{"a":"é"}')]}),
]
OTHER = [
    ({"content": "x"}, {"content": "y"}),
    ({"content": "x"}, {"content": "x", "role": "user"}),
    ({"tool_calls": [call('{"a":1}')]}, {"tool_calls": [call('{"a":2}')]}),
    ({"tool_calls": [call('{"a":1}')]}, {"tool_calls": [call('{"a":true}')]}),
    ({"tool_calls": [call('{"a":1}')]}, {"tool_calls": [call('{"a":"1"}')]}),
    ({"tool_calls": [call("{}")]}, {"tool_calls": [call("{}", name="find")]}),
    ({"tool_calls": [call("{}")]}, {"tool_calls": [call("{}"), call("{}")]}),
]


@pytest.mark.parametrize(("left", "right"), SAME)
def test_spelling_does_not_make_another_message(
    left: dict[str, Any], right: dict[str, Any]
) -> None:
    ids = [identity(one({"role": "assistant", **message})) for message in (left, right)]
    assert ids[0] == ids[1]


@pytest.mark.parametrize(("left", "right"), OTHER)
def test_meaning_makes_another_message(left: dict[str, Any], right: dict[str, Any]) -> None:
    ids = [identity(one({"role": "assistant", **message})) for message in (left, right)]
    assert ids[0] != ids[1]


def test_turn_keys_tell_conversations_apart_by_all_that_came_before() -> None:
    a, b = {"role": "user", "content": "a"}, {"role": "user", "content": "b"}
    assert turn_keys([a, b], None)[:1] == turn_keys([a], None)
    assert turn_keys([a, b], None)[1] != turn_keys([b, b], None)[1]
    assert turn_keys([a], [{"type": "function"}]) != turn_keys([a], None)
    assert turn_keys([a], []) == turn_keys([a], None)


def test_strict_json_only() -> None:
    for text in ("NaN", "[Infinity]", "{} x", "'a'", "[" * 100_000):
        with pytest.raises(ValueError, match=r"."):
            strict_loads(text)
