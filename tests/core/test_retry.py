"""Retrying: as often as said, never a cancellation."""

from __future__ import annotations

import asyncio
import time

import pytest

import art_core as art
from art_core.capture import current_scope, open_scope
from art_core.errors import ConfigError
from tests.core.sample import make_call


class Flaky:
    """Fails as often as told, then answers how often it was called."""

    def __init__(self, failures: int, error: BaseException | None = None) -> None:
        self.failures, self.calls = failures, 0
        self.error = error or ValueError("no")

    def sync(self) -> int:
        self.calls += 1
        if self.calls <= self.failures:
            raise self.error
        return self.calls

    async def coroutine(self) -> int:
        await asyncio.sleep(0)
        return self.sync()


@pytest.mark.parametrize("failures", [0, 1, 2])
async def test_it_succeeds_within_the_attempts(failures: int) -> None:
    seen: list[tuple[str, int]] = []
    decorate = art.retry(
        delay=0, on_retry=lambda error, attempt: seen.append((str(error), attempt))
    )
    assert decorate(Flaky(failures).sync)() == failures + 1
    assert await decorate(Flaky(failures).coroutine)() == failures + 1
    assert seen == [("no", attempt + 1) for attempt in range(failures)] * 2


async def test_after_the_last_attempt_the_exception_is_raised_as_it_is() -> None:
    flaky = Flaky(9)
    with pytest.raises(ValueError, match="no") as caught:
        art.retry(max_attempts=3, delay=0)(flaky.sync)()
    assert caught.value is flaky.error
    assert flaky.calls == 3
    with pytest.raises(ValueError, match="no"):
        await art.retry(max_attempts=3, delay=0)(flaky.coroutine)()
    assert flaky.calls == 6


async def test_the_waits_grow(monkeypatch: pytest.MonkeyPatch) -> None:
    waits: list[float] = []

    async def sleep(seconds: float) -> None:
        if seconds:  # Flaky's own are of 0 s
            waits.append(seconds)

    monkeypatch.setattr(time, "sleep", waits.append)
    assert art.retry(max_attempts=4)(Flaky(3).sync)() == 4
    monkeypatch.setattr(asyncio, "sleep", sleep)
    assert await art.retry(max_attempts=4)(Flaky(3).coroutine)() == 4
    assert waits == [0.25, 0.5, 1.0] * 2  # ART's defaults: 0.25 s, twice as long each time


async def test_only_the_named_exceptions_are_retried() -> None:
    decorate = art.retry(delay=0, exceptions=(KeyError,))
    with pytest.raises(ValueError, match="no"):
        decorate(Flaky(1).sync)()
    assert decorate(Flaky(1, KeyError()).sync)() == 2


@pytest.mark.parametrize("error", [asyncio.CancelledError(), KeyboardInterrupt(), SystemExit()])
async def test_an_end_is_never_retried(error: BaseException) -> None:
    for call in (Flaky(1, error), Flaky(1, error)):
        with pytest.raises(type(error)):
            art.retry(delay=0)(call.sync)()
        assert call.calls == 1
    flaky = Flaky(1, asyncio.CancelledError())
    with pytest.raises(asyncio.CancelledError):
        await art.retry(delay=0)(flaky.coroutine)()
    assert flaky.calls == 1


def test_bad_arguments_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"with parentheses: @art\.retry\(\)"):
        art.retry(Flaky(0).sync)  # type: ignore[arg-type]  # the fault under test
    with pytest.raises(ConfigError, match="max_attempts"):
        art.retry(max_attempts=0)
    with pytest.raises(ConfigError, match="delay"):
        art.retry(delay=-1)
    with pytest.raises(ConfigError, match="never retried"):
        art.retry(exceptions=(BaseException,))  # type: ignore[arg-type]  # the fault under test


def test_name_and_signature_are_kept() -> None:
    @art.retry()
    def judge(a: int, *, b: str = "x") -> str:
        """Says."""
        return f"{a}{b}"

    assert (judge.__name__, judge.__doc__) == ("judge", "Says.")
    assert judge(1, b="y") == "1y"


async def test_a_rollout_has_the_calls_of_the_attempt_that_succeeded() -> None:
    attempts = 0

    @art.retry(delay=0)
    async def rollout() -> art.Trajectory:
        nonlocal attempts
        attempts += 1
        scope = current_scope()
        assert scope is not None
        scope.add(make_call(record_id=f"attempt{attempts}"))
        if attempts < 3:
            raise ConnectionError
        return art.Trajectory(reward=1.0)

    with open_scope() as scope:
        trajectory = await rollout()
    assert [call.record_id for call in trajectory.calls] == ["attempt3"]
    assert len(scope.calls) == 3  # the others are still there to be looked at
