"""Where one call goes, and what is sent there.

In: a chat-completions body as its caller wrote it, and a `Route`. Out: the body as it is sent: the
served model name, the sampling of training, and the fields that recording asks for. Pure.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from art_core.calls import Origin
from art_core.capture import Scope, Target, current_scope
from art_core.config import SamplingConfig

_DROPPED = ("presence_penalty", "frequency_penalty", "repetition_penalty", "logit_bias", "seed")
"""Settings that a policy in training is not sampled with. A fixed seed makes a group identical."""
_OFF: Mapping[str, Any] = {
    "top_k": 0,
    "min_p": 0,
    "presence_penalty": 0,
    "frequency_penalty": 0,
    "repetition_penalty": 1,
    "logit_bias": {},
}
"""The value by which a caller turns a setting off."""


@dataclass(frozen=True)
class Route:
    """Where one call goes, and what it belongs to."""

    target: Target
    scope: Scope | None = None
    """None: sent as it was asked for, and not recorded."""
    origin: Origin = field(default_factory=Origin)
    names: frozenset[str] | None = None
    """Model names in a request that mean the target's own; None: every name does."""


def route_to(target: Target, *names: str) -> Callable[[], Route]:
    """The route of a client that serves one model: to `target`, in the scope around the call.

    What the caller asks for wins over the target's sampling settings, which fill in the rest.

    Args:
        target: where every call goes.
        names: the names under which callers ask for it; another one, such as a pinned step, is
            sent as it is.
    """
    plain = replace(target, trains=False)
    known = frozenset((target.model_name, *names))
    return lambda: Route(plain, current_scope(), names=known)


def prepare_body(body: Mapping[str, Any], route: Route) -> dict[str, Any]:
    """The chat-completions body as it is sent along `route`."""
    sent, target = dict(body), route.target
    if route.names is None or body.get("model") in route.names:
        sent["model"] = target.model_name
    if target.sampling is not None:
        sent = _sampled(sent, target.sampling, override=target.trains)
    if route.scope is not None and target.token_data:
        sent |= {"return_token_ids": True, "logprobs": True}
        sent["top_logprobs"] = sent.get("top_logprobs") or 0  # some servers want a number
    return sent


def overridden(body: Mapping[str, Any], target: Target) -> dict[str, Any]:
    """The settings in `body` that `prepare_body` replaces or drops, as they were asked for."""
    if target.sampling is None or not target.trains:
        return {}
    ours = {**_settings(target.sampling), **dict.fromkeys(_DROPPED)}
    asked = {name: body[name] for name in ours if body.get(name) is not None}
    return {
        name: value
        for name, value in asked.items()
        if value != (_OFF.get(name) if ours[name] is None else ours[name])
    }


def _sampled(sent: dict[str, Any], sampling: SamplingConfig, *, override: bool) -> dict[str, Any]:
    """`sent` with the settings of training: over the caller's, or where the caller has none."""
    for name, value in _settings(sampling).items():
        if override or sent.get(name) is None:
            sent[name] = value
    if override:
        sent.update(dict.fromkeys(_DROPPED))
    if not (sent.get("max_completion_tokens") or sent.get("max_tokens")):
        sent["max_completion_tokens"] = sampling.max_tokens
    return {name: value for name, value in sent.items() if value is not None}


def _settings(sampling: SamplingConfig) -> dict[str, Any]:
    """Request fields of a training setting; None for what is off, which is left out."""
    return {
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k or None,
        "min_p": sampling.min_p or None,
    }
