"""`ChatArt`: the chat model of a graph that is trained. A true `ChatOpenAI`, bound at call time.

In: whatever a graph asks of a ChatOpenAI. Out: the same, from the model that the call's rollout
names (`model_lookup`), over a transport that records (`art_core.transport`). It needs no key and no
model when it is built. It leaves out recording: the wire does that, so no path can bypass it. What
it knows of the model behind it is in `described`, how it is copied in `rebuilt`.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator, Mapping
from typing import Any, Self, cast
from weakref import WeakSet

import openai
from langchain_core.callbacks import BaseCallbackManager
from langchain_core.globals import get_llm_cache
from langchain_core.language_models import BaseChatModel, LanguageModelInput
from langchain_core.messages import AIMessage, AIMessageChunk, BaseMessage
from langchain_core.outputs import ChatGenerationChunk, ChatResult
from langchain_core.runnables import RunnableConfig
from langchain_core.runnables.config import ensure_config
from langchain_core.utils.uuid import uuid7
from langchain_openai import ChatOpenAI
from langchain_openai.chat_models.base import _handle_openai_api_error, _handle_openai_bad_request
from pydantic import SecretStr, model_validator

from art_core.errors import ConfigError
from art_core.route import Route
from art_core.transport import HOLD_TIMEOUT, PLACEHOLDER_URL, async_client, sync_client
from art_langgraph import answers
from art_langgraph.callbacks import LLM_TYPE
from art_langgraph.completions import AsyncReadyCompletions, ReadyCompletions
from art_langgraph.current_call import arouted_at_start, current_route, routed, routed_at_start
from art_langgraph.described import DescribedChat
from art_langgraph.messages import mend_texts, mend_tool_calls
from art_langgraph.model_lookup import NAME, find_route, lost_call, note_stray_call
from art_langgraph.rebuilt import FOUND_AT_CALL, NOT_GIVEN, NOT_OURS, RebuiltChat
from art_langgraph.stand_in import settings_for
from art_langgraph.training_payload import check_recorded_payload, check_training_payload


class ChatArt(DescribedChat, RebuiltChat):
    """A chat model that finds the model behind it at each call.

    In this order: the rollout around the call; the rollout named in `config["metadata"]`;
    ART_BASE_URL, ART_MODEL and ART_API_KEY; `otherwise`; else a `CaptureError`. It never goes to a
    hosted provider by itself. All else is ChatOpenAI's: `bind_tools`, `with_structured_output`,
    streaming, batches, callbacks, sync and async, from any thread and any event loop.

    In training the model's `SamplingConfig` overrides the sampling settings given here; evaluation
    and production keep them.

    `profile` and the counts of tokens come from the server behind it at the moment they are asked
    for, never when it is built. Where no server is found, or one that does not say, the profile is
    that of `otherwise` if it is OpenAI's, else None, and counts are estimates: a quarter of the
    characters. Give `profile=` to say it yourself, for what reads it when a graph is built.

    Args:
        role: which of `rollout(..., models={role: model})` it is.
        otherwise: the chat model to use where no model is found.

    Raises:
        ConfigError: it is given a model name, a key or an address, which it finds at each call.
    """

    @model_validator(mode="before")
    @classmethod
    def _bound_at_call(cls, values: dict[str, Any]) -> dict[str, Any]:
        """Settle what ChatOpenAI would read from the environment when it is built."""
        for name in (*FOUND_AT_CALL, *NOT_OURS):
            if (value := values.get(name)) is not None and not _is_own(value):
                raise ConfigError(
                    f"ChatArt takes no {name}",
                    got="(hidden)" if "key" in name or "proxy" in name else values[name],
                    fix="It finds its model at each call: in the rollout, or by ART_BASE_URL, "
                    "ART_MODEL and ART_API_KEY. A model to use elsewhere goes into otherwise=.",
                )
        if values.get("use_responses_api"):
            raise ConfigError("ChatArt speaks chat completions only", got="use_responses_api=True")
        given = {name: value for name, value in values.items() if name not in NOT_GIVEN}
        if "request_timeout" not in given:
            given.setdefault("timeout", HOLD_TIMEOUT)
        given.setdefault("stream_usage", True)
        return {
            **given,
            "model_name": NAME,
            "openai_api_key": NAME,
            "openai_api_base": PLACEHOLDER_URL,
            "openai_proxy": None,
            "http_client": _own(sync_client(_route_of_call)),
            "http_async_client": _own(async_client(_route_of_call)),
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
        with routed(route), answers.collected_parts() as parts:
            result = ChatOpenAI._generate_with_cache(
                self._sampler(route), messages, stop, run_manager, **kwargs
            )
            return answers.strict_calls(result, parts)

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
        with routed(route), answers.collected_parts() as parts:
            result = await ChatOpenAI._agenerate_with_cache(
                self._sampler(route), messages, stop, run_manager, **kwargs
            )
            return answers.strict_calls(result, parts)

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
            note_stray_call(metadata)
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
        return self.model_copy(update={"cache": False})

    async def _agenerate(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: Any = None,
        **kwargs: Any,
    ) -> ChatResult:
        """As ChatOpenAI's own, which hands a plain answer to a thread: that takes longer than the
        work that is done there.
        """
        if self.include_response_headers or "response_format" in {**self.model_kwargs, **kwargs}:
            return await super()._agenerate(messages, stop, run_manager, **kwargs)
        payload = self._get_request_payload(messages, stop=stop, **kwargs)
        try:
            response = await self.async_client.create(**payload)
        except openai.BadRequestError as error:
            _handle_openai_bad_request(error)
            raise
        except openai.APIError as error:
            _handle_openai_api_error(error)
            raise
        return self._create_chat_result(response)

    # --- what is asked and what comes back

    def _get_request_payload(
        self, input_: LanguageModelInput, *, stop: list[str] | None = None, **kwargs: Any
    ) -> dict[str, Any]:
        payload = super()._get_request_payload(input_, stop=stop, **kwargs)
        payload["messages"] = mend_texts(mend_tool_calls(payload["messages"]))
        if (route := current_route()) is not None:
            if route.target.token_data:
                asked = input_ if isinstance(input_, list) else []  # LangChain's paths give a list
                payload["messages"] = answers.give_back_reasoning(payload["messages"], asked)
            check_recorded_payload(payload, route)
            if route.target.trains:
                check_training_payload(payload, route)
        return payload

    def _create_chat_result(
        self, response: Any, generation_info: dict[str, Any] | None = None
    ) -> ChatResult:
        answer = answers.plain_answer(response)
        broken = answers.take_broken_calls(answer)
        result = super()._create_chat_result(answer, generation_info)
        for made, choice, calls in zip(result.generations, answer["choices"], broken, strict=True):
            said = cast(AIMessage, made.message)
            said.invalid_tool_calls.extend(calls)
            answers.keep_reasoning(said, choice["message"])
        answers.keep_parsed(result.generations[0].message, answer, response)
        return result

    def _convert_chunk_to_generation_chunk(
        self,
        chunk: dict[str, Any],
        default_chunk_class: type,
        base_generation_info: dict[str, Any] | None,
    ) -> ChatGenerationChunk | None:
        choices = answers.ready_choices(chunk)
        made = super()._convert_chunk_to_generation_chunk(
            chunk, default_chunk_class, base_generation_info
        )
        if made is not None:
            if choices:
                answers.keep_reasoning(made.message, choices[0]["delta"])
            answers.note_parts(made.message)
        return made

    def _get_generation_chunk_from_completion(self, completion: Any) -> ChatGenerationChunk:
        made = super()._get_generation_chunk_from_completion(completion)
        answers.drop_reasoning(made.message)  # it came in the chunks before
        return made

    def _get_llm_string(self, stop: list[str] | None = None, **kwargs: Any) -> str:
        """The cache's key: with the model that is behind the call now."""
        route = current_route()
        behind = "" if route is None else f"{route.target.base_url} {route.target.model_name} "
        return behind + super()._get_llm_string(stop=stop, **kwargs)

    @property
    def _llm_type(self) -> str:
        return LLM_TYPE


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


_OWN: WeakSet[Any] = WeakSet()
"""The HTTP clients made here, which come back when LangChain builds a model out of another."""


def _own(client: Any) -> Any:
    _OWN.add(client)
    return client


def _is_own(value: Any) -> bool:
    """True for what a ChatArt itself has put in that place."""
    if isinstance(value, SecretStr):
        value = value.get_secret_value()
    return value in (NAME, PLACEHOLDER_URL) if isinstance(value, str) else value in _OWN
