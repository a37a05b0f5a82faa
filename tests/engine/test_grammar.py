"""Grammars hold an answer to JSON and to calls, in the template's own spelling."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from art_core.engine.api_errors import ApiError
from art_core.engine.base import Grammar, Tokenizer
from art_core.engine.grammar import GrammarMatcher, json_grammar, tool_call_grammar
from art_core.engine.tokenizer import ByteTokenizer, HFTokenizer
from art_core.engine.toolcalls import parse_tool_calls
from art_core.errors import EngineError

TOKENIZER = ByteTokenizer()
EOS = 257
ORDER = {
    "type": "object",
    "properties": {"id": {"type": "string", "enum": ["A", "B"]}, "n": {"type": "integer"}},
    "required": ["id"],
}


def tool(name: str, parameters: dict[str, Any] | None = None) -> dict[str, Any]:
    function = {"name": name} if parameters is None else {"name": name, "parameters": parameters}
    return {"type": "function", "function": function}


def hermes(name: str, arguments: str) -> str:
    return f'<tool_call>\n{{"name": {json.dumps(name)}, "arguments": {arguments}}}\n</tool_call>'


def accepts(grammar: Grammar, text: str, tokenizer: Tokenizer = TOKENIZER) -> bool:
    """True if every token of `text` is allowed in turn, and then the end of the turn."""
    matcher = GrammarMatcher(grammar, tokenizer)
    for token_id in tokenizer.encode(text):
        if not matcher.mask()[token_id]:
            return False
        matcher.advance(token_id)
    return bool(matcher.mask()[min(tokenizer.eos_ids)])


@pytest.mark.parametrize(
    ("text", "is_allowed"),
    [
        ('{"id": "A"}', True),
        ('{"id": "B", "n": -3}', True),
        ('{"id": "C"}', False),
        ('{"n": 3}', False),
        ('{"id":"A"}', False),  # not as `tojson` spells it
        ('{"id": "A"} ', False),
        ('{"id": "A"', False),
        ("", False),
    ],
)
def test_json_by_schema(text: str, is_allowed: bool) -> None:
    assert accepts(json_grammar(ORDER), text) is is_allowed


def test_any_object_for_json_mode() -> None:
    grammar = json_grammar({"type": "object"})
    assert grammar.kind == "json_schema"
    assert accepts(grammar, '{"a": [1, {"b": null}], "é": "\\n"}')
    assert not accepts(grammar, "[1]")


@pytest.mark.parametrize(
    ("several", "text", "is_allowed"),
    [
        (True, hermes("order", '{"id": "A"}'), True),
        (True, hermes("order", '{"id": "A"}') + "\n" + hermes("now", "{}"), True),
        (False, hermes("order", '{"id": "A"}') + "\n" + hermes("now", "{}"), False),
        (False, hermes("now", "{}"), True),
        (True, hermes("now", '{"x": 1}'), False),  # `now` lists no parameters
        (True, hermes("order", '{"id": "A", "x": 1}'), False),
        (True, hermes("open", '{"x": [1]}'), True),  # says itself that it takes others
        (True, hermes("other", "{}"), False),
        (True, "Sure. " + hermes("now", "{}"), False),
        (True, "", False),
        (True, hermes('q"é', "{}"), False),
    ],
)
def test_calls_of_the_tools_and_nothing_else(several: bool, text: str, is_allowed: bool) -> None:
    tools = [
        tool("order", ORDER),
        tool("now"),
        tool("open", {"type": "object", "additionalProperties": True}),
    ]
    assert accepts(tool_call_grammar(tools, several=several), text) is is_allowed


def test_a_tool_may_be_called_as_the_place_of_its_name() -> None:
    grammar = tool_call_grammar([tool("RENAME_FILE")], several=True)
    assert accepts(grammar, hermes("RENAME_FILE", "{}"))


def test_calls_or_an_answer_in_json() -> None:
    grammar = tool_call_grammar([tool("now")], several=True, or_json=ORDER)
    assert grammar.kind == "json_schema"
    assert accepts(grammar, '{"id": "A"}')
    assert accepts(grammar, hermes("now", "{}"))
    assert not accepts(grammar, "hello")


def test_a_forced_call_is_what_the_template_would_write() -> None:
    """Rendered by the template, then read through the grammar."""
    call = {"name": "order", "arguments": {"id": "B", "n": 4}}
    message = {"role": "assistant", "content": "", "tool_calls": [{"id": "c", "function": call}]}
    text = TOKENIZER.render([message, message], add_generation_prompt=False)
    written = text.split("<|im_start|>assistant\n")[1].removesuffix("<|im_end|>\n")
    assert accepts(tool_call_grammar([tool("order", ORDER)], several=False), written)


@pytest.mark.parametrize("seed", range(10))
def test_whatever_is_sampled_under_the_grammar_is_a_call(seed: int) -> None:
    rng = random.Random(seed)
    tools = [tool("order", ORDER), tool('od"d é')]
    matcher = GrammarMatcher(tool_call_grammar(tools, several=False), TOKENIZER)
    sampled: list[int] = []
    while not sampled or sampled[-1] != EOS:
        assert matcher.finished is (np.flatnonzero(matcher.mask()).tolist() == [EOS])
        sampled.append(int(rng.choice(np.flatnonzero(matcher.mask()))))
        matcher.advance(sampled[-1])
    content, calls = parse_tool_calls(TOKENIZER.decode(sampled, skip_special=True))
    assert content == ""
    assert [call.name for call in calls] in (["order"], ['od"d é'])
    if calls[0].name == "order":
        assert json.loads(calls[0].arguments)["id"] in ("A", "B")


def test_mask_is_as_wide_as_the_vocabulary_and_forbids_control_tokens_inside() -> None:
    mask = GrammarMatcher(json_grammar(ORDER), TOKENIZER).mask()
    assert mask.shape == (258,)
    assert mask.dtype == np.bool_
    assert np.flatnonzero(mask).tolist() == [ord("{")]


def test_a_token_that_was_masked_is_an_error() -> None:
    matcher = GrammarMatcher(json_grammar(ORDER), TOKENIZER)
    with pytest.raises(EngineError, match="got 97"):
        matcher.advance(ord("a"))


@pytest.mark.parametrize(
    ("schema", "keyword"),
    [
        ({"not": {"type": "string"}}, "not"),
        ({"type": "array", "uniqueItems": True}, "uniqueItems"),
        ({"type": "string", "format": "tea"}, "tea"),
        ({"type": "string", "pattern": "(?=a)b"}, "look-around"),
        ({"$ref": "https://example.org/s"}, r"example\.org"),
        ({"type": "tree"}, "tree"),
    ],
)
def test_a_schema_that_can_not_be_held_is_refused_by_its_keyword(
    schema: dict[str, Any], keyword: str
) -> None:
    with pytest.raises(ApiError, match=keyword) as fault:
        json_grammar(schema)
    assert fault.value.param == "response_format"
    with pytest.raises(ApiError, match=keyword) as fault:
        tool_call_grammar(
            [tool("t", {"type": "object", "properties": {"a": schema}})], several=True
        )
    assert fault.value.param == "tools"


def test_schemas_of_the_field_are_taken() -> None:
    """Case 057, and the schema pydantic writes for a tagged union."""
    tree = {
        "type": "object",
        "properties": {"kids": {"type": "array", "items": {"$ref": "#/$defs/node"}}},
        "$defs": {
            "node": {
                "type": "object",
                "properties": {"kids": {"type": "array", "items": {"$ref": "#/$defs/node"}}},
            }
        },
    }
    assert accepts(
        tool_call_grammar([tool("tree", tree)], several=False),
        hermes("tree", '{"kids": [{"kids": [{"kids": []}]}]}'),
    )
    union = {
        "oneOf": [
            {"type": "object", "properties": {"k": {"const": "a"}}, "required": ["k"]},
            {"type": "object", "properties": {"k": {"const": "b"}}, "required": ["k"]},
        ],
        "discriminator": {"propertyName": "k"},
    }
    assert accepts(json_grammar(union), '{"k": "b"}')


def test_a_schema_nested_400_deep_is_taken_or_refused() -> None:
    """Case 073: never a fault of the server."""
    schema: dict[str, Any] = {"type": "integer"}
    for _ in range(400):
        schema = {"type": "object", "properties": {"a": schema}}
    with pytest.raises(ApiError):
        json_grammar(schema)


@pytest.mark.model
def test_smollm2_tokens_run_through_a_grammar(smollm2: Path) -> None:
    tokenizer = HFTokenizer(smollm2)
    tools = [tool("order", ORDER)]
    text = hermes("order", '{"id": "A", "n": 12}') + "\n" + hermes("order", '{"id": "B"}')
    assert accepts(tool_call_grammar(tools, several=True), text, tokenizer)
    assert not accepts(tool_call_grammar(tools, several=False), text, tokenizer)
    assert GrammarMatcher(json_grammar(ORDER), tokenizer).mask().shape == (49_152,)
