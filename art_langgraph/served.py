"""What the server behind a call says of its model: what it can do, and how it tokenises.

In: a `Target`. Out: LangChain's `ModelProfile`, token ids, counts of tokens; None where no server
answers or it does not say. It speaks what vLLM speaks, `GET /v1/models` and `POST /tokenize`, so
that plain vLLM will do. One blocking request a question, a profile is asked for once; nothing is
asked before someone wants to know. It leaves out estimates (`ChatArt` has them).
"""

from __future__ import annotations

import functools
import json
import threading
import time
from collections.abc import Mapping, Sequence
from typing import Any, cast, get_type_hints

import httpx2 as httpx  # the one that openai >= 3 is built on
from langchain_core.language_models import ModelProfile

from art_core.capture import Scope, Target
from art_core.connections import Connections
from art_core.transport import ROLLOUT_HEADER

_TIMEOUT = {"connect": 2.0, "read": 10.0, "write": 10.0, "pool": 10.0}
"""Seconds. An agent waits for the answer, and can do with an estimate."""
_SILENCE = 30.0
"""Seconds for which a question is not asked again after nobody knew it."""
_VLLM = {"structured_output": True}
"""What every vLLM can do and its list does not say: so a graph that chooses by the profile how to
ask for an answer of a schema asks there as it asked where it was trained."""
_REFUSED = frozenset({400, 422})
"""The server knows the question, and can't answer it for these messages."""


def profile_of(target: Target) -> ModelProfile | None:
    """What the model can do; None if the server does not say how long its context is.

    `max_input_tokens` is the whole context. What is not known of a model (vLLM says nothing of
    tools) is left out: a graph then takes the way that needs it not.
    """
    if not target.token_data:  # a hosted provider, whose list says nothing of the kind
        return None
    try:
        told = _profile(target.base_url, target.api_key, target.model_name)
    except _NotSaid:
        _SILENT.note((_models(target.base_url), target.model_name))
        return None
    return cast(ModelProfile, dict(told))


def token_ids_of(target: Target, text: str) -> list[int] | None:
    """The ids of `text` alone, nothing put in front."""
    asked = {"model": target.model_name, "prompt": text, "add_special_tokens": False}
    found = _ask(target, "POST", _root(target.base_url) + "/tokenize", asked)
    return _ids(found)


def count_tokens(
    target: Target,
    messages: Sequence[Mapping[str, Any]],
    tools: Sequence[Mapping[str, Any]],
    scope: Scope | None,
) -> int | None:
    """How many tokens a call with these messages and tools has as its prompt.

    Args:
        target: who would be called.
        messages: in OpenAI's shape.
        tools: in OpenAI's shape.
        scope: the rollout that the call would belong to: its own words count as they were sampled.
    """
    asked = {"model": target.model_name, "messages": messages}
    if tools:
        asked["tools"] = tools
    url = _root(target.base_url) + "/tokenize"
    found = _ids(_ask(target, "POST", url, asked, scope))
    return None if found is None else len(found)


class _NotSaid(Exception):
    """The server does not say; as an exception, because a cache keeps results only."""


@functools.lru_cache(maxsize=256)
def _profile(base_url: str, api_key: str, model_name: str) -> dict[str, Any]:
    target = Target(base_url, api_key, model_name)
    listed = _ask(target, "GET", _models(base_url))
    cards = listed.get("data") if isinstance(listed, Mapping) else None
    known = {c.get("id"): c for c in cards or () if isinstance(c, Mapping)}
    card = known.get(model_name)
    if card is None:
        raise _NotSaid
    parent = known.get(card.get("parent")) or {}  # vLLM gives an adapter no length of its own
    length = card.get("max_model_len") or parent.get("max_model_len")
    if not isinstance(length, int):
        raise _NotSaid
    told = card.get("art_profile", _VLLM if card.get("owned_by") == "vllm" else None)
    profile = _known(told) if isinstance(told, Mapping) else {}
    return {"name": model_name, **profile, "max_input_tokens": length}


def _known(told: Mapping[str, Any]) -> dict[str, Any]:
    """The part of a profile that this LangChain knows; of other keys it would warn."""
    names = get_type_hints(ModelProfile)
    return {name: value for name, value in told.items() if name in names}


def _ids(found: Any) -> list[int] | None:
    ids = found.get("tokens") if isinstance(found, Mapping) else None
    return ids if isinstance(ids, list) else None


def _models(base_url: str) -> str:
    return base_url.rstrip("/") + "/models"


def _root(base_url: str) -> str:
    """vLLM keeps what is not OpenAI's beside /v1, not below it."""
    return base_url.rstrip("/").removesuffix("/v1")


# --- asking


def _ask(
    target: Target,
    method: str,
    url: str,
    body: Mapping[str, Any] | None = None,
    scope: Scope | None = None,
) -> Any:
    """The parsed answer; None if there is none to be had."""
    question = (url, target.model_name)
    if not target.token_data or _SILENT.is_silent(question):
        return None
    headers = {"Authorization": f"Bearer {target.api_key}", "Accept-Encoding": "identity"}
    if scope is not None:
        headers[ROLLOUT_HEADER] = scope.rollout_id
    request = httpx.Request(
        method, url, headers=headers, json=body, extensions={"timeout": _TIMEOUT}
    )
    try:
        response = _CONNECTIONS.for_thread(request.url).handle_request(request)
        try:
            raw = response.read()
        finally:
            response.close()
    except httpx.TransportError:  # nobody there, or not in time: the caller has an estimate
        _SILENT.note(question)
        return None
    if response.status_code != 200:
        if response.status_code not in _REFUSED:
            _SILENT.note(question)
        return None
    try:
        return json.loads(raw)
    except (ValueError, RecursionError):  # something else than a model server listens there
        _SILENT.note(question)
        return None


class _Silent:
    """Questions that nobody could answer a moment ago."""

    def __init__(self) -> None:
        self._until: dict[tuple[str, str], float] = {}
        self._lock = threading.Lock()

    def is_silent(self, question: tuple[str, str]) -> bool:
        return self._until.get(question, 0.0) > time.monotonic()

    def note(self, question: tuple[str, str]) -> None:
        now = time.monotonic()
        with self._lock:
            self._until = {q: until for q, until in self._until.items() if until > now}
            self._until[question] = now + _SILENCE


_SILENT = _Silent()
_CONNECTIONS = Connections()
