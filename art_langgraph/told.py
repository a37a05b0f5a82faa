"""What the callbacks and the last state say of a run, for `metadata["graph"]` and for warnings.

In: a handler that watched, and the trajectory. Out: a dict ready for JSON, lines of log, and a
warning where the policy was never asked.
"""

from __future__ import annotations

import threading
import warnings
from collections.abc import Iterable, Mapping
from typing import Any

from langchain_core.messages import AIMessage

from art_core.capture import Scope, open_scopes
from art_core.trajectories import Trajectory
from art_langgraph.callbacks import TrajectoryCallbackHandler, is_record_id
from art_langgraph.recorded import is_policys

_REMEMBERED = 100_000
"""Record ids that are remembered beyond their rollout: some 10 MB."""
_RECORDED: dict[str, None] = {}
_LOCK = threading.Lock()


class LostCalls(UserWarning):
    """The state holds answers of our endpoint that no recorded call gave."""


class NoModelCalls(UserWarning):
    """A rollout ended without a call to the policy: nothing of it can be trained."""


def told_of(
    trajectory: Trajectory, handler: TrajectoryCallbackHandler, thread_id: str
) -> dict[str, Any]:
    """Thread, nodes, tools and open interrupts; those of earlier turns of the trajectory first."""
    before: dict[str, Any] = trajectory.metadata.get("graph") or {}
    nodes = dict.fromkeys([*before.get("nodes", ()), *handler.nodes])
    told: dict[str, Any] = {"thread_id": thread_id, "nodes": list(nodes)}
    tools = [*before.get("tools", ()), *(vars(run).copy() for run in handler.tools)]
    if tools:
        told["tools"] = tools
    for run in handler.tools:
        if run.error is not None:
            trajectory.log(f"tool {run.name} raised {run.error}")
    if trajectory.ended == "interrupted":
        state = trajectory.state if isinstance(trajectory.state, dict) else {}
        asked = state.get("__interrupt__", ())  # none where the graph was compiled to stop
        told["interrupts"] = [{"id": i.id, "value": repr(i.value)} for i in asked]
    return told


def note_lost_calls(trajectory: Trajectory, handler: TrajectoryCallbackHandler, given: Any) -> None:
    """Count the answers in the last state that our endpoint gave and nobody recorded, and warn.

    A stock chat model called in a thread that LangGraph did not start has no callbacks there. What
    another rollout of this process recorded came out of a node cache or a store.

    Args:
        given: the graph's input; what it holds was said before.
    """
    known = {call.record_id for call in trajectory.calls} | handler.answered.keys()
    known.update(_record_ids(given))
    lost = [record_id for record_id in _record_ids(trajectory.state) if record_id not in known]
    lost = [record_id for record_id in lost if not _is_recorded_elsewhere(record_id)]
    _remember(call.record_id for call in trajectory.calls)
    if not lost:
        return
    nodes = ", ".join(handler.nodes) or "none"
    what = (
        f"{len(lost)} answers in the last state came of calls that no callback saw; nodes that "
        f"ran: {nodes}"
    )
    trajectory.metadata["incomplete"] = [*trajectory.metadata.get("incomplete", []), what]
    warnings.warn(
        f"{what}. Start threads with langchain_core.runnables.config.ContextThreadPoolExecutor, or "
        "give the call the node's config: llm.invoke(messages, config=config).",
        LostCalls,
        stacklevel=4,
    )


def _is_recorded_elsewhere(record_id: str) -> bool:
    """True if a rollout that has ended, or one that is still open, has the call."""
    running = (call.record_id for scope in open_scopes() for call in list(scope.calls))
    return record_id in _RECORDED or record_id in running


def _remember(record_ids: Iterable[str]) -> None:
    """Keep the latest ids; what is older than that is hardly replayed."""
    with _LOCK:
        _RECORDED.update(dict.fromkeys(record_ids))
        while len(_RECORDED) > _REMEMBERED:
            del _RECORDED[next(iter(_RECORDED))]


def _record_ids(state: Any) -> list[str]:
    """Record ids of our endpoint in the messages of a state."""
    values = state.values() if isinstance(state, Mapping) else [state]
    found = []
    for value in values:
        for message in value if isinstance(value, list | tuple) else [value]:
            if isinstance(message, AIMessage):
                told = str(message.response_metadata.get("system_fingerprint"))
                if is_record_id(told):
                    found.append(told)
    return list(dict.fromkeys(found))


def warn_without_calls(
    trajectory: Trajectory, scope: Scope, handler: TrajectoryCallbackHandler
) -> None:
    """Warn if the policy was not asked; say which nodes ran and which models were asked where."""
    if scope.started_calls or any(is_policys(call, scope) for call in trajectory.calls):
        return
    nodes = ", ".join(handler.nodes) or "none"
    what = f"the graph ended without a call to a ChatArt; nodes that ran: {nodes}"
    if handler.models:
        others = [f"{name} ({where})" for name, where in sorted(handler.models.items())]
        what += f"; other models were called: {', '.join(others)}"
    warnings.warn(
        f"{what}. Nothing of this rollout can be trained: build the graph with ChatArt(), or point "
        "its chat model at the endpoint of the model being trained.",
        NoModelCalls,
        stacklevel=4,
    )
