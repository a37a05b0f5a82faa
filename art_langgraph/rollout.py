"""A graph played once, recorded: `rollout`. Free code played in a scope: `capture`, `wrap_rollout`.

In: a graph, its input, and the model behind its `ChatArt`s. Out: a `Trajectory` with every call,
the last state reached and how it ended; or `RolloutFailure`, where the policy was not to blame. It
leaves out many rollouts at once (`art_core.gather`) and rewards.
"""

from __future__ import annotations

import asyncio
import functools
import uuid
import warnings
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from typing import Any, ParamSpec, cast

from langchain_core.runnables import Runnable, RunnableConfig
from langchain_core.runnables.config import merge_configs
from langgraph.pregel.protocol import PregelProtocol
from langgraph.types import Command

from art_core.calls import ModelCall
from art_core.capture import Scope, open_scope
from art_core.errors import ConfigError, RolloutFailure
from art_core.trajectories import Trajectory
from art_core.transport import CALLER_LEFT
from art_langgraph.callbacks import TrajectoryCallbackHandler
from art_langgraph.chat_model import ChatArt
from art_langgraph.faults import Verdict, judge
from art_langgraph.graph_names import named_graph
from art_langgraph.routing import ROLLOUT_KEY
from art_langgraph.sources import GraphSource, open_graph
from art_langgraph.targets import ModelLike, targets_of

_P = ParamSpec("_P")
_SETTLE_SECONDS = 0.5
"""How long a rollout waits at its end for responses that are just being closed."""


class NoModelCalls(UserWarning):
    """A rollout ended without a call to the policy: nothing of it can be trained."""


