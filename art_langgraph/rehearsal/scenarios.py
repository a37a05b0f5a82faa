"""What a rehearsal asks of the graph: scenarios out of a JSONL file, or one made up.

In: a file with one JSON value a line, or the graph's own input schema. Out: `Scenario`s. A line is
the graph's input; or an object with "input" and perhaps "config" and "context", and whatever the
reward wants to know.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NotRequired, get_origin, get_type_hints

from langchain_core.runnables import Runnable
from pydantic import TypeAdapter
from pydantic.errors import PydanticUserError
from pydantic_core import SchemaError

from art_core.errors import ConfigError
from art_langgraph.rehearsal.schema_values import value_of

TASK = "What can you do for order 10437?"
"""What the made-up scenario says: a sentence with a number in it, for tools that want one."""
_KEYS = frozenset({"input", "config", "context"})
_FIX = 'Write one JSON value a line, e.g. {"messages": [{"role": "user", "content": "Hi"}]}.'


@dataclass(frozen=True)
class Scenario:
    """One task for the graph."""

    input: Any
    config: Mapping[str, Any] = field(default_factory=dict)
    context: Any = None
    line: Any = None
    """The line as it was read, for the reward; the input where it was made up."""


def read_scenarios(path: Path) -> list[Scenario]:
    """The scenarios in a file.

    Raises:
        ConfigError: the file can't be read, is empty, or has a line that is no scenario.
    """
    try:
        lines = path.read_text("utf-8-sig").split("\n")  # other line ends may be in a text
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"the scenarios can't be read ({error})", got=str(path)) from error
    found = [
        _scenario(line, f"{path}:{number}")
        for number, line in enumerate(lines, start=1)
        if line.strip()
    ]
    if not found:
        raise ConfigError("there are no scenarios in the file", got=str(path), fix=_FIX)
    return found


def fitted(scenario: Scenario, graph: Runnable[Any, Any]) -> Scenario:
    """The scenario as the graph takes it.

    A line with "input" and other things beside it is a graph's input where the graph knows such
    parts; else the other things are for the reward.

    Raises:
        ConfigError: nothing of the input is anything that the graph takes.
    """
    try:
        names = (_input_schema(graph).get("properties") or {}).keys()
    except Exception:  # noqa: BLE001  # a schema that can't be told is no fault of the scenario
        return scenario
    given = scenario.input
    if not isinstance(given, dict) or not given or not names or names & given.keys():
        return scenario
    inner = given.get("input")
    if isinstance(inner, dict) and names & inner.keys():
        config, context = given.get("config") or {}, given.get("context")
        return Scenario(inner, config, context, line=scenario.line)
    task = next((text for text in given.values() if isinstance(text, str)), TASK)
    made = {"messages": [{"role": "user", "content": task}]} if "messages" in names else {"...": 0}
    raise ConfigError(
        "a scenario has nothing that goes into the graph",
        got=given,
        expected=f"some of {sorted(names)}",
        fix='Say what goes in under "input"; the rest of the line is for the reward: '
        + json.dumps({**given, "input": made}, ensure_ascii=False),
    )


def made_up_scenario(graph: Runnable[Any, Any]) -> Scenario:
    """A scenario that fits the graph's input schema.

    Raises:
        ConfigError: the schema says nothing of what goes in.
    """
    schema = _input_schema(graph)
    properties = schema.get("properties") or {}
    if "messages" in properties:
        needed = [name for name in schema.get("required") or () if name != "messages"]
        given = {name: value_of(properties[name], [TASK], root=schema) for name in needed}
        made: Any = {"messages": [{"role": "user", "content": TASK}], **given}
    elif properties or schema.get("type") in ("string", "array", "integer", "number", "boolean"):
        made = value_of({**schema, "required": list(properties)}, [TASK], root=schema)
    else:
        raise ConfigError(
            "the graph does not say what goes into it",
            got=schema,
            expected="an input with named parts",
            fix=f"Give it scenarios by --scenarios FILE. {_FIX}",
        )
    return Scenario(made, line=made)


def _input_schema(graph: Runnable[Any, Any]) -> dict[str, Any]:
    """The schema of what goes in; part by part where pydantic can't describe the whole.

    (On Python 3.11 it refuses `typing.TypedDict`; on any it refuses types that JSON has not.
    What a runnable without types raises is a TypeError, a remote graph a SchemaError.)
    """
    try:
        return graph.get_input_jsonschema()
    except (PydanticUserError, NameError, TypeError, SchemaError):
        builder = getattr(graph, "builder", None)
        told = getattr(builder, "input_schema", object)
    hints = get_type_hints(told, include_extras=True)
    parts = {name: _part_schema(hint) for name, hint in hints.items()}
    known = {name: part for name, part in parts.items() if part is not None}
    # Of annotations that are text, typing itself does not see what is not required.
    required: frozenset[str] = getattr(told, "__required_keys__", frozenset())
    wanted = [n for n in known if n in required and get_origin(hints[n]) is not NotRequired]
    return {"properties": known, "required": wanted}


def _part_schema(hint: Any) -> dict[str, Any] | None:
    try:
        return TypeAdapter(hint).json_schema()
    except PydanticUserError:
        return None


def _scenario(line: str, where: str) -> Scenario:
    try:
        value = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise ConfigError(
            f"{where} is no JSON ({error})", got=line[:200], expected="one JSON value", fix=_FIX
        ) from error
    if not isinstance(value, dict) or "input" not in value or not value.keys() <= _KEYS:
        return Scenario(value, line=value)
    config = value.get("config") or {}
    if not isinstance(config, dict):
        raise ConfigError(f"config in {where}", got=config, expected="an object")
    return Scenario(value["input"], config, value.get("context"), line=value)
