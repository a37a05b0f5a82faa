"""Values made for JSON schemas."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import BaseModel

from art_langgraph.rehearsal.schema_values import telling_words, value_of

TEXT = "Where is order 10437 of Ann?"


@pytest.mark.parametrize(
    ("schema", "value"),
    [
        ({"type": "string"}, "10437"),
        ({"type": "integer"}, 10437),
        ({"type": "integer", "minimum": 1, "maximum": 5}, 1),
        ({"type": "number", "exclusiveMinimum": 7, "maximum": 9}, 8),
        ({"type": "number", "exclusiveMinimum": 0, "exclusiveMaximum": 1}, 0.5),
        ({"type": "number", "exclusiveMinimum": 0}, 10437),
        ({"type": "integer", "exclusiveMinimum": 0, "exclusiveMaximum": 3}, 1),
        ({"type": "integer", "minimum": 0, "maximum": 100, "multipleOf": 5}, 5),
        ({"type": "boolean"}, True),
        ({"const": "x"}, "x"),
        ({"enum": ["a", "b"]}, "a"),
        ({"type": ["null", "integer"]}, 10437),
        ({"anyOf": [{"type": "null"}, {"type": "boolean"}]}, True),
        ({"type": "array", "items": {"type": "boolean"}, "minItems": 2}, [True, True]),
        ({"type": "string", "format": "date"}, "2026-01-02"),
        ({"type": "string", "format": "duration"}, "PT1H"),
        ({"type": "string", "minLength": 7}, "10437xx"),
        ({"type": "string", "maxLength": 3}, "104"),
        ({"type": "string", "pattern": r"^\d{5}$"}, "10437"),
        ({"type": "string", "pattern": "^[A-Z]"}, "Ann"),
        ({"type": "string", "pattern": r"^ord-\d{3}$"}, "ord-000"),
        ({"type": "string", "pattern": r"^x+$", "minLength": 4}, "xxxx"),
        ({"type": "string", "pattern": "a", "format": "date"}, "a"),
        ({"type": "string", "pattern": "(?!)"}, "10437"),
        ({"type": "string", "pattern": "["}, "10437"),
        ({"type": "object", "properties": {"query": {"type": "string"}}}, {"query": TEXT}),
        ({"type": "object", "properties": {"x": {"default": 1}}}, {}),
        ({"allOf": [{"properties": {"x": {"const": 1}}, "required": ["x"]}]}, {"x": 1}),
    ],
)
def test_a_value_fits_its_schema(schema: dict[str, Any], value: Any) -> None:
    assert value_of(schema, [TEXT]) == value


def test_each_turn_takes_the_next_choice() -> None:
    schema = {"enum": ["billing", "shipping", "FINISH"]}
    chosen = [value_of(schema, [], turn=turn) for turn in range(4)]
    assert chosen == ["billing", "shipping", "FINISH", "billing"]


def test_a_recursive_schema_comes_to_an_end() -> None:
    class Node(BaseModel):
        """A tree."""

        name: str
        child: Node | None = None
        kids: list[Node]

    Node.model_rebuild(_types_namespace={"Node": Node})
    made = value_of(Node.model_json_schema(), [TEXT])
    assert Node.model_validate(made).name == "10437"


def test_telling_words_are_quoted_then_coded_then_names() -> None:
    assert telling_words('Is "blue car" A-17 of Bob there?') == ["blue car", "A-17", "Bob"]
    assert telling_words("so it goes") == ["goes", "so", "it"]
    assert telling_words("") == []
