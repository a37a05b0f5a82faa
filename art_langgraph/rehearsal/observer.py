"""What LangChain's callbacks tell of who asked which chat model, and in what way.

In: callback events of a run. Out: an `Asked` for each call of any chat model, ours or not, with the
settings as the node asked for them: the wire shows only what training made of them.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any
from uuid import UUID

from langchain_core.callbacks import BaseCallbackHandler

from art_langgraph.callbacks import address_of

_SETTINGS = (
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "n",
    "seed",
    "presence_penalty",
    "frequency_penalty",
    "logit_bias",
)


@dataclass(frozen=True)
class Asked:
    """One call of a chat model, as it was asked for."""

    node: str | None
    kind: str
    """Class of the chat model."""
    ours: bool
    """True for a ChatArt."""
    role: str | None
    model: str | None
    """The model's name; of no meaning for a ChatArt."""
    base_url: str | None
    """None: the provider's own address."""
    settings: Mapping[str, Any]
    """Sampling settings that were asked for."""
    cached: bool
    """True if the model has a response cache of its own."""


class Observer(BaseCallbackHandler):
    """Attach it to a run's config."""

    run_inline = True

    def __init__(self) -> None:
        self.asked: list[Asked] = []
        self._lock = threading.Lock()

    def on_chat_model_start(
        self,
        serialized: dict[str, Any] | None,
        messages: Any,
        *,
        run_id: UUID,
        metadata: dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        """A chat model is asked."""
        self._note(serialized, metadata or {}, kwargs.get("invocation_params") or {})

    def on_llm_start(
        self,
        serialized: dict[str, Any] | None,
        prompts: list[str],
        *,
        run_id: UUID,
        metadata: dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        """A model that takes plain text is asked."""
        self._note(serialized, metadata or {}, kwargs.get("invocation_params") or {})

    def _note(
        self,
        serialized: Mapping[str, Any] | None,
        metadata: Mapping[str, Any],
        params: Mapping[str, Any],
    ) -> None:
        told = serialized or {}
        given: Mapping[str, Any] = told.get("kwargs") or {}
        kind = str((told.get("id") or [params.get("_type") or "a chat model"])[-1])
        asked = Asked(
            node=metadata.get("langgraph_node"),
            kind=kind,
            ours=metadata.get("ls_provider") == "art",
            role=given.get("role"),
            model=params.get("model") or params.get("model_name") or metadata.get("ls_model_name"),
            base_url=address_of(serialized),
            settings={n: params[n] for n in _SETTINGS if params.get(n) is not None},
            cached=bool(given.get("cache")),
        )
        with self._lock:
            self.asked.append(asked)
