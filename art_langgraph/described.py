"""A chat model described by the server behind it: its profile, token ids, counts, name in traces.

In: what `served` says at the moment somebody asks. Out: LangChain's own methods and attributes;
estimates where no server says. It leaves out calls (`chat_model`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Self, cast

from langchain_core.language_models import BaseChatModel, LangSmithParams, ModelProfile
from langchain_core.messages import BaseMessage
from langchain_core.messages.utils import count_tokens_approximately
from langchain_core.runnables.config import ensure_config
from langchain_core.utils.function_calling import convert_to_openai_tool
from langchain_openai import ChatOpenAI
from langchain_openai.chat_models.base import BaseChatOpenAI
from pydantic import Field, model_validator

from art_core.errors import ConfigError
from art_langgraph.answers import give_back_reasoning
from art_langgraph.model_lookup import NAME, Here, find_here
from art_langgraph.served import count_tokens, profile_of, token_ids_of


class DescribedChat(ChatOpenAI):
    """What `ChatArt` knows of the model behind it; see there."""

    role: str | None = None
    otherwise: BaseChatModel | None = Field(default=None, exclude=True)

    @model_validator(mode="after")
    def _profile_at_use(self) -> Self:
        """Leave `profile` out, unless it was given: then `__getattr__` is asked for it."""
        if self.__dict__.get("profile") is None:
            self.__dict__.pop("profile", None)
            self.__pydantic_fields_set__.discard("profile")
        return self

    if not TYPE_CHECKING:  # a type checker would take it to know every name

        def __getattr__(self, name: str) -> Any:
            return self._served_profile() if name == "profile" else super().__getattr__(name)

    def _served_profile(self) -> ModelProfile | None:
        here = self._here()
        if here is not None:
            return profile_of(here.target)
        # Only OpenAI's own classes take the response_format that a profile may promise.
        other = self.otherwise
        return other.profile if isinstance(other, BaseChatOpenAI) else None

    def get_token_ids(self, text: str) -> list[int]:
        """The ids of `text` by `custom_get_token_ids`, else by the served model's tokenizer.

        Raises:
            ConfigError: there is neither. (ChatOpenAI would fetch OpenAI's from the network.)
        """
        if self.custom_get_token_ids is not None:
            return self.custom_get_token_ids(text)
        here = self._here()
        ids = None if here is None else token_ids_of(here.target, text)
        if ids is None:
            raise ConfigError(
                "ChatArt does not know the served model's token ids here",
                expected="a server that answers POST /tokenize, as ours and vLLM do",
                fix="Ask inside a rollout or with ART_BASE_URL and ART_MODEL set; or count with "
                "get_num_tokens, or give it custom_get_token_ids.",
            )
        return ids

    def get_num_tokens(self, text: str) -> int:
        """How many tokens `text` has: counted where `get_token_ids` can, else estimated."""
        here = self._here()
        if self.custom_get_token_ids is not None:
            return len(self.custom_get_token_ids(text))
        ids = None if here is None else token_ids_of(here.target, text)
        if ids is not None:
            return len(ids)
        return count_tokens_approximately([text], extra_tokens_per_message=0.0)

    def get_num_tokens_from_messages(
        self, messages: Sequence[BaseMessage], tools: Sequence[Any] | None = None, **_: Any
    ) -> int:
        """How many prompt tokens a call with these messages and tools has.

        Estimated where no server is found or it does not count, as for messages that the model's
        chat template refuses.
        """
        schemas: list[Any] = [convert_to_openai_tool(tool) for tool in tools or ()]
        here = self._here()
        if here is not None and messages:
            sent = self._get_request_payload(list(messages))["messages"]
            sent = give_back_reasoning(sent, messages)
            counted = count_tokens(here.target, sent, schemas, here.scope)
            if counted is not None:
                return counted
        return count_tokens_approximately(messages, tools=schemas or None)

    def _here(self) -> Here | None:
        """Whom a call made here would ask; None where it would find nobody."""
        try:
            return find_here(self.role, ensure_config()["metadata"])
        except ConfigError:  # a call raises it; what only describes the model need not
            return None

    def _get_ls_params(self, stop: list[str] | None = None, **kwargs: Any) -> LangSmithParams:
        params = {**super()._get_ls_params(stop=stop, **kwargs), "ls_provider": "art"}
        if params["ls_model_name"] == NAME and (here := self._here()) is not None:
            params["ls_model_name"] = here.target.model_name
        return cast(LangSmithParams, params)
