"""`TrajectoryCallbackHandler`: what LangChain's callbacks tell of a rollout, beside the wire.

In: callback events of a graph run. Out: the nodes that ran, tool calls with their outcome, and a
context call for each call of another chat model. Calls that went over our transport are recorded
there, ids and all, and are not recorded twice. It leaves out tokens: callbacks have none.
"""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from uuid import UUID

from langchain_core.callbacks import BaseCallbackHandler
from langchain_core.messages import AIMessage, BaseMessage
from langchain_core.outputs import ChatGeneration, LLMResult

from art_core.calls import ModelCall, Origin
from art_core.capture import Scope, current_scope
from art_core.exchange import split_step
from art_langgraph.messages import to_openai
from art_langgraph.routing import origin_of

LLM_TYPE = "art-chat"
"""`_llm_type` of a `ChatArt`."""
_MAX_TEXT = 500
"""Characters of a tool's arguments and errors that are kept."""
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


@dataclass(frozen=True)
class _Asked:
    """A chat model's call that has not ended."""

    place: int
    request: dict[str, Any]
    origin: Origin
    started: float
    messages: Sequence[BaseMessage] | None
    """Of a `ChatArt`, put into the request only if its transport saw no call; else None."""


class TrajectoryCallbackHandler(BaseCallbackHandler):
    """Attach it in a run's config: `graph.invoke(x, config={"callbacks": [handler]})`.

    `rollout` attaches one itself. It runs inline, in the caller's context.

    Args:
        scope: the rollout to record into; None means the one around each event.
    """

    run_inline = True

    def __init__(self, scope: Scope | None = None) -> None:
        self.nodes: list[str] = []
        """Names of the nodes that ran, in the order of their first run."""
        self.tools: list[ToolRun] = []
        """Tool calls in the order they were started."""
        self._scope = scope
        self._asked: dict[UUID, _Asked] = {}
        self._tools_running: dict[UUID, ToolRun] = {}
        self._lock = threading.Lock()

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
        node = (metadata or {}).get("langgraph_node")
        run = ToolRun(name, node, input_str[:_MAX_TEXT], time.time())
        with self._lock:
            self.tools.append(run)
            self._tools_running[run_id] = run

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
        scope = self._here()
        if scope is None:
            return
        params: Mapping[str, Any] = kwargs.get("invocation_params") or {}
        name = (
            params.get("model") or params.get("model_name") or (metadata or {}).get("ls_model_name")
        )
        ours = params.get("_type") == LLM_TYPE
        request: dict[str, Any] = {"model": str(name or "unknown")}
        if not ours:
            request["messages"] = to_openai(messages[0])
        if params.get("tools"):
            request["tools"] = params["tools"]
        origin = origin_of(None, metadata or {}, run_id)
        kept = messages[0] if ours else None
        asked = _Asked(scope.begin(), request, origin, time.time(), kept)
        with self._lock:
            self._asked[run_id] = asked

    def on_llm_end(self, response: LLMResult, *, run_id: UUID, **_: Any) -> None:
        """A chat model has answered."""
        self._end_call(run_id, response, None)

    def on_llm_error(self, error: BaseException, *, run_id: UUID, **kwargs: Any) -> None:
        """A chat model failed, or its stream was left early."""
        self._end_call(run_id, kwargs.get("response"), f"{type(error).__name__}: {error}")

    def _end_call(self, run_id: UUID, response: LLMResult | None, error: str | None) -> None:
        with self._lock:
            asked = self._asked.pop(run_id, None)
        scope = self._here()
        if asked is None or scope is None or scope.saw_run(str(run_id)):
            return
        if asked.messages is not None:
            asked.request["messages"] = to_openai(asked.messages)
        said = _said(response)
        info = {} if said is None else said.response_metadata
        record_id = str(info.get("system_fingerprint"))
        model, step = split_step(asked.request["model"])
        scope.add(
            ModelCall(
                record_id=record_id if _OURS.fullmatch(record_id) else f"local-{run_id.hex}",
                model=model,
                step=step,
                request=asked.request,
                message={} if said is None else to_openai(said)[0],
                finish_reason=info.get("finish_reason") or info.get("stop_reason"),
                origin=asked.origin,
                started=asked.started,
                ended=time.time(),
                error=error,
            ),
            asked.place,
        )

    def _here(self) -> Scope | None:
        return self._scope if self._scope is not None else current_scope()


def _said(response: LLMResult | None) -> AIMessage | None:
    """The message that the graph was given."""
    generations: Sequence[Sequence[Any]] = response.generations if response is not None else ()
    for candidates in generations:
        for candidate in candidates:
            if isinstance(candidate, ChatGeneration) and isinstance(candidate.message, AIMessage):
                return candidate.message
    return None
