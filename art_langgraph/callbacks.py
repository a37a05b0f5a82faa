"""`TrajectoryCallbackHandler`: what LangChain's callbacks tell of a rollout, beside the wire.

In: callback events of a graph run. Out: the nodes that ran, tool calls with their outcome, and a
call for each answer of a chat model. Calls that went over our transport are recorded there, ids and
all, and are not recorded twice. Tokens it has none of: where the endpoint is ours, its record id is
kept, by which the backend adds them (`model.join`, and `train` by itself).
"""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any
from urllib.parse import urlsplit, urlunsplit
from uuid import UUID

from langchain_core.callbacks import BaseCallbackHandler
from langchain_core.messages import AIMessage, BaseMessage
from langchain_core.outputs import ChatGeneration, LLMResult

from art_core.calls import Cause, ModelCall, Origin
from art_core.capture import Scope, current_scope
from art_core.exchange import split_step
from art_langgraph.messages import to_openai
from art_langgraph.model_lookup import origin_of

LLM_TYPE = "art-chat"
"""`_llm_type` of a `ChatArt`."""
_MAX_TEXT = 500
"""Characters of a tool's arguments and errors that are kept."""
_LATEST = 1000
"""How many tools, answers and so on a handler without a rollout of its own remembers."""
_OURS = re.compile(r"[0-9a-f]{20}")
"""A `system_fingerprint` of our endpoint: its record id, by which ids and logprobs are joined."""


@dataclass
class ToolRun:
    """One tool call of a rollout."""

    name: str
    node: str | None
    arguments: str
    started: float
    """Seconds since the epoch."""
    seconds: float | None = None
    """None while it runs, or if the rollout ended first."""
    error: str | None = None
    """What the tool raised; None if it returned."""
    call_id: str | None = None
    """Id of the model's tool call; None for a tool that the graph called by itself."""
    namespace: str | None = None
    task_path: str | None = None
    run_id: str | None = None
    parent_run_id: str | None = None


@dataclass(frozen=True)
class _Asked:
    """A chat model's call that has not ended."""

    place: int
    request: dict[str, Any]
    origin: Origin
    started: float
    messages: Sequence[BaseMessage] | None
    """Of a `ChatArt`, put into the request only if its transport saw no call; else None."""
    scope: Scope


