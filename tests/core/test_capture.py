"""Scopes: which rollout a call belongs to, across tasks, threads, nesting and late ends."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest

from art_core.calls import ModelCall, Origin
from art_core.capture import (
    ContextExecutor,
    Scope,
    Target,
    current_scope,
    open_scope,
    open_scopes,
    scope_by_id,
)
from art_core.errors import ConfigError


def made(record_id: str, choice_index: int = 0) -> ModelCall:
    return ModelCall(record_id, "agent", 3, {"messages": []}, {}, "stop", choice_index=choice_index)


def names(scope: Scope) -> list[str]:
    return [call.record_id for call in scope.calls]


TARGET = Target("http://127.0.0.1:1/v1", "secret-key", "agent@3")


def test_a_scope_is_found_by_context_and_by_id_while_it_is_open() -> None:
    assert current_scope() is None
    with open_scope("r1") as scope:
        assert current_scope() is scope
        assert scope_by_id("r1") is scope
        assert open_scopes() == [scope]
    assert current_scope() is None
    assert scope_by_id("r1") is None
    assert scope.closed


def test_calls_stand_in_the_order_they_were_started() -> None:
    with open_scope() as scope:
        first, second = scope.begin(), scope.begin()
        scope.add(made("second"), second)
        scope.add(made("first", 1), first)
        scope.add(made("first", 0), first)
    assert [call.key for call in scope.calls] == [("first", 0), ("first", 1), ("second", 0)]


def test_a_replay_is_no_second_sample() -> None:
    with open_scope() as scope:
        scope.add(made("r"))
        scope.add(made("r"))
    assert [call.left_out for call in scope.calls] == [None, "cache replay"]
    assert len({call.key for call in scope.calls}) == 2
    assert scope.incomplete == []


def test_a_run_that_two_handlers_tell_of_is_one_call() -> None:
    told = replace(made("local-1"), origin=Origin(run_id="run"))
    with open_scope() as outer, open_scope() as inner:
        inner.add(told)
        outer.add(told)
    for scope in (outer, inner):
        assert [(c.record_id, c.left_out) for c in scope.calls] == [("local-1", None)]


def test_a_scope_around_knows_the_runs_that_were_sent_inside() -> None:
    with open_scope() as outer, open_scope() as inner:
        inner.begin(run_id="run")
    assert outer.saw_run("run")
    assert not outer.saw_run("another")


def test_a_reason_is_noted_once() -> None:
    with open_scope() as scope:
        for _ in range(3):
            scope.note("why")
    assert scope.incomplete == ["why"]


def test_what_a_scope_inside_records_the_one_around_has_too() -> None:
    with open_scope("outer", {None: TARGET}) as outer:
        with open_scope() as inner:
            assert inner.rollout_id == "outer.0"
            assert inner.target() is TARGET
            inner.add(made("a"))
        with open_scope() as second:
            assert second.rollout_id == "outer.1"
        outer.add(made("b"))
    assert (names(inner), names(outer)) == (["a"], ["a", "b"])


def test_a_role_without_a_target_takes_the_default_one() -> None:
    other = Target("http://127.0.0.1:2/v1", "k", "judge")
    with open_scope(None, {None: TARGET, "judge": other}) as scope:
        assert scope.target("judge") is other
        assert scope.target("planner") is TARGET
    with open_scope(None, {"judge": other}) as scope:
        assert scope.target("planner") is None


def test_calls_still_open_at_the_end_are_recorded_as_broken_off() -> None:
    class Left:
        def __init__(self, scope: Scope) -> None:
            self.scope = scope
            self.place = scope.begin(self)

        def finish(self, error: str | None = None) -> None:
            self.scope.end(self)
            self.scope.add(made(f"left: {error}"), self.place)

    with open_scope() as scope:
        Left(scope)
        assert scope.open_calls == 1
    assert scope.open_calls == 0
    assert names(scope) == ["left: the rollout ended while this call was open"]


def test_a_call_that_ends_after_its_rollout_is_left_out_and_said(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with open_scope() as scope:
        pass
    scope.add(made("late"))
    assert scope.calls == []
    assert "'late'" in scope.incomplete[0]
    assert "after its rollout" in caplog.text


async def test_tasks_side_by_side_have_scopes_of_their_own() -> None:
    async def play(name: str) -> list[str]:
        with open_scope(name) as scope:
            await asyncio.sleep(0)
            here = current_scope()
            assert here is scope
            here.add(made(f"{name}-call"))
            return names(scope)

    played = await asyncio.gather(*(play(f"r{i}") for i in range(20)))
    assert played == [[f"r{i}-call"] for i in range(20)]


async def test_a_context_executor_keeps_the_scope_where_a_plain_pool_loses_it() -> None:
    loop = asyncio.get_running_loop()
    with ContextExecutor(1) as keeping, ThreadPoolExecutor(1) as plain, open_scope() as scope:
        assert await loop.run_in_executor(keeping, current_scope) is scope
        assert keeping.submit(current_scope).result() is scope
        assert list(keeping.map(lambda _: current_scope(), range(3))) == [scope] * 3
        assert await loop.run_in_executor(plain, current_scope) is None


def test_threads_may_add_at_once() -> None:
    with open_scope() as scope:
        barrier = threading.Barrier(8)

        def add(worker: int) -> None:
            barrier.wait()
            for i in range(50):
                scope.add(made(f"{worker}-{i}"))

        threads = [threading.Thread(target=add, args=(worker,)) for worker in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert len(scope.calls) == 8 * 50
    assert names(scope).index("3-0") < names(scope).index("3-49")


@pytest.mark.parametrize("rollout_id", ["", "a b", "ä", "a\nb", "x" * 201])
def test_an_id_that_no_header_carries_is_refused(rollout_id: str) -> None:
    with pytest.raises(ConfigError, match="rollout id"), open_scope(rollout_id):
        pass


def test_two_rollouts_of_one_id_are_refused() -> None:
    with open_scope("r"), pytest.raises(ConfigError, match="'r'"), open_scope("r"):
        pass
    with open_scope("r"):
        pass


def test_leaving_in_another_context_leaves_no_scope_behind() -> None:
    """A generator fixture of pytest ends in another context than it began in."""

    def fixture() -> Iterator[Scope]:
        with open_scope() as scope:
            yield scope

    held = fixture()
    loop = asyncio.new_event_loop()

    async def begin() -> Scope:
        return next(held)

    scope = loop.run_until_complete(begin())
    assert list(held) == []
    loop.close()
    assert scope.closed
    assert current_scope() is None


def test_the_key_is_not_shown() -> None:
    assert "secret-key" not in repr(TARGET)
