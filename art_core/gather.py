"""Many rollouts side by side: concurrent, bounded, watched, with failures kept as values.

In: groups of pending rollouts, or awaitables that make groups. Out: the same groups in the same
order, every rollout a trajectory or a `RolloutFailure`. No group is dropped, whatever failed in it,
so that groups and scenarios can be zipped; `train` skips empty ones by name. Left out: one
rollout's own life (awaited_rollout.py), and training.
"""

from __future__ import annotations

import asyncio
import inspect
import math
from collections.abc import (
    AsyncIterator,
    Awaitable,
    Callable,
    Iterable,
    Iterator,
    Sequence,
)
from contextlib import nullcontext
from contextvars import ContextVar
from dataclasses import dataclass, field
from itertools import count, islice
from typing import Any, TypeAlias, cast

from art_core.awaited_rollout import make_group, play
from art_core.capture import open_scope
from art_core.errors import AfterEachFailed, ConfigError, RolloutFailure, TooManyFailures
from art_core.executor import wide_executor
from art_core.progress import Display
from art_core.progress import progress as open_display
from art_core.tally import Tally
from art_core.trajectories import Trajectory, TrajectoryGroup, discard

GroupSource: TypeAlias = TrajectoryGroup | Awaitable[TrajectoryGroup]
"""A group with pending rollouts, or a coroutine that makes a group."""
Kept: TypeAlias = TrajectoryGroup | Sequence[TrajectoryGroup] | None
AfterEach: TypeAlias = Callable[[TrajectoryGroup], Kept | Awaitable[Kept]]


async def gather_trajectory_groups(
    groups: Iterable[GroupSource],
    *,
    pbar_desc: str = "gather",
    pbar_total_completion_tokens: bool | None = None,
    max_exceptions: int | float | None = None,
    max_metrics: int | None = None,
    after_each: AfterEach | None = None,
    concurrency: int | None = None,
    rollout_timeout: float | None = None,
    progress: bool | None = None,
    key: str | None = None,
) -> list[TrajectoryGroup]:
    """Play every pending rollout of `groups`.

    Args:
        groups: taken wholly before the first rollout starts.
        pbar_desc: what the progress display calls this.
        pbar_total_completion_tokens: ART's, without effect; tokens are always shown.
        max_exceptions: how many rollouts may fail: a number, or as a float a share of all; None:
            any number. Failed ones are `RolloutFailure`s in `group.exceptions`, with their calls.
        max_metrics: how many of the trajectories' own metrics the display shows; None means none.
        after_each: called with each group when its rollouts are through, e.g. to judge them;
            returns the group, several groups in its place, or None to drop it.
        concurrency: rollouts that run at once; None means all. The loop's default executor is made
            as wide meanwhile (see `executor.wide_executor`).
        rollout_timeout: seconds a rollout may run once it has started; see `rollouts.play`.
        progress: False is silent. Otherwise a bar on a terminal, elsewhere lines on stderr, at most
            one in 10 s.
        key: names the rollouts: number r of group g has the id "<key>.<g>.<r>", which keys the
            sampling noise. None: derived from the scope around, else random.

    Raises:
        ConfigError: an argument can't work, or a gather with this key is running.
        TooManyFailures: `max_exceptions` is passed; the rest is cancelled, and what was gathered is
            in `error.gathered`.
        AfterEachFailed: likewise.
    """
    sources: list[GroupSource] = []
    try:
        sources.extend(groups)  # if the iterable breaks off, those before are kept and closed
        allowed = _Allowed.of(max_exceptions)
        _check_positive("concurrency", concurrency, whole=True)
        _check_positive("rollout_timeout", rollout_timeout)
        checked = [_checked(source) for source in sources]
        with open_display(pbar_desc, shown=progress is not False) as display:
            with wide_executor(concurrency), open_scope(key) as scope:
                run = _Run(
                    sources=checked,
                    key=scope.rollout_id,
                    allowed=allowed,
                    after_each=after_each,
                    slots=asyncio.Semaphore(concurrency) if concurrency else None,
                    timeout=rollout_timeout,
                    display=display,
                    max_metrics=max_metrics or 0,
                )
                return await run.all()
    finally:
        for source in sources:
            discard(source)


