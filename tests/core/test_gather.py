"""Gathering: concurrent, bounded, nothing lost, nothing left running."""

from __future__ import annotations

import asyncio
import io
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import AsyncIterator, Iterator

import pytest

import art_core as art
from art_core.calls import ModelCall
from art_core.capture import current_scope, open_scope
from art_core.errors import AfterEachFailed, ConfigError, TooManyFailures
from art_core.progress import LINE_INTERVAL
from tests.core.sample import make_call
from tests.stub_endpoint import completion, endpoint


@pytest.fixture(autouse=True)
async def nothing_left() -> AsyncIterator[None]:
    """No test leaves a task running."""
    yield
    assert asyncio.all_tasks() == {asyncio.current_task()}


def call_model(name: str) -> ModelCall:
    """What the transport does when a model answered: keep the call in the scope around."""
    call = make_call(record_id=name)
    scope = current_scope()
    assert scope is not None
    scope.add(call)
    return call


async def rollout(name: str, reward: float = 1.0, delay: float = 0.0) -> art.Trajectory:
    call_model(name)
    await asyncio.sleep(delay)
    return art.Trajectory(reward=reward, metadata={"name": name})


async def failing(name: str) -> art.Trajectory:
    call_model(name)
    raise ValueError(f"boom {name}")


async def endless(name: str) -> art.Trajectory:
    call_model(name)
    await asyncio.sleep(3600)
    raise AssertionError


def records(trajectory: art.Trajectory) -> list[str]:
    return [call.record_id for call in trajectory.calls]


async def test_groups_and_rollouts_keep_their_order_and_get_their_own_calls() -> None:
    groups = await art.gather_trajectory_groups(
        (
            art.TrajectoryGroup(
                rollout(f"{g}{r}", reward=r, delay=0.02 * (3 - r)) for r in range(3)
            )
            for g in "abc"
        ),
        progress=False,
    )
    assert [[records(t) for t in group] for group in groups] == [
        [[f"{g}{r}"] for r in range(3)] for g in "abc"
    ]
    assert [t.reward for t in groups[0]] == [0, 1, 2]


async def test_calls_of_a_judge_are_another_models() -> None:
    """Asked inside the rollout by a model of its own: context, and no gap in the record."""
    with endpoint([completion("good", None, prompt_ids=None)]) as hosted:
        judge: art.Model[None] = art.Model(
            name="judge", project="p", inference_base_url=hosted.base_url
        )

        async def judged() -> art.Trajectory:
            call_model("a")
            await judge.openai_client().chat.completions.create(
                model="judge", messages=[{"role": "user", "content": "good?"}]
            )
            return art.Trajectory(reward=1.0)

        (group,) = await art.gather_trajectory_groups(
            [art.TrajectoryGroup([judged()])], progress=False
        )
    (trajectory,) = group
    assert [call.left_out for call in trajectory.calls] == [None, "other model"]
    assert trajectory.completeness.is_whole


async def test_rollouts_run_side_by_side_over_groups() -> None:
    """Twelve rollouts meet at one barrier, which opens only if all of them run at once."""
    barrier = asyncio.Barrier(12)

    async def meet() -> art.Trajectory:
        async with asyncio.timeout(5):
            await barrier.wait()
        return art.Trajectory(reward=0.0)

    groups = await art.gather_trajectory_groups(
        (art.TrajectoryGroup(meet() for _ in range(4)) for _ in range(3)), progress=False
    )
    assert [len(group) for group in groups] == [4, 4, 4]


async def test_concurrency_bounds_the_rollouts_that_run() -> None:
    running = highest = 0

    async def count() -> art.Trajectory:
        nonlocal running, highest
        running += 1
        highest = max(highest, running)
        await asyncio.sleep(0.005)
        running -= 1
        return art.Trajectory(reward=0.0)

    await art.gather_trajectory_groups(
        (art.TrajectoryGroup(count() for _ in range(4)) for _ in range(3)),
        concurrency=5,
        progress=False,
    )
    assert highest == 5


