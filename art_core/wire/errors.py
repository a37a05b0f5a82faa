"""Typed errors as JSON, and back as the same class with the same message and fields.

In: an exception. Out: `{"class", "bases", "message", "what", "got", "expected", "fix", "fields"}`,
which stands under "art" in an error body of OpenAI's shape, in a failed job and in a payload. A
class that the reader does not know becomes the nearest base that it does know; what is no
`ARTError` becomes a `ForeignError`. Left out: trajectories that an error holds (a rollout's failure
has them in the payload's next frames), causes and traces, which tell of the other machine.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from pydantic import BaseModel, ConfigDict, ValidationError

from art_core import errors
from art_core.errors import ARTError, ForeignError, GatherError, PayloadError, RolloutFailure
from art_core.trajectories import Trajectory

MAX_TEXT = 20_000
"""Characters of a text that are told; of a longer one its two ends are."""

_FIELDS: tuple[tuple[type[ARTError], str, tuple[type, ...], object], ...] = (
    (errors.NonFiniteStep, "tensor", (str,), ""),
    (errors.EngineStartFailed, "tail", (str,), ""),
    (errors.EngineDied, "tail", (str,), ""),
    (errors.TrainerDied, "tail", (str,), ""),
    (errors.UnknownRecords, "ids", (list,), ()),
    (errors.ServerError, "status", (int,), None),
    (errors.ServerBusy, "retry_after", (int, float), None),
    (errors.ForeignError, "kind", (str,), "Exception"),
)
"""What errors hold beside their texts: of which class, its name, types, its value if untold."""
_TEXTS = ("what", "got", "expected", "fix")


class _Told(BaseModel):
    """An error on the wire; only "class" must be there."""

    model_config = ConfigDict(extra="ignore", frozen=True)

    bases: tuple[str, ...] = ()
    message: str = ""
    what: str = ""
    got: str = ""
    expected: str = ""
    fix: str = ""
    fields: dict[str, Any] = {}


def error_to_json(
    error: BaseException, *, shown: Callable[[str], str] = lambda text: text
) -> dict[str, Any]:
    """`error`, JSON-ready.

    Args:
        shown: what may be told of a text; a server takes its paths and secrets out here.
    """

    def tell(text: object) -> str:
        return _cut(shown(str(text)))

    if not isinstance(error, ARTError):
        return {"class": type(error).__name__, "bases": [], "message": tell(error)}
    lineage = [c.__name__ for c in type(error).__mro__ if issubclass(c, ARTError)]
    fields = {
        name: _plain(getattr(error, name), tell)
        for owner, name, _, _ in _FIELDS
        if isinstance(error, owner)
    }
    return {
        "class": lineage[0],
        "bases": lineage[1:],
        "message": tell(error),
        **{name: tell(getattr(error, name, "")) for name in _TEXTS},
        "fields": fields,
    }


def error_from_json(told: Any, *, trajectory: Trajectory | None = None) -> ARTError:
    """The error that `told` tells of.

    Args:
        trajectory: of a `RolloutFailure`; None makes an empty one.

    Raises:
        PayloadError: `told` is nothing that `error_to_json` makes.
    """
    name = told.get("class") if isinstance(told, Mapping) else None
    if not isinstance(name, str):
        raise PayloadError("an error on the wire", got=_short(told), expected='one with a "class"')
    try:
        known = _Told.model_validate(told)
    except ValidationError as fault:
        raise PayloadError(f"an error on the wire is broken ({fault.errors()[0]['msg']})") from None
    kind = next((c for n in (name, *known.bases) if (c := _class(n)) is not None), None)
    if kind is None:
        return ForeignError(known.message, kind=name)
    error = kind.__new__(kind)  # constructors differ; what they make is put in below
    error.args = (known.message,)
    for text in _TEXTS:
        setattr(error, text, getattr(known, text))
    for owner, field, types, otherwise in _FIELDS:
        if issubclass(kind, owner):
            value = known.fields.get(field)
            value = value if isinstance(value, types) else otherwise
            setattr(error, field, tuple(map(str, value)) if isinstance(value, list) else value)
    if isinstance(error, RolloutFailure):
        error.trajectory = trajectory or Trajectory(ended="error", start_time=0.0)
    if isinstance(error, GatherError):
        error.gathered = []
    return error


def _class(name: str) -> type[ARTError] | None:
    """The class of that name in `art_core.errors`."""
    found = getattr(errors, name, None)
    is_error = isinstance(found, type) and issubclass(found, ARTError)
    return found if is_error and not name.startswith("_") else None


def _plain(value: object, tell: Callable[[str], str]) -> Any:
    if isinstance(value, str):
        return tell(value)
    if isinstance(value, list | tuple):
        return [tell(part) for part in value]
    return value


def _cut(text: str) -> str:
    if len(text) <= MAX_TEXT:
        return text
    half = MAX_TEXT // 2
    return f"{text[:half]} [...] {text[-half:]}"


def _short(value: object) -> str:
    return repr(value)[:200]
