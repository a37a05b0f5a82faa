"""A time limit does not run while an engine holds calls."""

from __future__ import annotations

import asyncio
import gc
import time

import pytest

import art_core as art
from art_core.engine.gate import Gate
from art_core.errors import RolloutFailure
from art_core.time_limit import HELD, time_limit


async def test_a_limit_ends_a_block_and_says_so() -> None:
    with pytest.raises(TimeoutError):
        async with time_limit(0.02) as limit:
            await asyncio.Event().wait()
    assert limit.expired()


async def test_no_limit_and_a_block_that_is_done_are_left_alone() -> None:
    async with time_limit(None) as limit:
        await asyncio.sleep(0)
    async with time_limit(60.0) as other:
        await asyncio.sleep(0)
    assert not limit.expired()
    assert not other.expired()


async def test_held_time_is_not_charged() -> None:
    """The block lasts at least five times its limit, and all of it but a moment is held."""
    gate, other = Gate(), Gate()
    async with time_limit(0.1) as limit:
        gate.hold()
        await asyncio.sleep(0.3)
        other.hold()  # two at once are held once
        gate.release()
        await asyncio.sleep(0.2)
        other.release()
    assert not limit.expired()
    with pytest.raises(TimeoutError):
        async with time_limit(0.05):  # and it runs again when nothing is held
            await asyncio.Event().wait()


def test_two_holds_at_once_are_one_stretch_of_time() -> None:
    gate, other = Gate(), Gate()
    before = HELD.seconds()
    gate.hold()
    gate.hold()
    other.hold()
    gate.release()
    gate.release()
    other.release()
    after = HELD.seconds()
    assert after > before
    assert HELD.seconds() == after


def test_a_gate_that_is_dropped_while_it_is_closed_holds_nothing() -> None:
    """Else no rollout of the process would ever run out of time again."""
    gate = Gate()
    gate.hold()
    del gate
    gc.collect()
    after = HELD.seconds()
    time.sleep(0.01)
    assert HELD.seconds() == after


async def test_gathers_limit_is_not_charged_held_time() -> None:
    gate = Gate()

    async def waits() -> art.Trajectory:
        await gate.wait()
        return art.Trajectory(reward=1.0)

    async def train() -> None:
        await asyncio.sleep(0.3)
        gate.release()

    gate.hold()
    training = asyncio.create_task(train())
    (played,) = await art.gather_trajectories([waits()], rollout_timeout=0.1, progress=False)
    await training
    assert isinstance(played, art.Trajectory)
    (late,) = await art.gather_trajectories([_forever()], rollout_timeout=0.05, progress=False)
    assert isinstance(late, RolloutFailure)


async def _forever() -> art.Trajectory:
    await asyncio.Event().wait()
    return art.Trajectory()