async def test_a_failed_rollout_is_a_value_with_its_calls_and_its_cause() -> None:
    [group] = await art.gather_trajectory_groups(
        [art.TrajectoryGroup([rollout("good"), failing("bad")])], progress=False
    )
    assert [records(t) for t in group] == [["good"]]
    [failure] = group.exceptions
    assert isinstance(failure, art.RolloutFailure)
    assert isinstance(failure.__cause__, ValueError)
    assert failure.trajectory.exception is failure.__cause__
    assert failure.trajectory.ended == "error"
    assert records(failure.trajectory) == ["bad"]
    assert "rollout 1 of group 0" in str(failure)
    assert "ValueError: boom bad" in str(failure)
    assert [call.record_id for call in group.failed_calls()] == ["bad"]


async def test_a_failure_that_already_holds_its_trajectory_is_kept_as_it_is() -> None:
    kept = art.RolloutFailure("the engine is gone", trajectory=art.Trajectory(ended="error"))

    async def play() -> art.Trajectory:
        call_model("one")
        raise kept

    [group] = await art.gather_trajectory_groups([art.TrajectoryGroup([play()])], progress=False)
    assert group.exceptions == [kept]
    assert records(kept.trajectory) == ["one"]


async def test_something_else_than_a_trajectory_is_a_failure_that_names_the_type() -> None:
    async def play() -> int:
        call_model("one")
        return 7

    [group] = await art.gather_trajectory_groups(
        [art.TrajectoryGroup([play()])],  # type: ignore[list-item]  # the fault under test
        progress=False,
    )
    [failure] = group.exceptions
    assert "returned 7 of type int, expected an art.Trajectory" in str(failure)
    assert isinstance(failure, art.RolloutFailure)
    assert records(failure.trajectory) == ["one"]


async def test_the_time_limit_cancels_and_keeps_the_calls() -> None:
    cleaned = False

    async def play() -> art.Trajectory:
        nonlocal cleaned
        try:
            return await endless("slow")
        finally:
            cleaned = True

    begun = time.monotonic()
    [group] = await art.gather_trajectory_groups(
        [art.TrajectoryGroup([play(), rollout("quick")])], rollout_timeout=0.05, progress=False
    )
    assert time.monotonic() - begun < 2
    assert cleaned
    assert [records(t) for t in group] == [["quick"]]
    [failure] = group.exceptions
    assert isinstance(failure, art.RolloutFailure)
    assert failure.trajectory.ended == "timeout"
    assert records(failure.trajectory) == ["slow"]
    assert "limit of 0.05 s" in str(failure)


async def test_the_time_limit_starts_when_the_rollout_does() -> None:
    """Four rollouts of 0.06 s one after the other: the last waits 0.18 s for its turn."""
    [group] = await art.gather_trajectory_groups(
        [art.TrajectoryGroup(rollout(str(i), delay=0.06) for i in range(4))],
        concurrency=1,
        rollout_timeout=0.15,
        progress=False,
    )
    assert len(group) == 4


async def test_what_a_rollout_returns_at_its_time_limit_is_taken() -> None:
    async def play() -> art.Trajectory:
        call_model("one")
        try:
            await asyncio.sleep(3600)
        except asyncio.CancelledError:
            return art.Trajectory(reward=0.0, ended="timeout")
        raise AssertionError

    [group] = await art.gather_trajectory_groups(
        [art.TrajectoryGroup([play()])], rollout_timeout=0.02, progress=False
    )
    assert group.exceptions == []
    assert group.trajectories[0].ended == "timeout"
    assert records(group.trajectories[0]) == ["one"]


