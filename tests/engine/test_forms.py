"""Forms of calls and thoughts other than Hermes: what is read, what is text, whatever the cuts."""

from __future__ import annotations

import random
from typing import Any

import pytest

from art_core.engine.forms.answer_form import AnswerForm, find_form
from art_core.engine.forms.calls import Event, Thought, ToolCall, written
from art_core.engine.forms.harmony import HarmonyParser
from art_core.engine.forms.table import FORMS, NAMES
from art_core.engine.forms.thoughts import ThoughtForm
from art_core.errors import ConfigError
from art_core.readiness.tool_parser import READ_HERE
from tests.readiness.models import files, template

TOOLS: list[dict[str, Any]] = [
    {
        "function": {
            "name": "look",
            "parameters": {
                "properties": {
                    "q": {"type": "string"},
                    "n": {"type": "integer"},
                    "any": {"anyOf": [{"type": "number"}, {"type": "null"}]},
                    "tags": {"type": "array"},
                    "size": {"$ref": "#/$defs/Size"},
                    "round": {"$ref": "#/$defs/Round"},
                },
                "$defs": {
                    "Size": {"enum": ["7", "8"], "type": "string"},
                    "Round": {"allOf": [{"$ref": "#/$defs/Round"}]},
                },
            },
        }
    },
    {"function": {"name": "now"}},
]
LOOK = ToolCall("look", '{"q": "é"}')
NOW = ToolCall("now", "{}")
THINK = ThoughtForm("<think>", "</think>")