async def gather_trajectories(
    trajectories: Iterable[Awaitable[Trajectory]],
    *,
    pbar_desc: str = "gather",
    max_exceptions: int | float | None = None,
    concurrency: int | None = None,
    rollout_timeout: float | None = None,
    progress: bool | None = None,
    key: str | None = None,
) -> list[Trajectory | RolloutFailure]:
    """Play rollouts that belong to no group; the results stand in the order given.

    Arguments and errors are those of `gather_trajectory_groups`.
    """
    groups = await gather_trajectory_groups(
        (TrajectoryGroup([rollout]) for rollout in trajectories),
        pbar_desc=pbar_desc,
        max_exceptions=max_exceptions,
        concurrency=concurrency,
        rollout_timeout=rollout_timeout,
        progress=progress,
        key=key,
    )
    results = [[*group.trajectories, *group.exceptions][0] for group in groups]
    return cast(list[Trajectory | RolloutFailure], results)  # `play` returns nothing else


async def trajectory_group_batches(
    groups: Iterable[GroupSource],
    *,
    batch_size: int,
    max_batch_exceptions: int | float | None = None,
    max_concurrent_batches: int = 4,
    skip_batches: int = 0,
    pbar_desc: str = "batches",
    after_each: AfterEach | None = None,
    concurrency: int | None = None,
    rollout_timeout: float | None = None,
    progress: bool | None = None,
) -> AsyncIterator[list[TrajectoryGroup]]:
    """Gather `groups` batch by batch, playing the next ones while the caller trains on one.

    Args:
        groups: taken as batches start, so it may be endless.
        batch_size: groups a batch; the last may be smaller.
        max_batch_exceptions: `max_exceptions` of each batch.
        max_concurrent_batches: batches that are played or wait to be taken. The policy that plays a
            batch can be this many steps older than the one that is trained on it, so keep it at or
            below `TrainConfig.max_staleness`.
        skip_batches: batches at the beginning that are not played, e.g. trained before a restart.
        pbar_desc: what the progress display calls this; it counts batches.
        after_each: as in `gather_trajectory_groups`.
        concurrency: rollouts of one batch that run at once.
        rollout_timeout: as in `gather_trajectory_groups`.
        progress: as in `gather_trajectory_groups`.

    Raises:
        As `gather_trajectory_groups`; the batches under way are then cancelled.
    """
    _check_positive("batch_size", batch_size, whole=True)
    _check_positive("max_concurrent_batches", max_concurrent_batches, whole=True)
    source = iter(groups)
    for skipped in islice(source, skip_batches * batch_size):
        discard(skipped)
    under_way: list[tuple[list[GroupSource], asyncio.Task[list[TrajectoryGroup]]]] = []

    def start_batches() -> None:
        while len(under_way) < max_concurrent_batches:
            batch = list(islice(source, batch_size))
            if not batch:
                return
            gather = gather_trajectory_groups(
                batch,
                max_exceptions=max_batch_exceptions,
                after_each=after_each,
                concurrency=concurrency,
                rollout_timeout=rollout_timeout,
                progress=False,
            )
            under_way.append((batch, asyncio.create_task(gather)))

    try:
        with open_display(pbar_desc, shown=progress is not False) as display:
            for done in count(1):
                start_batches()
                if not under_way:
                    return
                gathered = await under_way[0][1]
                del under_way[0]
                display.show(done, None, Tally.of(gathered).text())
                yield gathered
    finally:
        await _cancel([task for _, task in under_way])
        for batch, _ in under_way:
            for group in batch:
                discard(group)