async def test_a_rollout_that_cancels_itself_does_not_end_the_gather() -> None:
    async def play() -> art.Trajectory:
        raise asyncio.CancelledError

    [group] = await art.gather_trajectory_groups(
        [art.TrajectoryGroup([play(), rollout("good")])], progress=False
    )
    assert len(group) == 1
    assert isinstance(group.exceptions[0], art.RolloutFailure)
    assert group.exceptions[0].trajectory.ended == "cancelled"


async def test_too_many_failures_stop_the_rest_and_keep_everything() -> None:
    with pytest.raises(TooManyFailures, match="2 of 5 rollouts failed") as caught:
        await art.gather_trajectory_groups(
            [
                art.TrajectoryGroup([rollout("good"), failing("bad0"), endless("slow")]),
                art.TrajectoryGroup([failing("bad1"), endless("slower")]),
            ],
            max_exceptions=1,
            progress=False,
        )
    first, second = caught.value.gathered
    assert [records(t) for t in first] == [["good"]]
    failures = [*first.exceptions, *second.exceptions]
    assert all(isinstance(failure, art.RolloutFailure) for failure in failures)
    ends = [f.trajectory.ended for f in failures if isinstance(f, art.RolloutFailure)]
    assert ends == ["error", "cancelled", "error", "cancelled"]
    assert [c.record_id for c in second.failed_calls()] == ["bad1", "slower"]
    assert isinstance(caught.value.__cause__, art.RolloutFailure)


@pytest.mark.parametrize(
    ("allowed", "failures", "stops"),
    [
        (0, 0, False),
        (0, 1, True),
        (2, 2, False),
        (0.2, 2, False),  # two of ten
        (0.2, 3, True),
        (0.0, 1, True),
        (1.0, 10, False),
        (None, 10, False),
    ],
)
async def test_max_exceptions_is_a_number_or_a_share(
    allowed: int | float | None, failures: int, stops: bool
) -> None:
    rollouts = [failing(str(i)) if i < failures else rollout(str(i)) for i in range(10)]
    groups = [art.TrajectoryGroup(rollouts[:5]), art.TrajectoryGroup(rollouts[5:])]
    if stops:
        with pytest.raises(TooManyFailures):
            await art.gather_trajectory_groups(groups, max_exceptions=allowed, progress=False)
    else:
        gathered = await art.gather_trajectory_groups(
            groups, max_exceptions=allowed, progress=False
        )
        assert sum(len(group.exceptions) for group in gathered) == failures


@pytest.mark.parametrize(
    "arguments",
    [
        {"max_exceptions": -1},
        {"max_exceptions": True},
        {"max_exceptions": 1.5},
        {"max_exceptions": float("nan")},
        {"concurrency": 0},
        {"concurrency": 2.5},
        {"rollout_timeout": 0},
        {"rollout_timeout": float("inf")},
        {"key": "not for a header"},
    ],
    ids=str,
)
async def test_bad_arguments_are_refused_and_the_rollouts_closed(
    arguments: dict[str, float],
) -> None:
    name = "rollout id" if "key" in arguments else next(iter(arguments))
    with pytest.raises(ConfigError, match=name):
        await art.gather_trajectory_groups([art.TrajectoryGroup([rollout("x")])], **arguments)  # type: ignore[arg-type]  # the fault under test


async def test_a_loose_trajectory_is_refused_with_the_way_out() -> None:
    with pytest.raises(ConfigError, match=r"Wrap the rollouts.*art\.TrajectoryGroup"):
        await art.gather_trajectory_groups([art.Trajectory()], progress=False)  # type: ignore[list-item]  # the fault under test


async def test_no_group_is_dropped_whatever_failed_in_it() -> None:
    groups = await art.gather_trajectory_groups(
        [
            art.TrajectoryGroup([failing("a"), failing("b")]),
            art.TrajectoryGroup([]),
            art.TrajectoryGroup([rollout("c")]),
        ],
        progress=False,
    )
    assert [(len(g), len(g.exceptions)) for g in groups] == [(0, 2), (0, 0), (1, 0)]


