"""What a graph asks of a recorded policy, checked before it is sent.

In: the payload of a call, and its route. Out: an error where it can't be trained on, one warning
where training samples, or recording asks, in its own way. It changes nothing: `art_core.route`
does, at the wire.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any

from art_core.errors import ConfigError
from art_core.route import Route, overridden
from art_langgraph.model_lookup import NAME


class SamplingOverridden(UserWarning):
    """A setting of the graph gave way to the one that training samples with."""


def check_training_payload(payload: Mapping[str, Any], route: Route) -> None:
    """Refuse or warn of what training does otherwise.

    Raises:
        ConfigError: several answers are asked for at once, or a model of another name.
    """
    if payload["model"] not in (NAME, route.target.model_name):
        raise ConfigError(
            "a call in training names a model of its own",
            got=payload["model"],
            expected=f"none: the rollout plays {route.target.model_name!r}",
            fix="Leave model= out of the call. A second model is ChatArt(role=...) with "
            "rollout(..., models={role: model}).",
        )
    asked = _asked(payload)
    if (asked.get("n") or 1) > 1:
        raise ConfigError(
            "a policy in training answers once a call",
            got=f"n={asked['n']}",
            expected="n=1",
            fix="Call it several times: each answer is then a call of its own.",
        )
    _warn_once(
        overridden(asked, route.target),
        f"training samples with the model's SamplingConfig ({route.target.sampling!r}) instead, so "
        "that a group's rollouts differ. Evaluation and production keep the setting.",
        route,
    )


def check_recorded_payload(payload: Mapping[str, Any], route: Route) -> None:
    """Warn where a graph wants no logprobs: a call that is recorded asks for them."""
    if (
        route.scope is not None
        and route.target.token_data
        and _asked(payload).get("logprobs") is False
    ):
        _warn_once(
            {"logprobs": False},
            "a call that is recorded asks the server for them all the same, since nothing could be "
            "trained without; the answer that the graph is given has none.",
            route,
        )


def _asked(payload: Mapping[str, Any]) -> dict[str, Any]:
    return {**payload, **(payload.get("extra_body") or {})}


def _warn_once(settings: Mapping[str, Any], instead: str, route: Route) -> None:
    """Say once in a process and node that such settings are not used, whatever their values."""
    mine, key = object(), (str(route.origin), *sorted(settings))
    if not settings or _WARNED.setdefault(key, mine) is not mine:
        return
    asked = ", ".join(f"{name}={value!r}" for name, value in settings.items())
    warnings.warn(f"{route.origin} asks for {asked}; {instead}", SamplingOverridden, stacklevel=4)


_WARNED: dict[tuple[str, ...], object] = {}