async def settle(group: TrajectoryGroup) -> None:
    """Play the pending rollouts of one group: in the gather around, if there is one."""
    place = _place.get()
    if place is None:
        await gather_trajectory_groups([group], progress=False)
    else:
        await place.run.settle(group, next(place.names))


@dataclass(frozen=True)
class _Allowed:
    """How many rollouts may fail."""

    number: int | None
    share: float | None

    @classmethod
    def of(cls, given: int | float | None) -> _Allowed:
        if given is None:
            return cls(None, None)
        if type(given) is int and given >= 0:
            return cls(given, None)
        if isinstance(given, float) and 0.0 <= given <= 1.0:
            return cls(None, given)
        raise ConfigError(
            "max_exceptions",
            got=given,
            expected="a number of rollouts (int), a share from 0.0 to 1.0 (float), or None",
        )

    def passed(self, failures: int, total: int | None) -> bool:
        """True if there are too many failures among `total` rollouts (None: not known yet)."""
        if self.number is not None:
            return failures > self.number
        if self.share is None or total is None:
            return False
        return failures > self.share * total + 1e-9


@dataclass
class _Run:
    """One call of `gather_trajectory_groups`."""

    sources: list[GroupSource]
    key: str
    allowed: _Allowed
    after_each: AfterEach | None
    slots: asyncio.Semaphore | None
    timeout: float | None
    display: Display
    max_metrics: int
    tally: Tally = field(default_factory=Tally)
    last_failure: RolloutFailure | None = None
    total: int = 0
    """Rollouts of the groups that are made."""
    unmade: int = 0
    """Groups still being made; `total` will grow."""
    kept: list[list[TrajectoryGroup]] = field(default_factory=list)
    """What came of each source until now."""
    stopped: asyncio.Future[AfterEachFailed | TooManyFailures] = field(
        default_factory=lambda: asyncio.get_running_loop().create_future()
    )
    """Done when the gather has to end early."""

    async def all(self) -> list[TrajectoryGroup]:
        """Play everything, or stop early; either way no task is left."""
        self.kept = [[] for _ in self.sources]
        self.unmade = len(self.sources)
        tasks = [asyncio.create_task(self._finish(i, s)) for i, s in enumerate(self.sources)]
        everything = asyncio.gather(*tasks, return_exceptions=True)
        try:
            ends: list[asyncio.Future[Any]] = [everything, self.stopped]
            await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
        finally:
            await _cancel(tasks)
        gathered = [group for groups in self.kept for group in groups]
        if self.stopped.done():
            error = self.stopped.result()
            error.gathered = gathered
            raise error
        for task in tasks:
            task.result()
        return gathered

    async def settle(self, group: TrajectoryGroup, name: str) -> None:
        """Play the pending rollouts of `group`; cancelled, it keeps what is through by then.

        Args:
            group: takes the results.
            name: begins the rollouts' ids.
        """
        pending, group.pending = group.pending, []
        self.total += len(pending)
        results: list[Trajectory | RolloutFailure | None] = [None] * len(pending)

        async def play_one(index: int) -> None:
            async with self.slots or nullcontext():
                _place.set(None)  # a group inside a rollout must not wait for this one's slot
                results[index] = result = await play(
                    pending[index],
                    label=f"rollout {index} of group {name.removeprefix(f'{self.key}.')}",
                    rollout_id=f"{name}.{index}",
                    timeout=self.timeout,
                )
            if not _being_cancelled():
                self._count(result)

        try:
            async with asyncio.TaskGroup() as tasks:
                for index in range(len(pending)):
                    tasks.create_task(play_one(index))
        finally:
            for rollout in pending:
                discard(rollout)
            for result in results:
                if result is not None:
                    group.add(result)

    async def _finish(self, index: int, source: GroupSource) -> None:
        """Bring one group from its source to its end."""
        name = f"{self.key}.{index}"
        _place.set(_Place(self, (f"{name}:{n}" for n in count())))
        group = source if isinstance(source, TrajectoryGroup) else await self._make(index, source)
        self.kept[index] = [group]
        self.unmade -= 1
        await self.settle(group, name)
        self._check_failures()
        await self._after(index, group)

    async def _make(self, index: int, source: Awaitable[TrajectoryGroup]) -> TrajectoryGroup:
        """The group of a user's coroutine; one that fails counts as one rollout."""
        rollout_id = f"{self.key}.{index}:make"
        made = await make_group(source, label=f"group {index}", rollout_id=rollout_id)
        if isinstance(made, TrajectoryGroup):
            return made
        if not _being_cancelled():
            self.total += 1
            self._count(made)
        return TrajectoryGroup([made])

    async def _after(self, index: int, group: TrajectoryGroup) -> None:
        if self.after_each is None:
            return
        before = Tally.of([group])
        try:
            answer = self.after_each(group)
            if not isinstance(answer, TrajectoryGroup) and inspect.isawaitable(answer):
                answer = await answer
            self.kept[index] = _as_groups(answer)
        except (Exception, asyncio.CancelledError) as error:
            if _being_cancelled():
                raise
            self._stop(AfterEachFailed, f"after_each failed on group {index}", error)
        else:
            self.tally.regrade(before, Tally.of(self.kept[index]))
            self._show()

    def _count(self, result: Trajectory | RolloutFailure) -> None:
        self.tally.add(result)
        self._show()
        if isinstance(result, RolloutFailure):
            self.last_failure = result
            self._check_failures()

    def _check_failures(self) -> None:
        total = self.total if self.unmade == 0 else None
        if self.last_failure is not None and self.allowed.passed(self.tally.failures, total):
            what = f"{self.tally.failures} of {self.total} rollouts failed, more than allowed"
            self._stop(TooManyFailures, what, self.last_failure)

    def _stop(
        self, kind: type[AfterEachFailed | TooManyFailures], what: str, cause: BaseException
    ) -> None:
        if not self.stopped.done():
            fix = "Mend the cause; what was gathered is in the error's `gathered`."
            error = kind(f"{what}: {cause}", gathered=[], fix=fix)
            error.__cause__ = cause
            self.stopped.set_result(error)

    def _show(self) -> None:
        self.display.show(self.tally.done, self.total, self.tally.text(self.max_metrics))