async def test_finished_trajectories_and_exceptions_stay_in_their_group() -> None:
    done, fault = art.Trajectory(reward=0.5), RuntimeError("earlier")
    [group] = await art.gather_trajectory_groups(
        [art.TrajectoryGroup([done, fault, rollout("new")])], max_exceptions=0, progress=False
    )
    assert group.trajectories[0] is done
    assert group.exceptions == [fault]  # counted by the gather it failed in, not by this one
    assert records(group.trajectories[1]) == ["new"]


# --- groups that are made by a coroutine


async def test_a_coroutine_may_make_the_group() -> None:
    async def scenario(name: str) -> art.TrajectoryGroup:
        await asyncio.sleep(0)
        return art.TrajectoryGroup((rollout(f"{name}{i}") for i in range(2)), metadata={"n": name})

    groups = await art.gather_trajectory_groups([scenario("a"), scenario("b")], progress=False)
    assert [[records(t) for t in g] for g in groups] == [[["a0"], ["a1"]], [["b0"], ["b1"]]]
    assert groups[1].metadata == {"n": "b"}


async def test_awaiting_a_group_inside_keeps_the_concurrency_of_the_gather() -> None:
    running = highest = 0

    async def count() -> art.Trajectory:
        nonlocal running, highest
        running += 1
        highest = max(highest, running)
        call_model(f"call{running}-{time.monotonic_ns()}")
        await asyncio.sleep(0.005)
        running -= 1
        return art.Trajectory(reward=0.0)

    async def scenario() -> art.TrajectoryGroup:
        group = await art.TrajectoryGroup(count() for _ in range(4))
        assert [len(t.calls) for t in group] == [1, 1, 1, 1]
        return group

    groups = await art.gather_trajectory_groups(
        [scenario(), scenario()], concurrency=3, progress=False
    )
    assert [len(group) for group in groups] == [4, 4]
    assert highest == 3


async def test_a_group_inside_a_rollout_does_not_wait_for_the_rollouts_own_slot() -> None:
    async def outer() -> art.Trajectory:
        inner = await art.TrajectoryGroup([rollout("inner")])
        return art.Trajectory(reward=inner.trajectories[0].reward)

    async with asyncio.timeout(5):
        [group] = await art.gather_trajectory_groups(
            [art.TrajectoryGroup([outer()])], concurrency=1, progress=False
        )
    assert [t.reward for t in group] == [1.0]


async def test_a_group_that_is_awaited_alone_is_gathered_too() -> None:
    group = art.TrajectoryGroup([rollout("a"), failing("b")])
    assert await group is group
    assert [records(t) for t in group] == [["a"]]
    assert [call.record_id for call in group.failed_calls()] == ["b"]
    assert group.pending == []


async def test_a_group_that_can_not_be_made_is_a_group_with_the_failure() -> None:
    async def broken() -> art.TrajectoryGroup:
        call_model("asked before it broke")
        raise KeyError("scenario")

    async def wrong() -> art.Trajectory:
        return art.Trajectory(reward=1.0)

    first, second = await art.gather_trajectory_groups(
        [broken(), wrong()],  # type: ignore[list-item]  # the second is the fault under test
        progress=False,
    )
    [failure] = first.exceptions
    assert isinstance(failure.__cause__, KeyError)
    assert [call.record_id for call in first.failed_calls()] == ["asked before it broke"]
    assert "expected an art.TrajectoryGroup" in str(second.exceptions[0])


