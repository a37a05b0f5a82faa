"""The gate in front of the endpoint: who waits, who goes on, on which loop."""

from __future__ import annotations

import asyncio
import threading

import pytest

from art_core.engine.gate import Gate


async def test_an_open_gate_holds_nobody() -> None:
    async with asyncio.timeout(5):
        await Gate().wait()


async def test_every_hold_wants_its_own_release() -> None:
    gate = Gate()
    gate.hold()
    gate.hold()
    waiting = [asyncio.ensure_future(gate.wait()) for _ in range(3)]
    gate.release()
    await asyncio.sleep(0.01)
    assert not any(task.done() for task in waiting)
    gate.release()
    await asyncio.wait_for(asyncio.gather(*waiting), 5)


async def test_a_gate_closed_again_before_a_waiter_woke_holds_it() -> None:
    gate = Gate()
    gate.hold()
    waiting = asyncio.ensure_future(gate.wait())
    await asyncio.sleep(0)
    gate.release()
    gate.hold()
    await asyncio.sleep(0.01)
    assert not waiting.done()
    gate.release()
    await asyncio.wait_for(waiting, 5)


def test_waiters_of_several_loops_go_on_though_one_loop_is_gone() -> None:
    """The loop that is closed waited first, so the others come after its failure."""
    gate = Gate()
    gate.hold()
    gone = asyncio.new_event_loop()
    left = gone.create_task(gate.wait())
    gone.run_until_complete(asyncio.sleep(0))
    gone.close()
    passed: list[int] = []

    def work(i: int) -> None:
        asyncio.run(asyncio.wait_for(gate.wait(), 20))
        passed.append(i)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(3)]
    for thread in threads:
        thread.start()
    while len(gate._waiting) < 4:
        threads[0].join(0.01)
    gate.release()
    for thread in threads:
        thread.join(20)
    assert sorted(passed) == [0, 1, 2]
    assert not left.done()
    left._log_destroy_pending = False  # type: ignore[attr-defined]  # asyncio's, for such a case


async def test_a_waiter_that_is_cancelled_leaves_nothing() -> None:
    gate = Gate()
    gate.hold()
    waiting = asyncio.ensure_future(gate.wait())
    await asyncio.sleep(0)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    assert not gate._waiting
    gate.release()


async def test_a_release_too_many_is_an_error_and_the_gate_stays_open() -> None:
    gate = Gate()
    with pytest.raises(RuntimeError, match="not held"):
        gate.release()
    await asyncio.wait_for(gate.wait(), 5)
