"""Streams that wait for their turn: kept alive, and told what is wrong when it comes."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import aclosing
from typing import Any

import pytest

from art_core.engine.chat_wire import DONE, KEEP_ALIVE
from art_core.server.admission import Admission
from art_core.server.served_models import ServedModels
from tests.engine.conftest import Endpoint, make_endpoint, user


@pytest.fixture
async def endpoint() -> AsyncIterator[Endpoint]:
    made = await make_endpoint()
    yield made
    await made.client.aclose()
    made.records.close()


def served(endpoint: Endpoint, admission: Admission) -> ServedModels:
    return ServedModels(lambda: [endpoint.service], admission, keep_alive=0.05)


BODY: dict[str, Any] = {"model": "scripted", "messages": [user()], "stream": True}


async def test_a_stream_that_waits_is_kept_alive_and_then_answered(endpoint: Endpoint) -> None:
    admission = Admission(running=1)
    models = served(endpoint, admission)
    async with admission.turn("other"):
        stream = models.stream(BODY)
        first = [await anext(stream), await anext(stream)]
    rest = [event async for event in stream]
    assert first == [KEEP_ALIVE, KEEP_ALIVE]
    assert rest[-1] == DONE
    assert (admission.running, admission.waiting) == (0, 0)


async def test_what_is_wrong_with_a_stream_that_waited_is_an_event(endpoint: Endpoint) -> None:
    admission = Admission(running=1)
    models = served(endpoint, admission)
    async with admission.turn("other"):
        stream = models.stream({**BODY, "temperature": 99})
        await anext(stream)
    [told] = [event async for event in stream if event != KEEP_ALIVE]
    assert b'"param":"temperature"' in told
    assert admission.running == 0


async def test_streams_that_are_left_while_they_wait_take_no_turn(endpoint: Endpoint) -> None:
    """At any moment: waiting, just let in, or answering."""
    endpoint.engine.delay = 0.01
    admission = Admission(running=2)
    models = served(endpoint, admission)

    async def read_for(seconds: float) -> None:
        async with aclosing(models.stream(BODY)) as stream:
            async with asyncio.timeout(seconds):
                async for _ in stream:
                    pass

    reads = [read_for(0.001 * n) for n in range(60)]
    found = await asyncio.gather(*reads, return_exceptions=True)
    assert {type(one) for one in found} <= {TimeoutError, type(None)}
    await asyncio.sleep(0.1)
    assert (admission.running, admission.waiting) == (0, 0)
    async with admission.turn("scripted"):
        assert admission.running == 1