async def test_a_share_of_failures_is_judged_when_every_group_is_made() -> None:
    """One of two has failed while the second group is being made: in the end it is one of ten."""

    async def late(failures: int) -> art.TrajectoryGroup:
        await asyncio.sleep(0.02)
        rollouts = [failing(str(i)) if i < failures else rollout(str(i)) for i in range(8)]
        return art.TrajectoryGroup(rollouts)

    def early() -> art.TrajectoryGroup:
        return art.TrajectoryGroup([failing("a"), rollout("b")])

    async def broken() -> art.TrajectoryGroup:
        raise KeyError

    await art.gather_trajectory_groups([early(), late(0)], max_exceptions=0.1, progress=False)
    with pytest.raises(TooManyFailures, match="2 of 10 rollouts failed"):
        await art.gather_trajectory_groups([early(), late(1)], max_exceptions=0.1, progress=False)
    with pytest.raises(TooManyFailures, match="2 of 11 rollouts failed"):  # broken() counts as one
        await art.gather_trajectory_groups(
            [early(), broken(), late(0)], max_exceptions=0.1, progress=False
        )
    with pytest.raises(TooManyFailures, match="1 of 2 rollouts failed"):
        await art.gather_trajectory_groups([late_empty(), early()], max_exceptions=0.4)


async def late_empty() -> art.TrajectoryGroup:
    await asyncio.sleep(0.02)
    return art.TrajectoryGroup([])


async def test_calls_of_trajectories_played_in_one_scope_are_not_guessed() -> None:
    async def alone() -> art.TrajectoryGroup:
        return art.TrajectoryGroup([await rollout("only")])

    async def mixed() -> art.TrajectoryGroup:
        return art.TrajectoryGroup(await asyncio.gather(rollout("x"), rollout("y")))

    first, second = await art.gather_trajectory_groups([alone(), mixed()], progress=False)
    assert records(first.trajectories[0]) == ["only"]
    assert [records(t) for t in second] == [[], []]
    assert "2 calls were captured that can't be told apart" in second.logs[0]


# --- after_each


async def test_after_each_may_be_sync_or_async_and_drop_or_split_a_group() -> None:
    def judge(group: art.TrajectoryGroup) -> art.TrajectoryGroup | list[art.TrajectoryGroup] | None:
        name = group.metadata["name"]
        if name == "drop":
            return None
        if name == "split":
            return [art.TrajectoryGroup([t]) for t in group]
        for trajectory in group:
            trajectory.reward = 0.25
        return group

    async def judge_async(group: art.TrajectoryGroup) -> object:
        await asyncio.sleep(0)
        return judge(group)

    for after_each in (judge, judge_async):
        groups = await art.gather_trajectory_groups(
            [
                art.TrajectoryGroup([rollout("a"), rollout("b")], metadata={"name": name})
                for name in ("keep", "drop", "split")
            ],
            after_each=after_each,  # type: ignore[arg-type]  # both kinds in one loop
            progress=False,
        )
        assert [len(group) for group in groups] == [2, 1, 1]
        assert [t.reward for t in groups[0]] == [0.25, 0.25]


@pytest.mark.parametrize("answer", [None, 7], ids=["raises", "returns a number"])
async def test_a_fault_of_after_each_loses_nothing(answer: int | None) -> None:
    def judge(group: art.TrajectoryGroup) -> object:
        if answer is None:
            raise RuntimeError("no judge")
        return answer

    with pytest.raises(AfterEachFailed, match="after_each failed on group 1") as caught:
        await art.gather_trajectory_groups(
            [art.TrajectoryGroup([endless("slow")]), art.TrajectoryGroup([rollout("good")])],
            after_each=judge,  # type: ignore[arg-type]  # the fault under test
            progress=False,
        )
    assert isinstance(caught.value.__cause__, RuntimeError if answer is None else TypeError)
    first, second = caught.value.gathered
    assert [call.record_id for call in first.failed_calls()] == ["slow"]
    assert [records(t) for t in second] == [["good"]]


# --- cancelling


async def test_cancelling_the_gather_ends_every_rollout_and_keeps_what_is_done() -> None:
    ended: list[str] = []

    async def play(name: str) -> art.Trajectory:
        try:
            return await endless(name)
        finally:
            await asyncio.sleep(0.01)  # takes its time to clean up
            ended.append(name)

    group = art.TrajectoryGroup([rollout("done"), play("a"), play("b")])
    never = [art.TrajectoryGroup([rollout("never started")]) for _ in range(3)]
    task = asyncio.create_task(
        art.gather_trajectory_groups([group, *never], concurrency=2, progress=False)
    )
    await asyncio.sleep(0.05)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert sorted(ended) == ["a", "b"]
    assert [records(t) for t in group] == [["done"]]
    assert {call.record_id for call in group.failed_calls()} == {"a", "b"}


