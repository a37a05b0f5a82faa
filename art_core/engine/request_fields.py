"""Single fields of a request's body, checked one by one.

In: the body's fields, without those that are null. Out: values, with the default where there is
none. Left out: which fields there are and what they mean together (chat_request.py).

Raises, all of them:
    ApiError: the field is missing, of a wrong kind or out of range; it names the field.
"""

from __future__ import annotations

import math
from typing import Any

from art_core.engine.api_errors import ApiError

_MAX_STOPS = 16


def first(value: Any, default: Any) -> Any:
    """`value`, unless it is None; 0 is a value."""
    return default if value is None else value


def required(fields: dict[str, Any], name: str, kind: type) -> Any:
    """A text or a list that is there and not empty."""
    value = fields.get(name)
    if not isinstance(value, kind) or not value:
        raise ApiError(
            f"{name} is missing or of a wrong kind",
            got=value,
            expected="a name" if kind is str else "at least one message",
            param=name,
        )
    return value


def of_type(fields: dict[str, Any], name: str, kind: type, default: Any) -> Any:
    """A value of a Python type, or `default`."""
    value = fields.get(name, default)
    if not isinstance(value, kind):
        raise ApiError(
            f"{name} is of a wrong kind", got=value, expected=f"a {kind.__name__}", param=name
        )
    return value


def number(
    fields: dict[str, Any],
    name: str,
    low: float,
    high: float,
    *,
    above_low: bool = False,
    below_high: bool = False,
) -> float | None:
    """A number between bounds, which count unless it must be above or below them."""
    value = fields.get(name)
    if value is None:
        return None
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if (
        not is_number
        or not math.isfinite(value)
        or not low <= value <= high
        or (above_low and value == low)
        or (below_high and value == high)
    ):
        left, right = "<" if above_low else "<=", "<" if below_high else "<="
        bounds = f"{low:g} {left} {name} {right} {high:g}"
        raise ApiError(f"{name} is out of range", got=value, expected=bounds, param=name)
    return float(value)


def integer(fields: dict[str, Any], name: str, low: int, high: int | None = None) -> int | None:
    """A whole number between bounds that count."""
    value = fields.get(name)
    if value is None:
        return None
    if (
        not isinstance(value, int)
        or isinstance(value, bool)
        or value < low
        or (high is not None and value > high)
    ):
        bounds = f"an integer >= {low}" + (f" and <= {high}" if high is not None else "")
        raise ApiError(f"{name} is out of range", got=value, expected=bounds, param=name)
    return value


def top_k(fields: dict[str, Any]) -> int | None:
    """-1 means off in other servers."""
    value = integer(fields, "top_k", -1)
    return 0 if value == -1 else value


def logit_bias(fields: dict[str, Any]) -> tuple[tuple[int, float], ...]:
    """Ids are keys of JSON, hence texts."""
    value = of_type(fields, "logit_bias", dict, {})
    for token, bias in value.items():
        is_number = isinstance(bias, int | float) and not isinstance(bias, bool)
        if not str(token).isdecimal() or not is_number or not -100 <= bias <= 100:
            raise ApiError(
                "logit_bias is of a wrong kind",
                got={token: bias},
                expected='token ids and numbers from -100 to 100, as {"123": -5}',
                param="logit_bias",
            )
    return tuple((int(token), float(bias)) for token, bias in value.items())


def stop(fields: dict[str, Any]) -> tuple[str, ...]:
    value = fields.get("stop", [])
    stops = [value] if isinstance(value, str) else value
    if (
        not isinstance(stops, list)
        or len(stops) > _MAX_STOPS
        or not all(isinstance(stop, str) and stop for stop in stops)
    ):
        raise ApiError(
            "stop is of a wrong kind",
            got=value,
            expected=f"a string or at most {_MAX_STOPS} of them, none empty",
            param="stop",
        )
    return tuple(stops)