READ: dict[str, tuple[str, str, list[Event]]] = {
    "llama": ("llama3_json", '{"name": "look", "parameters": {"q": "é"}}', [LOOK]),
    "llama, marked": ("llama3_json", '<|python_tag|>{"name": "now", "parameters": {}}', [NOW]),
    "llama, several": (
        "llama3_json",
        '{"name": "look", "parameters": {"q": "é"}}; {"name": "now", "parameters": {}}',
        [LOOK, NOW],
    ),
    "llama, with a type": (
        "llama3_json",
        '{"type": "function", "name": "look", "parameters": {"q": "é"}}',
        [LOOK],
    ),
    "llama, the function is the name": (
        "llama3_json",
        '{"type": "function", "function": "now", "parameters": {}}',
        [NOW],
    ),
    "llama, text before": ("llama3_json", 'So: {"name": "now"}', ["So:", NOW]),
    "llama, JSON that is an answer": (
        "llama3_json",
        '{"name": "Oslo", "people": {"q": 1}}',
        ['{"name": "Oslo", "people": {"q": 1}}'],
    ),
    "llama, braces in text": ("llama3_json", "f() { return {}; }", ["f() { return {}; }"]),
    "llama, cut": ("llama3_json", '{"name": "look", "para', ['{"name": "look", "para']),
    "mistral": ("mistral", '[TOOL_CALLS][{"name": "look", "arguments": {"q": "é"}}]', [LOOK]),
    "mistral, two and a text": (
        "mistral",
        (
            'Hm. [TOOL_CALLS] [{"arguments": {"q": "é"}, "name": "look", "id": "abc123456"}, '
            '{"name": "now"}]'
        ),
        ["Hm.", LOOK, NOW],
    ),
    "mistral, newer": ("mistral", '[TOOL_CALLS]look[ARGS]{"q": "é"}[TOOL_CALLS]now{}', [LOOK, NOW]),
    "mistral, with an id": (
        "mistral",
        '[TOOL_CALLS]look[CALL_ID]abc123456[ARGS]{"q": "é"}',
        [LOOK],
    ),
    "mistral, a broken one between": (
        "mistral",
        '[TOOL_CALLS][{"name": "now"}, {"name": look}, {"name": "look", "arguments": {"q": "é"}}]',
        [NOW, '{"name": look}', LOOK],
    ),
    "mistral, a broken string first": (
        "mistral",
        '[TOOL_CALLS][{"name": "a\nb"}, {"name": "now"}]',
        ['[TOOL_CALLS][{"name": "a\nb"},', NOW],
    ),
    "mistral, cut in the second": (
        "mistral",
        '[TOOL_CALLS][{"name": "now"}, {"name": "lo',
        [NOW, '{"name": "lo'],
    ),
    "mistral, no call": ("mistral", "[TOOL_CALLS] none!", ["[TOOL_CALLS] none!"]),
    "mistral, nothing": ("mistral", "[TOOL_CALLS][]", ["[TOOL_CALLS][]"]),
    "phi": (
        "phi4_mini_json",
        'functools[{"name": "look", "arguments": {"q": "é"}}, {"name": "now"}]',
        [LOOK, NOW],
    ),
    "phi, its tokens": (
        "phi4_mini_json",
        '<|tool_call|>[{"name": "now", "arguments": {}}]<|/tool_call|>',
        [NOW],
    ),
    "phi, one a mark": (
        "phi4_mini_json",
        '<|tool_call|>{"name": "now"}<|/tool_call|><|tool_call|>{"name": "now"}<|/tool_call|>',
        [NOW, NOW],
    ),
    "phi speaks of functools": ("phi4_mini_json", "Use functools.", ["Use functools."]),
    "granite": ("granite", '<|tool_call|>[{"name": "now", "arguments": {}}]', [NOW]),
    "jamba": ("jamba", '<tool_calls>[\n  {"name": "now"}\n]</tool_calls>', [NOW]),
    "xlam": ("xlam", '[{"name": "now", "arguments": {}}]', [NOW]),
    "xlam, a list that is an answer": ("xlam", '[{"city": "Oslo"}]', ['[{"city": "Oslo"}]']),
    "xml": (
        "qwen3_coder",
        (
            "Hm.\n<tool_call>\n<function=look>\n<parameter=q>\né\n</parameter>\n</function>\n"
            "</tool_call>\n<tool_call>\n<function=now>\n</function>\n</tool_call>"
        ),
        ["Hm.", LOOK, NOW],
    ),
    "xml, values by the schema": (
        "qwen3_coder",
        (
            "<tool_call><function=look><parameter=q>7</parameter><parameter=n>7</parameter>"
            "<parameter=any>None</parameter><parameter=tags>[1]</parameter></function></tool_call>"
        ),
        [ToolCall("look", '{"q": "7", "n": 7, "any": null, "tags": [1]}')],
    ),
    "xml, values by a schema elsewhere": (
        "qwen3_coder",
        (
            "<tool_call><function=look><parameter=size>7</parameter>"
            "<parameter=round>7</parameter></function></tool_call>"
        ),
        [ToolCall("look", '{"size": "7", "round": 7}')],
    ),
    "xml, far apart": (
        "qwen3_coder",
        (
            f"<tool_call><function=look><parameter=q>a</parameter>{' ' * 90}<parameter=n>"
            "1</parameter></function></tool_call>"
        ),
        [ToolCall("look", written({"q": f"a</parameter>{' ' * 90}<parameter=n>1"}))],
    ),
    "xml, closing tags in a value": (
        "qwen3_coder",
        (
            "<tool_call>\n<function=look>\n<parameter=q>\na </parameter> b </tool_call>\n\n"
            "</parameter>\n</function>\n</tool_call>"
        ),
        [ToolCall("look", '{"q": "a </parameter> b </tool_call>\\n"}')],
    ),
    "xml, an argument without its end, then whole": (
        "qwen3_coder",
        (
            "<tool_call>\n<function=look>\n<parameter=q>\na\n</function>\n</tool_call>\n"
            "<tool_call>\n<function=look>\n<parameter=q>\né\n</parameter>\n</function>\n</tool_call>"
        ),
        ["<tool_call>\n<function=look>\n<parameter=q>\na\n</function>\n</tool_call>", LOOK],
    ),
    "xml, an argument run into the next": (
        "qwen3_coder",
        (
            "<tool_call>\n<function=look>\n<parameter=q>\na\n<parameter=n>\n3\n</parameter>\n"
            "</function>\n</tool_call>"
        ),
        [
            (
                "<tool_call>\n<function=look>\n<parameter=q>\na\n<parameter=n>\n3\n</parameter>\n"
                "</function>\n</tool_call>"
            )
        ],
    ),
    "xml, broken, then whole": (
        "qwen3_coder",
        "<tool_call>\n<function=look>\noops <tool_call>\n<function=now>\n</function>\n</tool_call>",
        ["<tool_call>\n<function=look>\noops", NOW],
    ),
    "python": ("pythonic", '[look(q="é"), now()]', [LOOK, NOW]),
    "python, values": (
        "pythonic",
        "[look(q='[(', n=-1, any=true, tags=[{'a': None}])]",
        [ToolCall("look", '{"q": "[(", "n": -1, "any": true, "tags": [{"a": null}]}')],
    ),
    "python, a broken one between": (
        "pythonic",
        "[now(), look(q=open()), now()]",
        [NOW, " look(q=open())", NOW],
    ),
    "python, an apostrophe": (
        "pythonic",
        "[look(q='it's, yes'), now()]",
        ["look(q='it's, yes')", NOW],
    ),
    "python, unpacked arguments": ("pythonic", '[look(**{"q": "é"})]', ['[look(**{"q": "é"})]']),
    "python, an argument twice": ("pythonic", '[look(q="a", q="é")]', ['[look(q="a", q="é")]']),
    "python, no number of JSON": ("pythonic", "[look(n=1e999)]", ["[look(n=1e999)]"]),
    "python, cut in the second": ("pythonic", '[now(), look(q="B', [NOW, 'look(q="B']),
    "python, a list in text": ("pythonic", "a[0] = [f(1)]", ["a[0] = [f(1)]"]),
    "llama 4": ("llama4_pythonic", "<|python_start|>[now()]<|python_end|>", [NOW]),
    "lfm2": ("lfm2", '<|tool_call_start|>[look(q="é")]<|tool_call_end|>', [LOOK]),
}


