"""`ChatArt`: the chat model of a graph that is trained. A true `ChatOpenAI`, bound at call time.

In: whatever a graph asks of a ChatOpenAI. Out: the same, from the model that the call's rollout
names (`routing`), over a transport that records (`art_core.transport`). It needs no key and no
model when it is built. It leaves out recording: the wire does that, so no path can bypass it.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from typing import Any, Self, cast

from langchain_core.callbacks import BaseCallbackManager
from langchain_core.globals import get_llm_cache
from langchain_core.language_models import BaseChatModel, LangSmithParams, LanguageModelInput
from langchain_core.messages import AIMessage, AIMessageChunk, BaseMessage, InvalidToolCall
from langchain_core.messages.utils import count_tokens_approximately
from langchain_core.outputs import ChatResult
from langchain_core.runnables import RunnableConfig
from langchain_core.runnables.config import ensure_config
from langchain_core.utils.function_calling import convert_to_openai_tool
from langchain_core.utils.uuid import uuid7
from langchain_openai import ChatOpenAI
from pydantic import Field, PrivateAttr, model_validator

from art_core.errors import ConfigError
from art_core.route import Route
from art_core.transport import HOLD_TIMEOUT, PLACEHOLDER_URL, async_client, sync_client
from art_langgraph.call_route import arouted_at_start, current_route, routed, routed_at_start
from art_langgraph.callbacks import LLM_TYPE
from art_langgraph.completions import AsyncReadyCompletions, ReadyCompletions
from art_langgraph.messages import mend_tool_calls, strict_object
from art_langgraph.routing import find_route, lost_call, note_stray_call
from art_langgraph.stand_in import settings_for
from art_langgraph.training_payload import check_training_payload

_NAME = "art"
"""Stands in for the model's name: ChatOpenAI changes its ways for names that it knows."""
_FOUND_AT_CALL = ("model", "model_name", "api_key", "openai_api_key", "base_url", "openai_api_base")
_NOT_OURS = ("http_client", "http_async_client", "openai_proxy")
_NOT_GIVEN = frozenset(
    (
        *_FOUND_AT_CALL,
        *_NOT_OURS,
        "client",
        "async_client",
        "root_client",
        "root_async_client",
        "openai_organization",
        "use_responses_api",
    )
)