async def rollout(
    graph: GraphSource,
    input: Any,
    *,
    model: ModelLike | None = None,
    models: Mapping[str, ModelLike] | None = None,
    config: RunnableConfig | None = None,
    context: Any = None,
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
        config: the graph's config; callbacks, tags and limits are kept.
        context: the graph's context.
        timeout: seconds; what was reached by then is returned with `ended="timeout"`.
        failure_reward: reward of a rollout that the policy brought to its end (recursion limit,
            context overflow, timeout, an exception raised on its output); None leaves it unset.
        metadata: kept with the trajectory.
        evaluation: keep the sampling settings of the graph's nodes.
        rollout_id: see `open_scope`.

    Returns:
        The trajectory. `messages_and_choices` stays empty: the calls say it all. In `metadata`,
        "graph" has the thread id, the nodes that ran, tool calls and interrupts; "incomplete",
        where it is there, says what is missing from the record.

    Raises:
        RolloutFailure: the endpoint or the network failed, or a task was cancelled inside; or
            nothing that the policy said can have caused the exception. The calls are inside, the
            exception is its cause.
        ConfigError: the arguments don't go together.
    """
    targets = targets_of(model, models, evaluation=evaluation)
    source = named_graph(graph) if isinstance(graph, str) else graph
    trajectory = Trajectory(metadata=dict(metadata or {}))
    with open_scope(rollout_id, targets) as scope:
        handler = TrajectoryCallbackHandler(scope)
        thread_id = _thread_id(input, config)
        settings = merge_configs(
            config,
            {
                "callbacks": [handler],
                "metadata": {ROLLOUT_KEY: scope.rollout_id},
                "configurable": {"thread_id": thread_id},
            },
        )
        verdict = None
        async with _recorded(trajectory, scope):
            limit = asyncio.timeout(timeout)
            try:
                async with limit, open_graph(source, settings) as runnable:
                    await _play(runnable, input, settings, context, trajectory)
            except (Exception, asyncio.CancelledError) as error:  # noqa: BLE001  # a rollout's edge
                _reraise_own_cancel(error)
                trajectory.exception = error
                verdict = _verdict(error, scope, expired=limit.expired())
    trajectory.metadata["graph"] = _told(handler, thread_id, trajectory)
    if verdict is None:
        _warn_without_calls(scope, handler)
    return _ended(trajectory, verdict, failure_reward)


@asynccontextmanager
async def capture(
    model: ModelLike | None = None,
    *,
    models: Mapping[str, ModelLike] | None = None,
    metadata: Mapping[str, Any] | None = None,
    evaluation: bool = False,
    rollout_id: str | None = None,
) -> AsyncIterator[Trajectory]:
    """Record the calls of free code: `async with capture(model) as traj: ...`.

    Exceptions pass through; the trajectory then holds the calls made before. Arguments as for
    `rollout`. The calls are there from the end of the block on.
    """
    targets = targets_of(model, models, evaluation=evaluation)
    trajectory = Trajectory(metadata=dict(metadata or {}))
    with open_scope(rollout_id, targets) as scope:
        async with _recorded(trajectory, scope):
            yield trajectory


def wrap_rollout(
    model: ModelLike,
    fn: Callable[_P, Awaitable[Trajectory]],
    *,
    failure_reward: float | None = 0.0,
    evaluation: bool = False,
) -> Callable[_P, Awaitable[Trajectory]]:
    """ART's name for playing `fn` with `model` behind every `ChatArt` in it.

    Args:
        model: as for `rollout`.
        fn: a coroutine function that returns a `Trajectory`; its calls are added to it.
        failure_reward: as for `rollout`.
        evaluation: as for `rollout`.

    Raises:
        RolloutFailure: when called, as for `rollout`.
        TypeError: when called, if `fn` returned anything but a `Trajectory`.
    """

    @functools.wraps(fn)
    async def played(*args: _P.args, **kwargs: _P.kwargs) -> Trajectory:
        trajectory, verdict = Trajectory(), None
        with open_scope(None, targets_of(model, None, evaluation=evaluation)) as scope:
            try:
                trajectory = await fn(*args, **kwargs)
            except RolloutFailure:
                raise
            except (Exception, asyncio.CancelledError) as error:  # noqa: BLE001  # a rollout's edge
                _reraise_own_cancel(error)
                trajectory.exception = error
                verdict = _verdict(error, scope, expired=False)
            if not isinstance(trajectory, Trajectory):
                raise TypeError(f"a rollout returns an art.Trajectory, got {trajectory!r:.200}")
            await _settle(scope)
        if trajectory.rollout_id is None:
            _note_calls(trajectory, scope)
        return _ended(trajectory, verdict, failure_reward)

    return played


def init_chat_model(
    model: str | None = None,
    *,
    model_provider: str | None = None,
    configurable_fields: object = None,
    config_prefix: str | None = None,
    **kwargs: Any,
) -> ChatArt:
    """ART's name for a `ChatArt`. The rollout says which model is behind it.

    Args:
        model: not used, nor are `model_provider` and `config_prefix`: kept so that moving over is a
            change of imports.
        configurable_fields: not supported.
        kwargs: of `ChatArt`.

    Raises:
        ConfigError: `configurable_fields` is given.
    """
    if configurable_fields is not None:
        raise ConfigError(
            "init_chat_model has no configurable fields",
            got=configurable_fields,
            expected="None",
            fix="Give each role its model: ChatArt(role=...) with rollout(..., models={...}).",
        )
    return ChatArt(**kwargs)


# --- playing


async def _play(
    runnable: Runnable[Any, Any],
    input: Any,
    config: RunnableConfig,
    context: Any,
    trajectory: Trajectory,
) -> None:
    """Run to the end; the trajectory has the last state at every moment."""
    given: dict[str, Any] = {} if context is None else {"context": context}
    if not isinstance(runnable, PregelProtocol):
        trajectory.state = await runnable.ainvoke(input, config, **given)
        return
    async for state in runnable.astream(input, config, stream_mode="values", **given):
        trajectory.state = state
        if isinstance(state, dict) and "__interrupt__" in state:
            trajectory.ended = "interrupted"


@asynccontextmanager
async def _recorded(trajectory: Trajectory, scope: Scope) -> AsyncIterator[None]:
    """Give the trajectory the calls of its scope, however the block ends."""
    try:
        yield
        await _settle(scope)
    finally:
        scope.close()
        _note_calls(trajectory, scope)


async def _settle(scope: Scope) -> None:
    """Wait for responses that a consumer left and the loop is about to close."""
    for _ in range(50):
        if not scope.open_calls:
            return
        await asyncio.sleep(_SETTLE_SECONDS / 50)


def _note_calls(trajectory: Trajectory, scope: Scope) -> None:
    if not trajectory.calls:
        trajectory.calls = list(scope.calls)
    trajectory.rollout_id = scope.rollout_id
    answered = [call for call in trajectory.calls if _is_answer(call)]
    if trajectory.tools is None and answered:
        trajectory.tools = answered[-1].request.get("tools")
    if scope.incomplete:
        trajectory.metadata["incomplete"] = list(scope.incomplete)
    trajectory.finish()


# --- how it ended


def _reraise_own_cancel(error: BaseException) -> None:
    """Let a cancel of this very task travel on: whoever asked for it is waiting for it."""
    task = asyncio.current_task()
    if isinstance(error, asyncio.CancelledError) and task is not None and task.cancelling():
        raise error


def _verdict(error: BaseException, scope: Scope, *, expired: bool) -> Verdict:
    if expired:
        return Verdict("timeout", by_policy=True)
    return judge(error, answered=_answered_last(scope))


def _answered_last(scope: Scope) -> bool:
    """True if the last call to end was answered; calls that the graph itself left don't count."""
    ended = [c for c in scope.calls if _is_answer(c) or c.error not in (None, *CALLER_LEFT)]
    return bool(ended) and _is_answer(max(ended, key=lambda call: call.ended))


def _is_answer(call: ModelCall) -> bool:
    """True for a whole answer that came over our transport."""
    return call.error is None and bool(call.response)


def _ended(
    trajectory: Trajectory, verdict: Verdict | None, failure_reward: float | None
) -> Trajectory:
    if verdict is None:
        return trajectory
    trajectory.ended = verdict.ended
    if not verdict.by_policy:
        error = cast(BaseException, trajectory.exception)
        calls = len(trajectory.calls)
        raise RolloutFailure(
            f"the rollout failed ({type(error).__name__}: {error}) after {calls} calls",
            trajectory=trajectory,
            fix="The policy was not to blame, so it is not trained on; its calls are in "
            ".trajectory.",
        ) from error
    if trajectory.reward is None:
        trajectory.reward = failure_reward
    return trajectory


def _warn_without_calls(scope: Scope, handler: TrajectoryCallbackHandler) -> None:
    if scope.started_calls:
        return
    nodes = ", ".join(handler.nodes) or "none"
    others = sorted({call.model for call in scope.calls})
    what = f"the graph ended without a call to a ChatArt; nodes that ran: {nodes}"
    if others:
        what += f"; other models were called: {', '.join(others)}"
    warnings.warn(
        f"{what}. Nothing of this rollout can be trained: build the graph with ChatArt().",
        NoModelCalls,
        stacklevel=3,
    )


def _told(
    handler: TrajectoryCallbackHandler, thread_id: str, trajectory: Trajectory
) -> dict[str, Any]:
    """What the callbacks and the last state say of the run, ready for JSON."""
    told: dict[str, Any] = {"thread_id": thread_id, "nodes": list(handler.nodes)}
    if handler.tools:
        told["tools"] = [vars(run).copy() for run in handler.tools]
        for run in handler.tools:
            if run.error is not None:
                trajectory.log(f"tool {run.name} raised {run.error}")
    if trajectory.ended == "interrupted":
        interrupts = trajectory.state["__interrupt__"]
        told["interrupts"] = [{"id": i.id, "value": repr(i.value)} for i in interrupts]
    return told


def _thread_id(input: Any, config: RunnableConfig | None) -> str:
    """Fresh, unless a resume names the thread it goes on."""
    given = (config or {}).get("configurable", {}).get("thread_id")
    if given is not None and isinstance(input, Command):
        return str(given)
    return uuid.uuid4().hex
