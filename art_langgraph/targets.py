"""Models as users name them, turned into the targets of a rollout's calls.

In: an `art.Model`, a `Target`, or a served name; one, or one a role. Out: a `Target` a role.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Protocol, TypeAlias, runtime_checkable

from art_core.capture import Target, current_scope
from art_core.errors import ConfigError
from art_langgraph.model_lookup import environment_target


@runtime_checkable
class HasTarget(Protocol):
    """A model that knows where it answers, such as `art.Model` and `art.TrainableModel`."""

    def target(self, step: int | None = None, evaluation: bool = False) -> Target:
        """Where its calls go.

        Args:
            step: pins a step; None means the latest.
            evaluation: keep the caller's sampling settings.
        """
        ...


ModelLike: TypeAlias = HasTarget | Target | str


def targets_of(
    model: ModelLike | None, models: Mapping[str, ModelLike] | None, *, evaluation: bool
) -> dict[str | None, Target] | None:
    """Targets by role; None if neither argument says anything.

    A served name such as "agent-001@3" is asked for where another model of the call, the scope
    around, or ART_BASE_URL says.

    Raises:
        ConfigError: a name with no endpoint to ask, or an object that is no model.
        ModelNotRegistered: a trainable model before `register`.
    """
    named: dict[str | None, ModelLike] = dict((models or {}).items())
    if model is not None:
        named[None] = model
    if not named:
        return None
    found = {
        role: _target(given, evaluation)
        for role, given in named.items()
        if not isinstance(given, str)
    }
    beside = next(iter(found.values()), None)
    for role, given in named.items():
        if isinstance(given, str):
            found[role] = _named_target(given, beside, evaluation)
    return found


def _target(model: HasTarget | Target, evaluation: bool) -> Target:
    if isinstance(model, Target):
        return replace(model, trains=False) if evaluation else model
    if isinstance(model, HasTarget):
        return model.target(evaluation=evaluation)
    raise ConfigError(
        "this is not a model",
        got=model,
        expected='an art.Model, an art.TrainableModel, a Target, or a served name like "agent@3"',
    )


def _named_target(name: str, beside: Target | None, evaluation: bool) -> Target:
    scope = current_scope()
    around = scope.target() if scope is not None else None
    target = beside or around
    if target is not None:
        return _target(replace(target, model_name=name), evaluation)
    asked = environment_target(name)
    if asked is None:
        raise ConfigError(
            "nothing says where this model is served",
            got=name,
            fix="Set ART_BASE_URL (and ART_API_KEY), or give the art.Model itself.",
        )
    return asked