class ChatArt(ChatOpenAI):
    """A chat model that finds the model behind it at each call.

    In this order: the rollout around the call; the rollout named in `config["metadata"]`;
    ART_BASE_URL, ART_MODEL and ART_API_KEY; `otherwise`; else a `CaptureError`. It never goes to a
    hosted provider by itself. All else is ChatOpenAI's: `bind_tools`, `with_structured_output`,
    streaming, batches, callbacks, sync and async, from any thread and any event loop.

    In training the model's `SamplingConfig` overrides the sampling settings given here; evaluation
    and production keep them. Token counts are estimates, made without a network.

    Args:
        role: which of `rollout(..., models={role: model})` it is.
        otherwise: the chat model to use where no model is found.

    Raises:
        ConfigError: it is given a model name, a key or an address, which it finds at each call.
    """

    role: str | None = None
    otherwise: BaseChatModel | None = Field(default=None, exclude=True)
    _twin: ChatArt | None = PrivateAttr(default=None)

    @model_validator(mode="before")
    @classmethod
    def _bound_at_call(cls, values: dict[str, Any]) -> dict[str, Any]:
        """Settle what ChatOpenAI would read from the environment when it is built."""
        for name in (*_FOUND_AT_CALL, *_NOT_OURS):
            if values.get(name) is not None:
                raise ConfigError(
                    f"ChatArt takes no {name}",
                    got="(hidden)" if "key" in name else values[name],
                    fix="It finds its model at each call: in the rollout, or by ART_BASE_URL, "
                    "ART_MODEL and ART_API_KEY. A model to use elsewhere goes into otherwise=.",
                )
        if values.get("use_responses_api"):
            raise ConfigError("ChatArt speaks chat completions only", got="use_responses_api=True")
        given = {name: value for name, value in values.items() if name not in _NOT_GIVEN}
        if "request_timeout" not in given:
            given.setdefault("timeout", HOLD_TIMEOUT)
        given.setdefault("stream_usage", True)
        return {
            **given,
            "model_name": _NAME,
            "openai_api_key": _NAME,
            "openai_api_base": PLACEHOLDER_URL,
            "openai_proxy": None,
            "http_client": sync_client(_route_of_call),
            "http_async_client": async_client(_route_of_call),
            "use_responses_api": False,
        }

    @model_validator(mode="after")
    def _send_as_it_is(self) -> Self:
        """What LangChain has made is JSON: nothing in it is rewritten at each call."""
        self.client = ReadyCompletions(self.root_client)
        self.async_client = AsyncReadyCompletions(self.root_async_client)
        return self

    # --- finding the model, on every path that LangChain has to it

    def _generate_with_cache(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: Any = None,
        **kwargs: Any,
    ) -> ChatResult:
        route = self._route(*_asked_by(run_manager))
        if route is None:
            other = self._stand_in()
            theirs = settings_for(other, kwargs)
            return other._generate_with_cache(messages, stop, run_manager, **theirs)
        with routed(route):
            return ChatOpenAI._generate_with_cache(
                self._sampler(route), messages, stop, run_manager, **kwargs
            )

    async def _agenerate_with_cache(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: Any = None,
        **kwargs: Any,
    ) -> ChatResult:
        route = self._route(*_asked_by(run_manager))
        if route is None:
            other = self._stand_in()
            theirs = settings_for(other, kwargs)
            return await other._agenerate_with_cache(messages, stop, run_manager, **theirs)
        with routed(route):
            return await ChatOpenAI._agenerate_with_cache(
                self._sampler(route), messages, stop, run_manager, **kwargs
            )

    def stream(
        self,
        input: LanguageModelInput,
        config: RunnableConfig | None = None,
        *,
        stop: list[str] | None = None,
        **kwargs: Any,
    ) -> Iterator[AIMessageChunk]:
        """As `ChatOpenAI.stream`."""
        config = _with_run_id(config)
        route = self._route(_metadata_of(config), config["run_id"])
        if route is None:
            other = self._stand_in()
            yield from other.stream(input, config, stop=stop, **settings_for(other, kwargs))
        else:
            chunks = super().stream(input, config, stop=stop, **kwargs)
            yield from routed_at_start(route, chunks)

    async def astream(
        self,
        input: LanguageModelInput,
        config: RunnableConfig | None = None,
        *,
        stop: list[str] | None = None,
        **kwargs: Any,
    ) -> AsyncIterator[AIMessageChunk]:
        """As `ChatOpenAI.astream`."""
        config = _with_run_id(config)
        route = self._route(_metadata_of(config), config["run_id"])
        if route is None:
            other = self._stand_in()
            chunks = other.astream(input, config, stop=stop, **settings_for(other, kwargs))
        else:
            chunks = arouted_at_start(route, super().astream(input, config, stop=stop, **kwargs))
        async for chunk in chunks:
            yield chunk

    def _iter_v2_events(
        self, messages: list[BaseMessage], *, run_manager: Any, **kwargs: Any
    ) -> Iterator[Any]:
        route = self._route_or_raise(*_asked_by(run_manager))
        events = super()._iter_v2_events(messages, run_manager=run_manager, **kwargs)
        yield from routed_at_start(route, events)

    async def _aiter_v2_events(
        self, messages: list[BaseMessage], *, run_manager: Any, **kwargs: Any
    ) -> AsyncIterator[Any]:
        route = self._route_or_raise(*_asked_by(run_manager))
        events = super()._aiter_v2_events(messages, run_manager=run_manager, **kwargs)
        async for event in arouted_at_start(route, events):
            yield event

    def _route(self, metadata: Mapping[str, Any], run_id: object | None) -> Route | None:
        """Where this call goes; None: to `otherwise`."""
        route = find_route(self.role, metadata, run_id)
        if route is None:
            note_stray_call()
            if self.otherwise is None:
                raise lost_call(self.role, metadata)
        return route

    def _route_or_raise(self, metadata: Mapping[str, Any], run_id: object | None) -> Route:
        route = self._route(metadata, run_id)
        if route is None:
            raise ConfigError(
                "ChatArt can't hand this kind of stream on to otherwise=",
                got=type(self.otherwise).__name__,
                fix="Use stream(), or stream_events(version='v2').",
            )
        return route

    def _stand_in(self) -> BaseChatModel:
        return cast(BaseChatModel, self.otherwise)  # _route has raised where it is None

    def _sampler(self, route: Route) -> ChatArt:
        """This model, without LangChain's cache in a rollout: a replayed answer is no sample."""
        if route.scope is None or not (self.cache or get_llm_cache()):
            return self
        if self._twin is None:
            self._twin = self.model_copy(update={"cache": False})
        return self._twin

    # --- what is asked and what comes back

    def _get_request_payload(
        self, input_: LanguageModelInput, *, stop: list[str] | None = None, **kwargs: Any
    ) -> dict[str, Any]:
        payload = super()._get_request_payload(input_, stop=stop, **kwargs)
        payload["messages"] = mend_tool_calls(payload["messages"])
        if (route := current_route()) is not None and route.target.trains:
            check_training_payload(payload, route)
        return payload

    def _create_chat_result(
        self, response: Any, generation_info: dict[str, Any] | None = None
    ) -> ChatResult:
        """As ChatOpenAI's, but arguments that are no JSON object make an invalid tool call.

        ChatOpenAI takes `null` and `[]` for a call without arguments, and fails on a number.
        """
        broken: dict[int, list[Any]] = {}
        choices = getattr(response, "choices", None) or ()
        for position, choice in enumerate(choices):
            calls = [c for c in choice.message.tool_calls or () if _is_broken(c)]
            if calls:
                broken[position] = calls
        if broken:
            response = response.model_copy(deep=True)
            for position in broken:
                message = response.choices[position].message
                message.tool_calls = [c for c in message.tool_calls if not _is_broken(c)]
        result = super()._create_chat_result(response, generation_info)
        for position, calls in broken.items():
            said = cast(AIMessage, result.generations[position].message)
            said.invalid_tool_calls.extend(_invalid(call) for call in calls)
        return result

    def _get_llm_string(self, stop: list[str] | None = None, **kwargs: Any) -> str:
        """The cache's key: with the model that is behind the call now."""
        route = current_route()
        behind = "" if route is None else f"{route.target.base_url} {route.target.model_name} "
        return behind + super()._get_llm_string(stop=stop, **kwargs)

    def get_token_ids(self, text: str) -> list[int]:
        """Only by `custom_get_token_ids`: the tokenizer is the served model's.

        Raises:
            ConfigError: there is none. (ChatOpenAI would fetch OpenAI's from the network.)
        """
        if self.custom_get_token_ids is None:
            raise ConfigError(
                "ChatArt does not know the served model's token ids here",
                fix="Count with get_num_tokens, or give it custom_get_token_ids.",
            )
        return self.custom_get_token_ids(text)

    def get_num_tokens(self, text: str) -> int:
        """About how many tokens `text` has: a quarter of its characters."""
        return count_tokens_approximately([text], extra_tokens_per_message=0.0)

    def get_num_tokens_from_messages(
        self, messages: Sequence[BaseMessage], tools: Sequence[Any] | None = None, **_: Any
    ) -> int:
        """About how many tokens the messages and tools have."""
        schemas: list[Any] = [convert_to_openai_tool(tool) for tool in tools or ()]
        return count_tokens_approximately(messages, tools=schemas or None)

    # --- identity: its own name in traces and in serialised form; copies are made anew

    @property
    def _llm_type(self) -> str:
        return LLM_TYPE

    def _get_ls_params(self, stop: list[str] | None = None, **kwargs: Any) -> LangSmithParams:
        return {**super()._get_ls_params(stop=stop, **kwargs), "ls_provider": "art"}

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
        return ["art_langgraph", "chat_model"]

    def __reduce__(self) -> tuple[Callable[..., ChatArt], tuple[Any, ...]]:
        return _rebuild, (type(self), self._given())

    def __deepcopy__(self, memo: dict[int, Any] | None = None) -> ChatArt:
        return _rebuild(type(self), self._given())

    def _given(self) -> dict[str, Any]:
        """The arguments that build a model like this one."""
        names = self.model_fields_set - _NOT_GIVEN
        return {name: getattr(self, name) for name in names}


