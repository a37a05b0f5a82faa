"""A train result as JSON and back. Numbers that are not finite are spelled out.

In: a `TrainResult`. Out: an object for `Job.result`. The checkpoint's path is left out: it is a
path of the server's.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from pydantic import TypeAdapter, ValidationError

from art_core.backend import Skipped, TrainResult
from art_core.errors import PayloadError
from art_core.metrics import SPELLED, plain_value, spell

_SKIPPED: TypeAdapter[tuple[Skipped, ...]] = TypeAdapter(tuple[Skipped, ...])


def result_to_json(result: TrainResult) -> dict[str, Any]:
    """`result`, JSON-ready."""
    return {
        "step": result.step,
        "trained": result.trained,
        "metrics": {name: spell(value) or value for name, value in result.metrics.items()},
        "skipped": [asdict(skipped) for skipped in result.skipped],
        "reason": result.reason,
    }


def result_from_json(told: Mapping[str, Any]) -> TrainResult:
    """The result that `told` tells of.

    Raises:
        PayloadError: it is nothing that `result_to_json` makes.
    """
    try:
        return TrainResult(
            step=int(told["step"]),
            trained=bool(told["trained"]),
            metrics={str(n): read_number(value) for n, value in told["metrics"].items()},
            skipped=_SKIPPED.validate_python(told["skipped"]),
            reason=None if told.get("reason") is None else str(told["reason"]),
        )
    except (KeyError, TypeError, ValueError, AttributeError, ValidationError) as error:
        raise PayloadError(f"a train result can't be read ({error!r})", got=told) from None


def told_figures(metrics: Mapping[str, Any] | None) -> dict[str, Any] | None:
    """Metrics of a user as JSON takes them: NumPy's and torch's numbers as Python's, NaN spelled.

    Raises:
        ConfigError: a value is none that metrics may have.
    """
    if metrics is None:
        return None
    plain = {name: plain_value(name, value) for name, value in metrics.items()}
    return {name: spell(value) or value for name, value in plain.items()}


def read_figures(metrics: Mapping[str, Any] | None) -> dict[str, Any] | None:
    """What `told_figures` told."""
    if metrics is None:
        return None
    return {name: SPELLED.get(v, v) if isinstance(v, str) else v for name, v in metrics.items()}


def read_number(value: object) -> float:
    """A number that may be spelled out.

    Raises:
        ValueError: it is none.
    """
    if isinstance(value, str) and value in SPELLED:
        return SPELLED[value]
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ValueError(f"{value!r} is no number")
    return value
