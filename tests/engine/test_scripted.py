"""The scripted engine keeps the engine's contract."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from art_core.calls import Sampling
from art_core.engine.base import AdapterRef, Delta, Engine, GenerateRequest
from art_core.engine.scripted import LOGPROB, ScriptedEngine
from art_core.errors import EngineError


def request(adapter: AdapterRef | None = None, **sampling: Any) -> GenerateRequest:
    prompt = np.frombuffer(b"prompt", np.uint8).astype(np.int32)
    return GenerateRequest("r", prompt, adapter, Sampling(seed=1, **sampling))


async def all_of(engine: Engine, asked: GenerateRequest) -> list[Delta]:
    return [delta async for delta in engine.generate(asked)]


async def test_it_streams_the_script_and_ends_the_turn() -> None:
    prompts: list[str] = []

    def script(prompt: str, asked: GenerateRequest) -> str:
        prompts.append(prompt)
        return "abcd"

    deltas = await all_of(ScriptedEngine(script, delta_tokens=2), request())
    assert [list(delta.ids) for delta in deltas] == [[97, 98], [99, 100], [257]]
    assert [delta.finish_reason for delta in deltas] == [None, None, "stop"]
    assert deltas[0].logprobs == [LOGPROB, LOGPROB]
    assert prompts == ["prompt"]


@pytest.mark.parametrize(
    ("sampling", "ids", "reason"),
    [
        ({"max_tokens": 2}, b"ab", "length"),
        ({"max_tokens": 5}, b"abcd", "stop"),
        ({"max_tokens": 4}, b"abcd", "length"),
        ({"stop": ("bc",)}, b"abc", "stop"),
        ({"stop": ("bc",), "max_tokens": 2}, b"ab", "length"),
        ({"stop": ("x",)}, b"abcd", "stop"),
        ({}, b"abcd", "stop"),
    ],
)
async def test_it_ends_where_it_is_told_to(
    sampling: dict[str, Any], ids: bytes, reason: str
) -> None:
    deltas = await all_of(ScriptedEngine(lambda p, r: "abcd"), request(**sampling))
    assert bytes(i for delta in deltas for i in delta.ids if i < 256) == ids
    assert deltas[-1].finish_reason == reason


async def test_it_ends_with_the_context() -> None:
    engine = ScriptedEngine(lambda p, r: "abcd", context_length=8)  # "prompt" takes 6
    deltas = await all_of(engine, request())
    assert [list(delta.ids) for delta in deltas] == [[97, 98]]
    assert deltas[-1].finish_reason == "length"


async def test_closing_the_iterator_cancels() -> None:
    engine = ScriptedEngine(lambda p, r: "abcd", delta_tokens=1)
    stream = engine.generate(request())
    await anext(stream)
    assert engine.running == 1
    await stream.aclose()
    assert (engine.running, engine.cancelled) == (0, 1)


async def test_adapters_must_be_loaded() -> None:
    engine, adapter = ScriptedEngine(lambda p, r: str(r.adapter)), AdapterRef("agent", 3)
    with pytest.raises(EngineError, match="agent@3"):
        await all_of(engine, request(adapter))
    await engine.load_adapter(adapter, Path("nowhere"))
    assert engine.adapters() == [adapter]
    assert len(await all_of(engine, request(adapter))) == 1
    await engine.unload_adapter(adapter)
    await engine.unload_adapter(adapter)
    assert engine.adapters() == []


async def test_a_script_that_raises_is_an_engine_error() -> None:
    with pytest.raises(EngineError, match="ZeroDivisionError"):
        await all_of(ScriptedEngine(lambda p, r: str(1 / 0)), request())


async def test_closing_the_engine_ends_running_calls() -> None:
    engine = ScriptedEngine(lambda p, r: "abcd", delta_tokens=1, delay=0.001)
    running = asyncio.ensure_future(all_of(engine, request()))
    await asyncio.sleep(0)
    await engine.close()
    await engine.close()
    with pytest.raises(EngineError, match="closed"):
        await running
    with pytest.raises(EngineError, match="closed"):
        await all_of(engine, request())


def test_the_endpoint_needs_no_torch() -> None:
    """A rehearsal runs where only the endpoint's own packages are installed."""
    code = (
        "import sys, art_core.engine.openai_routes, art_core.engine.serving\n"
        "import art_core.engine.scripted, art_core.engine.tokenizer, art_core.engine.grammar\n"
        "print({'torch', 'transformers', 'llguidance', 'pandas'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"