async def test_a_fault_of_the_iterable_closes_the_rollouts_before_it() -> None:
    """A coroutine that is never awaited would be a RuntimeWarning, here an error."""

    def scenarios() -> Iterator[art.TrajectoryGroup]:
        yield art.TrajectoryGroup([rollout("a")])
        raise LookupError("no more scenarios")

    with pytest.raises(LookupError):
        await art.gather_trajectory_groups(scenarios(), progress=False)


def test_a_fault_while_a_group_is_built_closes_the_rollouts_before_it() -> None:
    def rollouts() -> Iterator[object]:
        yield rollout("a")
        raise LookupError("no more rollouts")

    with pytest.raises(LookupError):
        art.TrajectoryGroup(rollouts())  # type: ignore[arg-type]  # yields what it should


@pytest.mark.skipif(os.name == "nt", reason="not on this platform: sends a Unix signal")
def test_ctrl_c_leaves_no_task_and_no_complaint() -> None:
    script = textwrap.dedent("""
        import asyncio, signal, sys
        import art_core as art

        signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's "&" ignores it

        async def rollout():
            try:
                await asyncio.sleep(3600)
            finally:
                await asyncio.sleep(0.01)
                print("cleaned", flush=True)

        async def main():
            print("ready", flush=True)
            groups = [art.TrajectoryGroup(rollout() for _ in range(3)) for _ in range(2)]
            await art.gather_trajectory_groups(groups, concurrency=4)

        try:
            asyncio.run(main())
        except KeyboardInterrupt:
            sys.exit(130)
    """)
    process = subprocess.Popen(
        [sys.executable, "-X", "dev", "-W", "error::RuntimeWarning", "-c", script],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    time.sleep(0.1)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=20)
    assert process.returncode == 130
    assert out == "cleaned\n" * 4
    assert err == ""


# --- the scope, ids and threads of a rollout


async def test_each_rollout_has_an_id_that_is_the_same_in_a_repeated_run() -> None:
    async def ids(key: str | None) -> list[list[str | None]]:
        groups = await art.gather_trajectory_groups(
            (art.TrajectoryGroup(rollout(f"{g}{r}") for r in range(2)) for g in range(2)),
            key=key,
            progress=False,
        )
        return [[t.rollout_id for t in group] for group in groups]

    assert await ids("run/3") == [["run/3.0.0", "run/3.0.1"], ["run/3.1.0", "run/3.1.1"]]
    first, second = await ids(None), await ids(None)
    assert {*first[0], *first[1]}.isdisjoint({*second[0], *second[1]})
    with open_scope("outer"):
        assert (await ids(None))[1] == ["outer.0.1.0", "outer.0.1.1"]
    first_try, second_try = await asyncio.gather(ids("k"), ids("k"), return_exceptions=True)
    assert first_try == [["k.0.0", "k.0.1"], ["k.1.0", "k.1.1"]]
    assert isinstance(second_try, ConfigError)  # two rollouts may not have one id at a time


async def test_threads_of_a_rollout_are_as_many_as_rollouts_and_see_its_scope() -> None:
    """Forty blocking nodes meet at one barrier: the usual executor has at most 32 threads."""
    barrier = threading.Barrier(40)

    def node(name: str) -> None:
        barrier.wait(timeout=10)
        call_model(name)

    async def play(name: str) -> art.Trajectory:
        await asyncio.get_running_loop().run_in_executor(None, node, name)
        return art.Trajectory(reward=0.0)

    groups = await art.gather_trajectory_groups(
        (art.TrajectoryGroup(play(f"{g}-{r}") for r in range(8)) for g in range(5)),
        concurrency=40,
        progress=False,
    )
    assert [records(t) for t in groups[4]] == [[f"4-{r}"] for r in range(8)]


