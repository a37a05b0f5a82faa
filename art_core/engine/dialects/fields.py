"""Single fields of requests in other shapes, checked.

In: a request's fields, without those that are null. Out: texts and lists. What matters and can't be
honoured is refused by name.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NoReturn

from art_core.engine.api_errors import ApiError

Refused = Mapping[str, tuple[Callable[[Any], bool], str]]
"""Fields that must not be ignored: (when it matters, what to do instead)."""


def fields_of(body: object, refused: Refused) -> dict[str, Any]:
    """The fields of a body that are not null.

    Raises:
        ApiError: it is no object, or has a field that can't be honoured.
    """
    if not isinstance(body, dict):
        raise ApiError("the body is not a JSON object", got=body)
    fields = {name: value for name, value in body.items() if value is not None}
    for name, (matters, instead) in refused.items():
        if name in fields and matters(fields[name]):
            raise ApiError(f"{name} is not supported", got=fields[name], fix=instead, param=name)
    return fields


def objects(value: object, where: str) -> list[dict[str, Any]]:
    """`value`, if it is a list of objects."""
    if not isinstance(value, list) or not all(isinstance(one, dict) for one in value):
        raise ApiError(
            f"{where} is of a wrong kind", got=value, expected="a list of objects", param=where
        )
    return value


def text(holder: Mapping[str, Any], name: str, where: str) -> str:
    """The text `holder[name]`."""
    value = holder.get(name)
    if not isinstance(value, str):
        raise ApiError(f"{name} is missing or no text", got=value, param=f"{where}.{name}")
    return value


def refuse_kind(kind: object, where: str, *, expected: str) -> NoReturn:
    """Say that a part of a request is of a kind that is not known here."""
    raise ApiError(
        f"a part of type {kind!r} is not supported",
        expected=expected,
        fix="Leave it out, or put what it says into text.",
        param=where,
    )


def renamed(fields: Mapping[str, Any], names: Mapping[str, str]) -> dict[str, Any]:
    """The fields that are there, under the names that a chat completion has for them."""
    return {ours: fields[theirs] for theirs, ours in names.items() if theirs in fields}
