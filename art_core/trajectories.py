"""`Trajectory` and `TrajectoryGroup`: the calls of a run, its reward, and how it ended.

In: calls captured during a rollout, and what the user's reward says of it. Out: records that
`model.train` takes. A class call always gives an instance of that class: a group built from
awaitables is a group with pending rollouts, awaited by `gather_trajectory_groups` or `await group`.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import (
    AsyncIterator,
    Awaitable,
    Coroutine,
    Generator,
    Iterable,
    Iterator,
)
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any, Literal, SupportsFloat, TypeAlias

from pydantic import BaseModel, ConfigDict, Field, SkipValidation

from art_core.calls import ModelCall
from art_core.completeness import Completeness, completeness_of
from art_core.errors import RewardError, RolloutFailure
from art_core.histories import chains, is_sample, items
from art_core.types import Choice, Message, Messages, MessagesAndChoices, Tools

Ended: TypeAlias = Literal[
    "completed",
    "recursion_limit",
    "interrupted",
    "error",
    "timeout",
    "cancelled",
    "context_overflow",
]
"""How a rollout ended. All but "cancelled" can be the policy's own doing."""


class History(BaseModel):
    """One conversation beside the main one (a sub-agent, a parallel node)."""

    model_config = ConfigDict(arbitrary_types_allowed=True)

    messages_and_choices: SkipValidation[MessagesAndChoices] = Field(default_factory=list)
    tools: Tools | None = None


class Trajectory(BaseModel):
    """One rollout: every LLM call it made, its reward and how it ended.

    If `messages_and_choices` (or a history) holds `Choice` items, exactly the calls they came
    from are trained; otherwise every captured call of the trained model is.
    """

    model_config = ConfigDict(arbitrary_types_allowed=True)

    messages_and_choices: SkipValidation[MessagesAndChoices] = Field(default_factory=list)
    tools: Tools | None = None
    additional_histories: list[History] = Field(default_factory=list)
    reward: float | None = None
    """None means not yet set; training refuses it."""
    metrics: dict[str, float | int | bool] = Field(default_factory=dict)
    """Named parts of the reward and other figures, averaged per step in the run folder."""
    metadata: dict[str, Any] = Field(default_factory=dict)
    logs: list[str] = Field(default_factory=list)
    calls: SkipValidation[list[ModelCall]] = Field(default_factory=list, repr=False)
    """Every call captured in the rollout, in the order they were started."""
    ended: Ended = "completed"
    state: Any = Field(default=None, repr=False)
    """The last state that the graph reached."""
    exception: SkipValidation[BaseException | None] = None
    """What ended the rollout, where `ended` is not "completed"."""
    rollout_id: str | None = None
    start_time: float = Field(default_factory=time.time)
    """Seconds since the epoch."""

    def add_reward(
        self,
        reward: float,
        *,
        call: ModelCall | None = None,
        node: str | None = None,
        visit: int | None = None,
    ) -> None:
        """Reward single calls, beside `reward`, which counts for all calls of the trajectory.

        Rewards of one call add up; a node's counts whole for each of its calls. How they become
        advantages is set by `TrainConfig.call_rewards` and `call_baseline`.

        Args:
            reward: a finite number.
            call: one of `calls`.
            node: instead: the calls that came from this node of the graph, or from a subgraph in
                it; "researcher/model" is the node "model" of the subgraph "researcher".
            visit: of these only the n-th, counted from 1.

        Raises:
            RewardError: the reward is not finite, or no call is meant.
        """
        value = number_of(reward)
        if value is None or not math.isfinite(value):
            raise RewardError("reward of a call", got=reward, expected="a finite number")
        if (call is None) == (node is None):
            raise RewardError("a reward for no call", expected="either call= or node=")
        if call is not None:
            meant = [i for i, one in enumerate(self.calls) if one.key == call.key]
        else:
            meant = [i for i, one in enumerate(self.calls) if one.origin.is_in(str(node))]
        if visit is not None:
            meant = meant[visit - 1 : visit] if visit > 0 else []
        if not meant:
            raise RewardError(
                "a reward for a call that was not made",
                got=call.key if call is not None else (node, visit),
                expected=f"a call from one of {sorted({str(c.origin) for c in self.calls})}",
                fix="Look at trajectory.calls.",
            )
        for i in meant:
            before = self.calls[i].reward or 0.0
            self.calls[i] = replace(self.calls[i], reward=before + value)

    def log(self, message: str) -> None:
        """Keep a line of text with the trajectory."""
        self.logs.append(message)

    def finish(self) -> Trajectory:
        """Set `metrics["duration"]` (seconds since `start_time`) and return self."""
        self.metrics.setdefault("duration", max(0.0, time.time() - self.start_time))
        return self

    @asynccontextmanager
    async def track_duration(self, name: str) -> AsyncIterator[None]:
        """Add the seconds spent inside to `metrics["<name>_duration"]`."""
        begun = time.monotonic()
        try:
            yield
        finally:
            key = f"{name}_duration"
            self.metrics[key] = self.metrics.get(key, 0.0) + time.monotonic() - begun

    def messages(self) -> Messages:
        """The main conversation as plain OpenAI messages.

        From `messages_and_choices` if the user filled it, else from the last answered call.
        """
        if self.messages_and_choices:
            return [as_message(item) for item in self.messages_and_choices]
        if not self.calls:
            return []
        answered = [call for call in self.calls if call.error is None]
        if not answered:
            return self.calls[-1].messages
        return [*answered[-1].messages, answered[-1].message]

    def chosen_records(self) -> set[tuple[str, int]] | None:
        """Keys of the calls that the user picked by keeping their Choice; None if none was kept."""
        items = [*self.messages_and_choices]
        for history in self.additional_histories:
            items.extend(history.messages_and_choices)
        keys = {choice_key(item) for item in items if isinstance(item, Choice)}
        return keys or None

    def tell_histories(self) -> None:
        """Fill `messages_and_choices` and `additional_histories` from the calls.

        Each sampled choice of the policy is in exactly one of them, once; what the user put there
        before is replaced. Conversations of other models only are left out where the policy said
        anything.
        """
        told = chains(self.calls)
        own = [chain for chain in told if any(map(is_sample, chain))] or told[:1]
        histories = [
            History(messages_and_choices=items(c), tools=c[-1].request.get("tools")) for c in own
        ]
        main = histories[0] if histories else History()
        self.messages_and_choices, self.tools = main.messages_and_choices, main.tools or self.tools
        self.additional_histories = histories[1:]

    @property
    def completeness(self) -> Completeness:
        """What of this rollout can be trained, and what was left out, by cause; printable."""
        notes = self.metadata.get("incomplete", ())
        return completeness_of(self.calls, self.chosen_records(), notes)

    @property
    def completion_tokens(self) -> int:
        """Sampled tokens over all captured calls."""
        return sum(len(c.sampled_ids) for c in self.calls if c.sampled_ids is not None)

    def for_logging(self) -> dict[str, Any]:
        """A JSON-ready view for humans and files."""
        return {
            "reward": self.reward,
            "ended": self.ended,
            "metrics": self.metrics,
            "metadata": self.metadata,
            "messages": self.messages(),
            "tools": self.tools,
            "logs": self.logs,
        }