class TrajectoryCallbackHandler(BaseCallbackHandler):
    """Attach it in a run's config: `graph.invoke(x, config={"callbacks": [handler]})`.

    `rollout` attaches one itself. It runs inline, in the caller's context.

    Args:
        scope: the rollout to record into; None means the one around each event. Such a handler may
            live as long as the process: of what it has seen it keeps the latest 1000 of a kind.
    """

    run_inline = True

    def __init__(self, scope: Scope | None = None) -> None:
        self.nodes: list[str] = []
        """Names of the nodes that ran, in the order of their first run."""
        self.tools: list[ToolRun] = []
        """Tool calls in the order they were started."""
        self.models: dict[str, str] = {}
        """By name of each chat model that was asked: its class, and its address if it tells one."""
        self.parents: dict[str, str] = {}
        """Parent run ids of the chat models' runs, by run id."""
        self.answered: dict[str, None] = {}
        """Every `system_fingerprint` that an answer had, as keys."""
        self._scope = scope
        self._asked: dict[UUID, _Asked] = {}
        self._tools_running: dict[UUID, ToolRun] = {}
        self._lock = threading.RLock()  # a garbage collection inside may end a stream, and a call

    def on_chain_start(
        self, serialized: Any, inputs: Any, *, metadata: dict[str, Any] | None = None, **_: Any
    ) -> None:
        """A node, or a part of one, starts."""
        node = (metadata or {}).get("langgraph_node")
        if node is not None and node not in self.nodes:
            with self._lock:
                self.nodes.append(node)

    # --- tools

    def on_tool_start(
        self,
        serialized: dict[str, Any] | None,
        input_str: str,
        *,
        run_id: UUID,
        metadata: dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        """A tool starts."""
        name = (serialized or {}).get("name") or kwargs.get("name") or "tool"
        origin = origin_of(None, metadata or {}, run_id)
        run = ToolRun(
            name,
            origin.node,
            input_str[:_MAX_TEXT],
            time.time(),
            call_id=kwargs.get("tool_call_id"),
            namespace=origin.namespace,
            task_path=origin.task_path,
            run_id=origin.run_id,
            parent_run_id=_text(kwargs.get("parent_run_id")),
        )
        with self._lock:
            self.tools.append(run)
            self._tools_running[run_id] = run
            self._forget()

    def on_tool_end(self, output: Any, *, run_id: UUID, **_: Any) -> None:
        """A tool has returned."""
        self._end_tool(run_id, None)

    def on_tool_error(self, error: BaseException, *, run_id: UUID, **_: Any) -> None:
        """A tool has raised."""
        self._end_tool(run_id, f"{type(error).__name__}: {error}"[:_MAX_TEXT])

    def _end_tool(self, run_id: UUID, error: str | None) -> None:
        with self._lock:
            run = self._tools_running.pop(run_id, None)
        if run is not None:
            run.seconds, run.error = time.time() - run.started, error

    # --- chat models

    def on_chat_model_start(
        self,
        serialized: dict[str, Any] | None,
        messages: list[list[BaseMessage]],
        *,
        run_id: UUID,
        metadata: dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        """A chat model is asked. (LangChain starts a run of its own for each prompt.)"""
        params: Mapping[str, Any] = kwargs.get("invocation_params") or {}
        told = metadata or {}
        name = str(
            params.get("model")
            or params.get("model_name")
            or told.get("ls_model_name")
            or _class(serialized)
        )
        parent = _text(kwargs.get("parent_run_id"))
        with self._lock:
            self.models[name] = _where(serialized)
            if parent is not None:
                self.parents[str(run_id)] = parent
            self._forget()
        scope = self._scope if self._scope is not None else current_scope()
        if scope is None:
            return
        ours = params.get("_type") == LLM_TYPE
        request: dict[str, Any] = {"model": name}
        if not ours:
            request["messages"] = to_openai(messages[0])
        if params.get("tools"):
            request["tools"] = params["tools"]
        origin = replace(origin_of(None, told, run_id), parent_run_id=parent)
        kept = messages[0] if ours else None
        asked = _Asked(scope.begin(), request, origin, time.time(), kept, scope)
        with self._lock:
            self._asked[run_id] = asked

    def on_llm_end(self, response: LLMResult, *, run_id: UUID, **_: Any) -> None:
        """A chat model has answered."""
        self._end_call(run_id, response, None)

    def on_llm_error(self, error: BaseException, *, run_id: UUID, **kwargs: Any) -> None:
        """A chat model failed, or its stream was left early."""
        self._end_call(run_id, kwargs.get("response"), f"{type(error).__name__}: {error}")

    def _end_call(self, run_id: UUID, response: LLMResult | None, error: str | None) -> None:
        answers = _said(response)
        with self._lock:
            asked = self._asked.pop(run_id, None)
            self.answered.update(dict.fromkeys(map(_fingerprint, answers)))
            self._forget()
        if asked is None or asked.scope.saw_run(str(run_id)):
            return
        if asked.messages is not None:
            asked.request["messages"] = to_openai(asked.messages)
        for index, said in enumerate(answers or [None]):
            call = _call(asked, run_id, said, index, error)
            if not asked.scope.saw_answer(call.key):
                asked.scope.add(call, asked.place)

    def _forget(self) -> None:
        """Let go of the oldest, where the handler is not a rollout's own. Under the lock."""
        if self._scope is not None:
            return
        for listed in (self.nodes, self.tools):
            del listed[:-_LATEST]
        for kept in (self.models, self.parents, self.answered, self._tools_running):
            _shorten(kept)
        if len(self._asked) > _LATEST:  # LangChain does not tell of a call that was cancelled
            self._asked = {i: asked for i, asked in self._asked.items() if not asked.scope.closed}


def _shorten(kept: dict[Any, Any]) -> None:
    while len(kept) > _LATEST:
        del kept[next(iter(kept))]


def _call(
    asked: _Asked, run_id: UUID, said: AIMessage | None, index: int, error: str | None
) -> ModelCall:
    """One answer of a chat model, as LangChain tells of it."""
    info = {} if said is None else said.response_metadata
    record_id = "" if said is None else _fingerprint(said)
    replayed = said is not None and "total_cost" in (said.usage_metadata or {})
    is_ours = is_record_id(record_id) and not replayed
    model, step = split_step(asked.request["model"])
    left_out: Cause | None = "cache replay" if replayed else "several answers" if index else None
    return ModelCall(
        record_id=record_id if is_ours else f"local-{run_id.hex}",
        model=model,
        step=step,
        request=asked.request,
        message={} if said is None else to_openai(said)[0],
        finish_reason=info.get("finish_reason") or info.get("stop_reason"),
        choice_index=index,
        origin=asked.origin,
        started=asked.started,
        ended=time.time(),
        error=error,
        left_out="broken answer" if error else left_out,
    )


def has_record(call: ModelCall) -> bool:
    """True if our endpoint answered the call, so that its tokens are in the backend's records."""
    return is_record_id(call.record_id)


def is_record_id(text: str) -> bool:
    """True for an id as our endpoint gives it to a record, and as `system_fingerprint`."""
    return _OURS.fullmatch(text) is not None


def _fingerprint(said: AIMessage) -> str:
    return str(said.response_metadata.get("system_fingerprint"))


def _said(response: LLMResult | None) -> list[AIMessage]:
    """The messages that LangChain was given; the graph gets the first."""
    return [
        candidate.message
        for candidates in (response.generations if response is not None else ())
        for candidate in candidates
        if isinstance(candidate, ChatGeneration) and isinstance(candidate.message, AIMessage)
    ]


def _where(serialized: Mapping[str, Any] | None) -> str:
    """A chat model's class, and its address where it tells one."""
    address = address_of(serialized)
    return _class(serialized) + (f" at {address}" if address else "")


def _class(serialized: Mapping[str, Any] | None) -> str:
    told = serialized or {}
    return str(told.get("name") or (told.get("id") or ["unknown"])[-1])


def _text(value: object | None) -> str | None:
    return None if value is None else str(value)


def address_of(serialized: Mapping[str, Any] | None) -> str | None:
    """Where a chat model tells that it asks, without user, password and query; None: it tells not.

    None is the provider's own address.
    """
    given: Mapping[str, Any] = (serialized or {}).get("kwargs") or {}
    told = next((str(given[name]) for name in _ADDRESSES if given.get(name)), None)
    if told is None:
        return None
    try:
        parts = urlsplit(told)
    except ValueError:  # it may be a secret in the wrong place
        return "an address that is none"
    return urlunsplit((parts.scheme, parts.netloc.rpartition("@")[2], parts.path, "", ""))


_ADDRESSES = (
    "openai_api_base",
    "base_url",
    "azure_endpoint",
    "anthropic_api_url",
    "endpoint",
    "endpoint_url",
)
