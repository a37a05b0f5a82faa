"""LLM caches: an answer that comes out of a cache was not sampled, so in a rollout none does."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from langchain.agents import create_agent
from langchain_core.caches import InMemoryCache
from langchain_core.globals import set_llm_cache

from art_langgraph import ChatArt
from tests.langgraph.proofs.evidence import histories
from tests.langgraph.proofs.house import House, Talk, uses


@pytest.fixture
def global_cache() -> Iterator[InMemoryCache]:
    cache = InMemoryCache()
    set_llm_cache(cache)
    yield cache
    set_llm_cache(None)


def look(q: str) -> str:
    """Look something up."""
    return q


def says(talk: Talk) -> str:
    return uses("look", q="x") if talk.role == "user" else "done"


WHOLE = [[uses("look", q="x"), "done"]]


@pytest.mark.parametrize("streaming", [False, True])
async def test_a_global_cache(global_cache: InMemoryCache, streaming: bool) -> None:
    agent = create_agent(ChatArt(streaming=streaming), [look])
    with House(says) as house:
        played = [await house.play(agent) for _ in range(3)]
    assert [histories(t) for t in played] == [WHOLE] * 3
    assert len(house.asked) == 6
    assert not global_cache._cache


@pytest.mark.parametrize("cache", [True, InMemoryCache()], ids=["asked for", "its own"])
async def test_a_cache_of_the_model(global_cache: InMemoryCache, cache: Any) -> None:
    agent = create_agent(ChatArt(cache=cache), [look])
    with House(says) as house:
        played = [await house.play(agent) for _ in range(2)]
    assert [histories(t) for t in played] == [WHOLE] * 2
    assert len({c.key for t in played for c in t.calls}) == 4


async def test_a_bound_and_structured_model_with_a_cache(
    global_cache: InMemoryCache, tmp_path: Path
) -> None:
    """`bind_tools` and `with_retry` keep the model inside; its cache stays out as well."""
    model = ChatArt(cache=True).bind_tools([look]).with_retry(stop_after_attempt=2)
    with House(says) as house:
        played = [await house.play(model, [("user", "go")]) for _ in range(2)]
    assert [len(t.calls) for t in played] == [1, 1]
    assert played[0].calls[0].key != played[1].calls[0].key