async def test_the_executor_of_before_is_put_back_when_the_last_gather_ends() -> None:
    from concurrent.futures import ThreadPoolExecutor

    loop = asyncio.get_running_loop()
    own = ThreadPoolExecutor(1, thread_name_prefix="own")
    loop.set_default_executor(own)

    def thread_name() -> str:
        return threading.current_thread().name

    async def play(delay: float, names: list[str]) -> art.Trajectory:
        await asyncio.sleep(delay)
        names.append(await loop.run_in_executor(None, thread_name))
        return art.Trajectory(reward=0.0)

    short: list[str] = []
    long: list[str] = []
    await asyncio.gather(
        art.gather_trajectories([play(0.0, short)], progress=False, concurrency=1),
        art.gather_trajectories([play(0.05, long)], progress=False, concurrency=1),
    )
    assert short[0].startswith("art-rollout")
    assert long[0].startswith("art-rollout")
    assert (await loop.run_in_executor(None, thread_name)).startswith("own")


async def test_duration_and_tokens_are_measured() -> None:
    [group] = await art.gather_trajectory_groups(
        [art.TrajectoryGroup([rollout("a", delay=0.05)])], progress=False
    )
    [trajectory] = group
    assert 0.05 <= trajectory.metrics["duration"] < 2
    assert trajectory.metrics["completion_tokens"] == 3  # make_call samples three


# --- gather_trajectories, trajectory_group_batches


async def test_gather_trajectories_keeps_the_order_and_the_failures() -> None:
    first, second, third = await art.gather_trajectories(
        [rollout("a", delay=0.02), failing("b"), rollout("c")], progress=False
    )
    assert isinstance(first, art.Trajectory)
    assert records(first) == ["a"]
    assert isinstance(second, art.RolloutFailure)
    assert isinstance(third, art.Trajectory)


async def test_batches_are_played_ahead_and_given_out_in_order() -> None:
    started: list[int] = []

    async def play(number: int) -> art.Trajectory:
        started.append(number)
        return art.Trajectory(reward=float(number))

    def endless_groups() -> Iterator[art.TrajectoryGroup]:
        number = 0
        while True:
            yield art.TrajectoryGroup([play(number)])
            number += 1

    batches = art.trajectory_group_batches(
        endless_groups(), batch_size=2, max_concurrent_batches=2, skip_batches=1, progress=False
    )
    rewards = []
    async for batch in batches:
        rewards.append([group.trajectories[0].reward for group in batch])
        await asyncio.sleep(0.01)  # trains; meanwhile two more batches are played, and not three
        if len(rewards) == 2:
            break
    await batches.aclose()  # type: ignore[attr-defined]  # async generators have it
    assert rewards == [[2.0, 3.0], [4.0, 5.0]]  # batch 0 (0, 1) was skipped
    assert sorted(started) == [2, 3, 4, 5, 6, 7]


async def test_the_last_batch_may_be_smaller_and_faults_are_raised() -> None:
    sizes = [
        len(batch)
        async for batch in art.trajectory_group_batches(
            (art.TrajectoryGroup([rollout(str(i))]) for i in range(5)), batch_size=2, progress=False
        )
    ]
    assert sizes == [2, 2, 1]
    with pytest.raises(TooManyFailures):
        async for _ in art.trajectory_group_batches(
            (art.TrajectoryGroup([failing(str(i))]) for i in range(6)),
            batch_size=2,
            max_batch_exceptions=0,
            progress=False,
        ):
            pass


# --- what is shown


