"""A graph played once, recorded: `rollout`.

In: a graph, its input, and the model behind its chat models. Out: a `Trajectory` with every call,
the last state reached and how it ended; or `RolloutFailure`, where the policy was not to blame. One
call's way: `open_graph`, `play`, `recorded`, `tell`, `ended`. It leaves out many rollouts at once
(`art_core.gather`), rewards, and code that is no graph (`free_code`).
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Collection, Mapping
from typing import Any

from langchain_core.runnables import Runnable, RunnableConfig
from langchain_core.runnables.config import merge_configs
from langgraph.types import Command

from art_core.capture import Scope, open_scope
from art_core.errors import ConfigError, RolloutFailure
from art_core.time_limit import Waiting, time_limit
from art_core.trajectories import Trajectory
from art_langgraph.callbacks import TrajectoryCallbackHandler
from art_langgraph.chosen_nodes import check_nodes, is_in
from art_langgraph.endings import ended, hook_failure, reraise_own_cancel, verdict_on
from art_langgraph.faults import Verdict
from art_langgraph.graph_names import named_graph
from art_langgraph.hooks import Hook, HookFailed, hooked
from art_langgraph.model_lookup import ROLLOUT_KEY
from art_langgraph.playing import NotPlayable, OnInterrupt, Part, play
from art_langgraph.recorded import recorded, tell
from art_langgraph.sources import GraphSource, open_graph
from art_langgraph.targets import ModelLike, targets_of
from art_langgraph.told import note_lost_calls, told_of, warn_without_calls

_TOLD = frozenset(("graph", "incomplete"))
"""What a rollout itself tells in the trajectory's metadata."""


async def rollout(
    graph: GraphSource,
    input: Any,
    *,
    model: ModelLike | None = None,
    models: Mapping[str, ModelLike] | None = None,
    train_nodes: Collection[str] | str | None = None,
    config: RunnableConfig | None = None,
    context: Any = None,
    on_interrupt: OnInterrupt | None = None,
    max_interrupts: int = 100,
    continue_: Trajectory | None = None,
    store: Any = None,
    checkpointer: Any = None,
    set_up: Hook | None = None,
    tear_down: Hook | None = None,
    timeout: float | None = None,
    failure_reward: float | None = 0.0,
    metadata: Mapping[str, Any] | None = None,
    evaluation: bool = False,
    rollout_id: str | None = None,
) -> Trajectory:
    """Play a graph once and record every LLM call.

    Args:
        graph: see `GraphSource`. It runs under a fresh `thread_id`, so that rollouts share no
            state; only a `Command` input (a resume) keeps the one in `config`.
        input: the graph's input.
        model: behind each `ChatArt`: an `art.Model`, an `art.TrainableModel`, a `Target`, or a
            served name such as "agent-001@3" at ART_BASE_URL. None: as the scope around says.
        models: by `ChatArt(role=...)`; the other roles use `model`.
        train_nodes: calls of other nodes are context. A name stands for a node and all that runs
            in it; "researcher/model" is a node of a subgraph. None: all are trained; (): none.
        config: the graph's config; callbacks, tags and limits are kept.
        context: the graph's context.
        on_interrupt: answers the graph's interrupts; see `OnInterrupt`. None: the rollout ends as
            "interrupted".
        max_interrupts: how often it is asked, at most.
        continue_: a trajectory of this graph, which goes on in its thread with `input` as the next
            turn. It is returned itself, longer.
        store: used in place of the graph's own, by all rollouts that are given it; or a factory, by
            which each rollout has its own.
        checkpointer: as `store`.
        set_up: called with the trajectory before the graph runs, outside the time limit.
        tear_down: called with it afterwards, whatever happened.
        timeout: seconds, not counting those in which an engine of this process holds calls, or
            `on_interrupt` is waited for, which may take as long each time; what was reached by then
            is returned with `ended="timeout"`.
        failure_reward: reward of a rollout that the policy brought to its end (recursion limit,
            context overflow, timeout, an exception raised on its output); None leaves it unset.
        metadata: kept with the trajectory; "graph" and "incomplete" are taken, see below.
        evaluation: keep the sampling settings of the graph's nodes.
        rollout_id: see `open_scope`.

    Returns:
        The trajectory. Its calls say it all; `messages_and_choices` and `additional_histories` tell
        them as conversations, `completeness` what of them can be trained. In `metadata`, "graph"
        has the thread id, the nodes that ran, tool calls and interrupts; "incomplete", where it is
        there, says what is missing from the record.

    Raises:
        RolloutFailure: the endpoint or the network failed, or a task was cancelled inside; or
            nothing that the policy said can have caused the exception, such as one of a hook,
            `on_interrupt` or the join with the backend's records. The calls are inside, the
            exception is its cause; where the graph had failed before, that is in
            `.trajectory.exception`.
        ConfigError: the arguments don't go together, or the graph can't be played with them.
    """
    if max_interrupts < 0:
        raise ConfigError("max_interrupts", got=max_interrupts, expected="0 or more")
    if taken := _TOLD & (metadata or {}).keys():
        raise ConfigError("metadata", got=sorted(taken), expected="names that rollout does not use")
    targets = targets_of(model, models, evaluation=evaluation)
    nodes = [train_nodes] if isinstance(train_nodes, str) else train_nodes
    source = named_graph(graph) if isinstance(graph, str) else graph
    trajectory, thread_id = _begun(continue_, input, config)
    trajectory.metadata.update(metadata or {})
    before, failed = list(trajectory.calls), None
    verdict: Verdict | None = None
    opened: Runnable[Any, Any] | None = None
    with open_scope(rollout_id or trajectory.rollout_id, targets) as scope:
        handler = TrajectoryCallbackHandler(scope)
        ours: RunnableConfig = {
            "callbacks": [handler],
            "metadata": {ROLLOUT_KEY: scope.rollout_id},
            "configurable": {"thread_id": thread_id},
        }
        part = Part(
            input=input,
            config=merge_configs(config, ours),
            context=context,
            on_interrupt=on_interrupt,
            max_interrupts=max_interrupts,
            timeout=timeout,
            asking=Waiting(),
            store=store,
            checkpointer=checkpointer,
            continues=continue_ is not None,
        )
        async with recorded(trajectory, scope, before):
            try:
                async with hooked(trajectory, set_up, tear_down):
                    opened, verdict = await _played(source, part, trajectory, scope)
            except HookFailed as error:
                failed = error
    trajectory.metadata["graph"] = told_of(trajectory, handler, thread_id)
    await tell(
        trajectory,
        scope,
        [model, *(models or {}).values()],
        handler=handler,
        is_chosen=lambda call: is_in(call.origin, nodes),
    )
    if continue_ is not None or not isinstance(input, Command):  # else the thread's past is unknown
        note_lost_calls(trajectory, handler, input)
    if failed is not None:
        raise hook_failure(trajectory, failed)
    if verdict is None:
        warn_without_calls(trajectory, scope, handler)
        _check_chosen(nodes, opened, handler, trajectory)
    return ended(trajectory, verdict, failure_reward)


