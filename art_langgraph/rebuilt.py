"""A chat model that is copied, stored and loaded by building another one from its arguments.

In: a `ChatArt`, which holds HTTP clients and locks that can't be copied. Out: one like it, by
pickle, deepcopy or LangChain's serialisation. It holds no key, so there is no secret in it.
"""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from typing import Any, Self

from langchain_core.load.serializable import SerializedConstructor, SerializedNotImplemented
from langchain_openai import ChatOpenAI

FOUND_AT_CALL = ("model", "model_name", "api_key", "openai_api_key", "base_url", "openai_api_base")
"""Arguments of a ChatOpenAI that a ChatArt finds at each call."""
NOT_OURS = ("http_client", "http_async_client", "openai_proxy")
"""Arguments by which a ChatOpenAI is led past the transport that records."""
NOT_GIVEN = frozenset(
    (
        *FOUND_AT_CALL,
        *NOT_OURS,
        "client",
        "async_client",
        "root_client",
        "root_async_client",
        "openai_organization",
        "use_responses_api",
    )
)
"""Fields that a ChatArt fills in by itself."""
_SHARED = frozenset(
    ("cache", "callbacks", "custom_get_token_ids", "otherwise", "rate_limiter", "verbose")
)
"""Fields that a deep copy has in common with the model: things that are somewhere, or run."""


class RebuiltChat(ChatOpenAI):
    """How `ChatArt` is copied and serialised."""

    @property
    def lc_secrets(self) -> dict[str, str]:
        """None: it holds no key."""
        return {}

    @property
    def lc_attributes(self) -> dict[str, Any]:
        """None beside its fields."""
        return {}

    @classmethod
    def get_lc_namespace(cls) -> list[str]:
        """Where LangChain finds the class when it loads a serialised one."""
        return cls.__module__.split(".")

    def to_json(self) -> SerializedConstructor | SerializedNotImplemented:
        """As LangChain serialises, with the arguments that build a model like this one."""
        fields = type(self).model_fields
        given = {
            k: v for k, v in self._given().items() if k == "otherwise" or not fields[k].exclude
        }
        return {"lc": 1, "type": "constructor", "id": self.lc_id(), "kwargs": given}

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return _rebuild, (type(self), self._given())

    def __deepcopy__(self, memo: dict[int, Any] | None = None) -> Self:
        given = self._given()
        apart = {k: v if k in _SHARED else deepcopy(v, memo) for k, v in given.items()}
        return type(self)(**apart)

    def _given(self) -> dict[str, Any]:
        """The arguments that build a model like this one."""
        names = self.model_fields_set - NOT_GIVEN
        return {name: getattr(self, name) for name in sorted(names)}


def _rebuild(kind: type[RebuiltChat], given: dict[str, Any]) -> RebuiltChat:
    return kind(**given)