async def test_lines_are_few_and_plain_where_there_is_no_terminal(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = Clock(step=1.0)
    monkeypatch.setattr(time, "monotonic", clock)
    await art.gather_trajectory_groups(
        (
            art.TrajectoryGroup(
                [rollout(f"{g}{r}", reward=r) for r in range(4)] + [failing(f"{g}x")]
            )
            for g in range(10)
        ),
        pbar_desc="play [bold]",
    )
    out, err = capfd.readouterr()
    assert out == ""
    assert "\r" not in err
    assert "\x1b" not in err
    lines = err.splitlines()
    assert 2 <= len(lines) <= 1 + clock.now / LINE_INTERVAL
    # mean of 0, 1, 2, 3; 50 calls of 3 tokens; one failure a group
    assert lines[-1].startswith("play [bold]: 50/50  reward 1.500  150 tokens  10 failed  ")


async def test_rewards_set_by_after_each_are_shown(capfd: pytest.CaptureFixture[str]) -> None:
    async def unrewarded() -> art.Trajectory:
        return art.Trajectory(metrics={"steps": 4})

    def judge(group: art.TrajectoryGroup) -> art.TrajectoryGroup:
        for trajectory in group:
            trajectory.reward = 0.5
        return group

    await art.gather_trajectory_groups(
        [art.TrajectoryGroup([unrewarded(), unrewarded()])], after_each=judge, max_metrics=1
    )
    assert "reward 0.500  0 tokens  0 failed  steps 4.000" in capfd.readouterr().err


async def test_silence(capfd: pytest.CaptureFixture[str]) -> None:
    await art.gather_trajectories([rollout("a")], progress=False)
    assert capfd.readouterr() == ("", "")


async def test_a_closed_stderr_is_no_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    closed = io.StringIO()
    closed.close()
    monkeypatch.setattr(sys, "stderr", closed)
    assert len(await art.gather_trajectories([rollout("a")])) == 1
    monkeypatch.setattr(sys, "stderr", None)
    assert len(await art.gather_trajectories([rollout("a")])) == 1


@pytest.mark.skipif(os.name == "nt", reason="not on this platform: needs a pseudo-terminal")
@pytest.mark.parametrize(
    ("settings", "live"),
    [
        ({"TERM": "xterm"}, True),
        ({"TERM": "xterm", "NO_COLOR": "1"}, True),
        ({"TERM": "dumb"}, False),
        ({"TERM": "xterm", "CI": "true"}, False),
        ({"TERM": "xterm", "COLUMNS": "20"}, True),
    ],
    ids=str,
)
def test_a_terminal_gets_a_bar(settings: dict[str, str], live: bool) -> None:
    import pty

    script = textwrap.dedent("""
        import asyncio
        import art_core as art

        async def rollout(reward):
            return art.Trajectory(reward=reward)

        asyncio.run(art.gather_trajectory_groups(
            [art.TrajectoryGroup(rollout(r) for r in (0.0, 1.0))], pbar_desc="play [/foo]"))
    """)
    leader, follower = pty.openpty()
    keep = {k: v for k, v in os.environ.items() if k not in ("CI", "NO_COLOR", "COLUMNS", "TERM")}
    process = subprocess.Popen(
        [sys.executable, "-c", script], stderr=follower, env={**keep, **settings}
    )
    os.close(follower)
    shown = b""
    while True:
        try:
            data = os.read(leader, 4096)
        except OSError:  # Linux says so at the end
            break
        if not data:
            break
        shown += data
    os.close(leader)
    assert process.wait(timeout=20) == 0
    assert (b"\x1b[" in shown) == live
    assert b"Traceback" not in shown
    if settings.get("COLUMNS") != "20":
        assert b"play [/foo]" in shown
        assert b"reward 0.500" in shown
    if "NO_COLOR" in settings:
        assert b"\x1b[3" not in shown


class Clock:
    """A monotonic clock that moves at every look."""

    def __init__(self, step: float) -> None:
        self.now, self.step = 0.0, step

    def __call__(self) -> float:
        self.now += self.step
        return self.now