def read(form: AnswerForm, text: str, longest: int = 10_000, prompt: str = "") -> list[Event]:
    parser, events, at = form.parser(TOOLS, limit=None, prompt=prompt), list[Event](), 0
    rng = random.Random(len(text))
    while at < len(text):
        size = rng.randint(1, longest)
        events += parser.push(text[at : at + size])
        at += size
    return merged([*events, *parser.finish()])


def merged(events: list[Event]) -> list[Event]:
    """Pieces of text, and of thoughts, in one."""
    out: list[Event] = []
    for event in events:
        last = out[-1] if out else None
        if isinstance(event, str) and isinstance(last, str):
            out[-1] = last + event
        elif isinstance(event, Thought) and isinstance(last, Thought):
            out[-1] = Thought(last.text + event.text)
        elif event:
            out.append(event)
    return out


@pytest.mark.parametrize("longest", [1, 2, 7, 10_000])
@pytest.mark.parametrize("case", READ)
def test_calls_are_read_and_all_else_is_text(case: str, longest: int) -> None:
    name, text, expected = READ[case]
    found = read(AnswerForm(calls=FORMS[name]), text, longest)
    assert [e.strip() if isinstance(e, str) else e for e in found] == [
        e.strip() if isinstance(e, str) else e for e in expected
    ]


@pytest.mark.parametrize("name", sorted({name for name, _, _ in READ.values()}))
def test_the_limit_ends_the_answer(name: str) -> None:
    text = next(
        text for form, text, events in READ.values() if form == name and {LOOK, NOW} & {*events}
    )
    parser = AnswerForm(calls=FORMS[name]).parser(TOOLS, limit=1, prompt="")
    calls = [event for event in parser.push(text + text) if isinstance(event, ToolCall)]
    assert len(calls) == 1
    assert parser.is_full


# Thoughts

HERMES = '<tool_call>{"name": "now"}</tool_call>'
THOUGHTS: dict[str, tuple[str, str, list[Event]]] = {
    "thought, text": ("", "<think>\na b\n</think>\n\nc", [Thought("a b"), "c"]),
    "thought, call": ("", f"<think>a</think>{HERMES}", [Thought("a"), NOW]),
    "opened by the prompt": ("x<think>\n", "a\n</think>\nc", [Thought("a"), "c"]),
    "not ended": ("x<think>\n", f"a {HERMES}", [Thought(f"a {HERMES}")]),
    "a call inside is a thought": ("", f"<think>{HERMES}</think>", [Thought(HERMES)]),
    "empty": ("", "<think>\n\n</think>\n\nc", ["c"]),
    "none": ("", "a </think> b", ["a </think> b"]),
    "later it is text": ("", "a <think>b</think>", ["a <think>b</think>"]),
    "half a mark": ("", " <thi", [" <thi"]),
    "half a closing mark": ("<think>", "a</thi", [Thought("a</thi")]),
}


@pytest.mark.parametrize("longest", [1, 3, 10_000])
@pytest.mark.parametrize("case", THOUGHTS)
def test_thoughts_stand_before_the_answer(case: str, longest: int) -> None:
    prompt, text, expected = THOUGHTS[case]
    assert read(AnswerForm(thoughts=THINK), text, longest, prompt) == expected