@dataclass(frozen=True)
class _Place:
    """Where in a gather some code runs: for `await group` inside it."""

    run: _Run
    names: Iterator[str]
    """Names for the groups that are settled there."""


_place: ContextVar[_Place | None] = ContextVar("art_gather", default=None)


def _checked(source: object) -> GroupSource:
    if isinstance(source, TrajectoryGroup | Awaitable):
        return source
    raise ConfigError(
        "what gather is given",
        got=source,
        expected="TrajectoryGroups, or coroutines that return one",
        fix="Wrap the rollouts of a scenario: art.TrajectoryGroup(rollout(s) for _ in range(8)).",
    )


def _as_groups(answer: object) -> list[TrajectoryGroup]:
    if answer is None:
        return []
    groups = [answer] if isinstance(answer, TrajectoryGroup) else answer
    if isinstance(groups, list | tuple) and all(isinstance(g, TrajectoryGroup) for g in groups):
        return list(groups)
    raise TypeError(f"it returned {answer!r:.200}, expected a group, several in a list, or None")


def _check_positive(name: str, value: float | None, *, whole: bool = False) -> None:
    if value is None:
        return
    allowed = (int,) if whole else (int, float)
    if isinstance(value, bool) or not isinstance(value, allowed) or not 0 < value < math.inf:
        raise ConfigError(name, got=value, expected=f"a {'whole ' if whole else ''}number above 0")


def _being_cancelled() -> bool:
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


async def _cancel(tasks: Sequence[asyncio.Task[object]]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