def choice_key(choice: Choice) -> tuple[str, int]:
    """(record id, choice index) that our endpoint wrote into the choice; ("", index) if foreign."""
    extra = choice.model_extra or {}
    return (str(extra.get("art_record_id") or ""), choice.index)


def as_message(item: Message | Choice) -> Message:
    """A history item as an OpenAI message."""
    if isinstance(item, Choice):
        return item.message.model_dump(exclude_none=True)
    return item


def number_of(reward: Any) -> float | None:
    """What the user assigned as a number, be it bool, NumPy's or a tensor of one element.

    None: it is no number. Beyond what a float can hold it is infinite.
    """
    if not isinstance(reward, float | int | SupportsFloat):  # a protocol alone is slow to ask
        return None
    try:
        return float(reward)
    except OverflowError:
        return math.inf
    except (TypeError, ValueError, RuntimeError):  # an array of several
        return None


Rollout: TypeAlias = Trajectory | BaseException | Awaitable[Trajectory]


class TrajectoryGroup:
    """The rollouts of one scenario, whose rewards are compared with each other.

    Failed rollouts are values in `exceptions`, not raised.

    Args:
        rollouts: trajectories, exceptions, or awaitables of trajectories, mixed at will.
        metadata: kept with the group.
    """

    def __init__(
        self,
        rollouts: Iterable[Rollout] = (),
        *,
        exceptions: Iterable[BaseException] = (),
        metadata: dict[str, Any] | None = None,
        metrics: dict[str, float | int | bool] | None = None,
        logs: list[str] | None = None,
    ) -> None:
        self.trajectories: list[Trajectory] = []
        self.exceptions: list[BaseException] = list(exceptions)
        self.pending: list[Awaitable[Trajectory]] = []
        self.metadata: dict[str, Any] = metadata or {}
        self.metrics: dict[str, float | int | bool] = metrics or {}
        self.logs: list[str] = logs or []
        try:
            for rollout in rollouts:
                self.add(rollout)
        except BaseException:
            discard(self)
            raise

    def add(self, rollout: Rollout) -> None:
        """Add a trajectory, a failure or a pending rollout."""
        if isinstance(rollout, Trajectory):
            self.trajectories.append(rollout)
        elif isinstance(rollout, BaseException):
            self.exceptions.append(rollout)
        elif isinstance(rollout, Awaitable):
            self.pending.append(rollout)
        else:
            raise TypeError(
                f"a group takes a Trajectory, an exception or an awaitable, got {rollout!r}. "
                "Return an art.Trajectory from the rollout function."
            )

    def __iter__(self) -> Iterator[Trajectory]:
        return iter(self.trajectories)

    def __len__(self) -> int:
        return len(self.trajectories)

    def __repr__(self) -> str:
        return (
            f"TrajectoryGroup({len(self.trajectories)} trajectories, "
            f"{len(self.exceptions)} exceptions, {len(self.pending)} pending)"
        )

    def __await__(self) -> Generator[Any, Any, TrajectoryGroup]:
        return self._settle().__await__()

    async def _settle(self) -> TrajectoryGroup:
        """Play the pending rollouts side by side; failures become values."""
        from art_core.gather import settle  # the one import upward: awaiting a group is a gather

        await settle(self)
        return self

    def failed_calls(self) -> list[ModelCall]:
        """Calls of the failed rollouts; nothing that was sampled is lost."""
        return [
            call
            for failure in self.exceptions
            if isinstance(failure, RolloutFailure)
            for call in failure.trajectory.calls
        ]


def discard(source: object) -> None:
    """Close a rollout, or a group's pending ones, that will never be awaited."""
    if isinstance(source, TrajectoryGroup):
        for rollout in source.pending:
            discard(rollout)
    elif isinstance(source, Coroutine):
        source.close()
    elif isinstance(source, asyncio.Future):
        source.cancel()