def test_an_optional_text_is_none_as_the_template_writes_it() -> None:
    """Qwen3.5's template writes null as Python does."""
    kind = {"anyOf": [{"type": "string"}, {"type": "null"}]}
    tools = [{"function": {"name": "look", "parameters": {"properties": {"q": kind}}}}]
    text = (
        "<tool_call>\n<function=look>\n<parameter=q>\nNone\n</parameter>\n</function>\n</tool_call>"
    )
    parser = AnswerForm(calls=FORMS["qwen3_coder"]).parser(tools, limit=None, prompt="")
    found = merged([*parser.push(text), *parser.finish()])
    assert found == [ToolCall("look", '{"q": null}')]


# Channels

ANALYSIS = "<|channel|>analysis<|message|>hm<|end|><|start|>assistant"
CALL = '<|channel|>commentary to=functions.look <|constrain|>json<|message|>{"q": "é"}<|call|>'
CHANNELS: dict[str, tuple[str, list[Event]]] = {
    "final": (f"{ANALYSIS}<|channel|>final<|message|>yes<|return|>", [Thought("hm"), "yes"]),
    "call": (ANALYSIS + CALL, [Thought("hm"), LOOK]),
    "the address first": (
        ' to=functions.look<|channel|>commentary json<|message|>{"q": "é"}<|call|>',
        [LOOK],
    ),
    "words, then a call": (
        f"<|channel|>commentary<|message|>I look.<|end|><|start|>assistant{CALL}",
        ["I look.", LOOK],
    ),
    "two texts": (
        "<|channel|>commentary<|message|>a<|end|><|start|>assistant<|channel|>final<|message|>b",
        ["a\nb"],
    ),
    "broken arguments": (
        CALL.replace('"é"', "é"),
        ['commentary to=functions.look json {"q": é}'],
    ),
    "cut in a thought": ("<|channel|>analysis<|message|>h", [Thought("h")]),
    "cut in a head": ("<|channel|>ana", []),
    "no mark before the body": ("<|channel|>final It is 3.<|return|>", ["It is 3."]),
    "no mark before a thought": ("<|channel|>analysis hm", [Thought("hm")]),
    "no channel": ("plain", ["plain"]),
    "no channel, but an end": ("plain<|return|>", ["plain"]),
    "words before the first channel": (
        "a<|start|>assistant<|channel|>final<|message|>b<|return|>",
        ["a\nb"],
    ),
}


@pytest.mark.parametrize("longest", [1, 5, 10_000])
@pytest.mark.parametrize("case", CHANNELS)
def test_channels_are_told_apart(case: str, longest: int) -> None:
    text, expected = CHANNELS[case]
    assert read(AnswerForm(is_harmony=True), text, longest) == expected


def test_without_tools_a_call_in_a_channel_is_text() -> None:
    parser = HarmonyParser(0)
    assert merged([*parser.push(CALL), *parser.finish()]) == ['{"q": "é"}']


# Which form a model has


def test_a_setting_wins_over_what_is_seen() -> None:
    own = template("gemma3_pythonic")
    assert find_form(own).calls == FORMS["pythonic"]
    assert find_form(own, tool_parser_name="hermes").calls == FORMS["hermes"]
    assert not find_form(own, tool_parser_name="none").reads_calls
    thinks = find_form(own, reasoning_parser_name="deepseek_r1")
    assert thinks.thoughts == THINK
    with pytest.raises(ConfigError, match=r"tool_parser .*got 'hermies', expected \"auto\""):
        find_form(own, tool_parser_name="hermies")
    with pytest.raises(ConfigError, match="reasoning_parser"):
        find_form(own, reasoning_parser_name="no")


def test_a_form_that_nobody_reads_is_said_with_what_to_set() -> None:
    found = find_form(template("glm4moe"))
    assert not found.reads_calls
    assert "the form 'glm45'" in found.why_no_calls
    assert "set EngineConfig(tool_parser=...)" in found.doubts[0]
    unsure = find_form(template("lfm2_2_5"))
    assert unsure.reads_calls
    assert "EngineConfig(reasoning_parser=...)" in unsure.doubts[0]
    phi = files("phi-3.5-mini")
    assert "shows no tools" in find_form(phi.template or "").doubts[0]


def test_the_doctor_knows_what_is_read_here() -> None:
    assert frozenset(NAMES) == READ_HERE