def _rebuild(kind: type[ChatArt], given: dict[str, Any]) -> ChatArt:
    return kind(**given)


def _route_of_call() -> Route:
    """The route for the transport: the call's, or that of whoever uses the bare OpenAI client."""
    route = current_route() or find_route(None, ensure_config()["metadata"])
    if route is None:
        raise lost_call(None, {})
    return route


def _asked_by(run_manager: Any) -> tuple[Mapping[str, Any], object | None]:
    """Metadata and id of a LangChain run."""
    if run_manager is None:
        return ensure_config()["metadata"], None
    return run_manager.metadata or {}, run_manager.run_id


def _metadata_of(config: RunnableConfig) -> Mapping[str, Any]:
    """What a run under `config` will have as metadata."""
    callbacks = config.get("callbacks")
    inherited = callbacks.metadata if isinstance(callbacks, BaseCallbackManager) else {}
    return {**inherited, **config["metadata"]}


def _with_run_id(config: RunnableConfig | None) -> RunnableConfig:
    config = ensure_config(config)
    if config.get("run_id") is None:
        config["run_id"] = uuid7()
    return config


def _is_broken(call: Any) -> bool:
    function = getattr(call, "function", None)
    return function is not None and strict_object(function.arguments) is None


def _invalid(call: Any) -> InvalidToolCall:
    return InvalidToolCall(
        type="invalid_tool_call",
        id=call.id,
        name=call.function.name,
        args=call.function.arguments,
        error="the arguments are not a JSON object",
    )