async def _played(
    source: GraphSource,
    part: Part,
    trajectory: Trajectory,
    scope: Scope,
) -> tuple[Runnable[Any, Any] | None, Verdict | None]:
    """Play the graph; its exception is kept in the trajectory, and judged.

    Returns:
        The graph as it was opened, None if that failed; and the verdict, None if it came to its
        own end.

    Raises:
        NotPlayable: nothing was run.
        HookFailed: `on_interrupt` raised, or took too long.
    """
    limit: asyncio.Timeout | None = None
    opened: Runnable[Any, Any] | None = None
    played = False
    try:
        async with time_limit(part.timeout, part.asking) as limit:
            async with open_graph(source, part.config) as opened:
                await play(opened, part, trajectory)
                played = True
    except NotPlayable:
        raise
    except HookFailed as failed:
        trajectory.exception = failed.error
        raise
    except (Exception, asyncio.CancelledError) as error:  # noqa: BLE001  # a rollout's edge
        reraise_own_cancel(error)
        trajectory.exception = error
        expired = limit is not None and limit.expired()
        return opened, verdict_on(error, scope, expired=expired, played=played)
    return opened, None


def _begun(
    continued: Trajectory | None, input: Any, config: RunnableConfig | None
) -> tuple[Trajectory, str]:
    """The trajectory to record into, and the thread to play in.

    The thread is fresh, unless a trajectory is continued or a resume names the one it goes on.
    """
    if continued is not None:
        thread_id = (continued.metadata.get("graph") or {}).get("thread_id")
        if thread_id is None:
            raise ConfigError(
                "continue_ names no thread of a graph",
                got=continued,
                expected="a trajectory that rollout has returned",
            )
        return continued, str(thread_id)
    given = ((config or {}).get("configurable") or {}).get("thread_id")
    resumes = given is not None and isinstance(input, Command)
    return Trajectory(), str(given) if resumes else uuid.uuid4().hex


def _check_chosen(
    nodes: Collection[str] | None,
    graph: Runnable[Any, Any] | None,
    handler: TrajectoryCallbackHandler,
    trajectory: Trajectory,
) -> None:
    try:
        check_nodes(nodes, graph, handler.nodes, trajectory.calls)
    except ConfigError as error:
        trajectory.exception = error
        raise RolloutFailure(str(error), trajectory=trajectory) from error
