"""Hermes tool calls: what is one, what stays text, and that cutting changes nothing."""

from __future__ import annotations

import random
import time

import pytest

from art_core.engine.forms.calls import Event, ToolCall
from art_core.engine.toolcalls import ToolCallParser, parse_tool_calls


def hermes(body: str) -> str:
    return f"<tool_call>\n{body}\n</tool_call>"


ADD = hermes('{"name": "add", "arguments": {"a": 1}}')
ADDED = ToolCall("add", '{"a": 1}')

WHOLE: dict[str, tuple[str, str, list[ToolCall]]] = {
    "no call": ("plain <b>text</b> ", "plain <b>text</b> ", []),
    "only white space": (" \n", " \n", []),
    "one call": (ADD, "", [ADDED]),
    "text before": (f"Let me see.\n{ADD}", "Let me see.", [ADDED]),
    "text on both sides": (f"Hi\n{ADD}\n bye \n", "Hi\nbye \n", [ADDED]),
    "two calls": (f"{ADD}\n{ADD}\n", "", [ADDED, ADDED]),
    "no white space": (
        '<tool_call>{"name":"add","arguments":{"a":1}}</tool_call>',
        "",
        [ToolCall("add", '{"a":1}')],
    ),
    "spelling is kept": (
        hermes('{"arguments" : {"x": 1.0e3,  "y":"\\u00e9"} , "name":"\\u0061dd"}'),
        "",
        [ToolCall("add", '{"x": 1.0e3,  "y":"\\u00e9"}')],
    ),
    "no arguments": (hermes('{"name": "now"}'), "", [ToolCall("now", "{}")]),
    "closing tag inside a string (case 049)": (
        hermes('{"name": "w", "arguments": {"t": "close </tool_call> \\" { please"}}'),
        "",
        [ToolCall("w", '{"t": "close </tool_call> \\" { please"}')],
    ),
    "brackets inside strings": (
        hermes('{"name": "w", "arguments": {"t": ["]}", {"{": "\\\\"}]}}'),
        "",
        [ToolCall("w", '{"t": ["]}", {"{": "\\\\"}]}')],
    ),
    "the last of two equal keys counts": (
        hermes('{"name": "a", "name": "w", "arguments": {"a": 1}, "arguments": {"b": 2}}'),
        "",
        [ToolCall("w", '{"b": 2}')],
    ),
    "an opening tag too many": (f"<tool_call>\n{ADD}", "<tool_call>", [ADDED]),
}

BROKEN = {
    "no JSON": hermes("add(1)"),
    "bad JSON": hermes("{bad}"),
    "trailing comma": hermes('{"name": "add", "arguments": {},}'),
    "missing brace": hermes('{"name": "add", "arguments": {"a": 1}'),
    "NaN": hermes('{"name": "add", "arguments": {"a": NaN}}'),
    "raw line break in a string": hermes('{"name": "add", "arguments": {"a": "x\ny"}}'),
    "arguments in a string": hermes('{"name": "add", "arguments": "{}"}'),
    "arguments in a list": hermes('{"name": "add", "arguments": []}'),
    "no name": hermes('{"arguments": {}}'),
    "empty name": hermes('{"name": "", "arguments": {}}'),
    "a list": hermes('[{"name": "add", "arguments": {}}]'),
    "too deep": hermes('{"name": "add", "arguments": {"a": ' + "[" * 5000 + "]" * 5000 + "}}"),
    "not closed": '<tool_call>\n{"name": "add", "arguments": {}}',
    "cut inside": '<tool_call>\n{"name": "add", "argu',
    "cut inside the closing tag": '<tool_call>{"name": "add", "arguments": {}}</tool_',
    "text before the closing tag": '<tool_call>{"name": "add", "arguments": {}} x</tool_call>',
    "half a tag": "a <tool_ca",
}


@pytest.mark.parametrize("case", WHOLE)
def test_calls_and_text_are_told_apart(case: str) -> None:
    text, content, calls = WHOLE[case]
    assert parse_tool_calls(text) == (content, calls)


@pytest.mark.parametrize("case", BROKEN)
def test_a_broken_call_stays_text(case: str) -> None:
    text = BROKEN[case]
    assert parse_tool_calls(text) == (text, [])


@pytest.mark.parametrize("case", [c for c in BROKEN if "cut" not in c and c != "half a tag"])
def test_a_broken_call_does_not_take_a_good_one_with_it(case: str) -> None:
    assert parse_tool_calls(f"{BROKEN[case]}\n{ADD}") == (BROKEN[case], [ADDED])


def merged(events: list[Event]) -> list[Event]:
    out: list[Event] = []
    for event in events:
        if isinstance(event, str) and out and isinstance(out[-1], str):
            out[-1] += event
        else:
            out.append(event)
    return out


@pytest.mark.parametrize(
    "text", [text for text, _, _ in WHOLE.values()] + [t for t in BROKEN.values() if len(t) < 500]
)
def test_cutting_the_text_changes_nothing(text: str) -> None:
    text = f"{text} {ADD} end <tool"
    whole = ToolCallParser()
    expected = merged([*whole.push(text), *whole.finish()])
    rng = random.Random(len(text))
    for longest in (1, 2, 5, 20):
        parser, events, at = ToolCallParser(), list[Event](), 0
        while at < len(text):
            size = rng.randint(1, longest)
            events += parser.push(text[at : at + size])
            at += size
        assert merged([*events, *parser.finish()]) == expected


def test_text_is_given_out_at_once_and_no_part_of_a_tag_ever() -> None:
    parser = ToolCallParser()
    given = [parser.push(c) for c in "ab <t <tool_call>{"]
    assert given[:4] == [["a"], ["b"], [], []]
    assert "".join(e for events in given for e in events if isinstance(e, str)) == "ab <t"
    assert merged(parser.finish()) == [" <tool_call>{"]


def test_a_call_is_given_out_with_its_closing_tag() -> None:
    parser = ToolCallParser()
    assert parser.push(ADD[:-1]) == []
    assert parser.push(ADD[-1:]) == [ADDED]


def test_at_its_limit_the_parser_hears_nothing_more() -> None:
    parser = ToolCallParser(limit=1)
    assert parser.push(f"x {ADD} y {ADD}") == ["x", ADDED]
    assert parser.is_full
    assert parser.push("z") == []
    assert parser.finish() == []


def test_long_arguments_that_come_letter_by_letter_are_read_once() -> None:
    """20,000 letters in single pushes: linear work stays far below the bound, rescanning the
    whole call at each push would take 2e8 steps.
    """
    text = hermes('{"name": "w", "arguments": {"t": "' + "x" * 20_000 + '"}}')
    parser, begun = ToolCallParser(), time.process_time()
    events = [event for c in text for event in parser.push(c)]
    assert [type(event) for event in events] == [ToolCall]
    assert time.process_time() - begun < 2.0
