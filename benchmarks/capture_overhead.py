"""What recording costs a LangGraph agent: `ChatArt` in a rollout beside a bare `ChatOpenAI`.

The graph is a ReAct agent of three calls and two tools runs, its upstream a fake on loopback in a
process of its own. Ways, by turns: ChatOpenAI that records nothing; ChatArt played by `rollout`,
and inside `capture`; ChatOpenAI that asks for ids and logprobs itself; and the floor, a POST and a
JSON parse by httpx. Gate: every call is recorded once, ids and logprobs as the upstream sent them.
Unit: CPU microseconds of the client process for each call, all threads, which other processes on
the machine change less than the clock. Nothing is put off: a record is whole when its call ends.
Goal: at most 60 us and 2 % more than ChatOpenAI without capture, at 98 % of its throughput.

`--soak N` plays N calls at 256 concurrent rollouts instead, nine in ten by a bare model in
`capture`, the others by the graph, some streamed, and compares the record ids that the upstream
gave out with those recorded: none may be missing or there twice.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import math
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, TypeAlias

import httpx2 as httpx
import numpy as np
from langchain.agents import create_agent
from langchain_core.language_models import BaseChatModel
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI

import art_core as art
from art_core.capture import Target
from art_langgraph import ChatArt, capture, rollout
from benchmarks.comparison import MIN_REPEATS, Comparison, at_least_five, machine
from benchmarks.fake_upstream import fake_upstream

CALLS = 3
"""Calls of a run."""
PROMPT, SAMPLED = 512, 64
"""Ids of each answer."""
TASK = {"messages": [("user", "What is the weather in Paris? Look it up, in celsius. " * 8)]}

BARE_CALLS = 20
"""Calls of a rollout without a graph."""
PEER, OURS = "ChatOpenAI", "ChatArt in rollout"

Run: TypeAlias = Callable[[], Awaitable[Any]]
Costs: TypeAlias = np.ndarray[Any, np.dtype[np.float64]]


@tool
def weather(city: str, unit: str = "celsius") -> str:
    """The weather in a city.

    Args:
        city: its name.
        unit: celsius or fahrenheit.
    """
    return f"18 degrees {unit} in {city}, light wind from the west"


# --- the ways


def agent(model: BaseChatModel) -> Any:
    """A ReAct graph."""
    return create_agent(model, [weather], system_prompt="You are a helpful assistant. " * 20)


class Ways:
    """Every way of playing one run against the upstream at `base_url`."""

    def __init__(self, base_url: str, *, streaming: bool) -> None:
        common: dict[str, Any] = {
            "base_url": base_url,
            "api_key": "key",
            "model": "agent",
            "streaming": streaming,
            "stream_usage": True,
            "use_responses_api": False,
        }
        self._url = f"{base_url}/chat/completions"
        self._target = Target(
            base_url, "key", "agent@3", sampling=art.SamplingConfig(), trains=True
        )
        self._openai = agent(ChatOpenAI(**common))
        self._asking = agent(
            ChatOpenAI(**common, logprobs=True, extra_body={"return_token_ids": True})
        )
        self._model = ChatArt(streaming=streaming)
        self._ours = agent(self._model)
        self._post = httpx.AsyncClient(limits=httpx.Limits(max_connections=None))
        self._body = {
            "model": "agent",
            "messages": [{"role": "user", "content": TASK["messages"][0][1]}] * 5,
            "stream": streaming,
            "logprobs": True,
            "return_token_ids": True,
        }

    async def plain(self) -> None:
        await self._openai.ainvoke(TASK)

    async def asking(self) -> None:
        await self._asking.ainvoke(TASK)

    async def in_rollout(self) -> art.Trajectory:
        return await rollout(self._ours, TASK, model=self._target)

    async def in_capture(self) -> art.Trajectory:
        async with capture(self._target) as trajectory:
            await self._ours.ainvoke(TASK)
        return trajectory

    async def bare(self) -> art.Trajectory:
        async with capture(self._target) as trajectory:
            for _ in range(BARE_CALLS):
                await self._model.ainvoke(TASK["messages"])
        return trajectory

    async def floor(self) -> None:
        for _ in range(CALLS):
            response = await self._post.post(self._url, json=self._body)
            content = response.content
            if not self._body["stream"]:
                json.loads(content)


# --- measuring


async def several(run: Run, runs: int, concurrent: int) -> list[Any]:
    """`runs` runs, of which `concurrent` at a time."""
    gate = asyncio.Semaphore(concurrent)

    async def one() -> Any:
        async with gate:
            return await run()

    return await asyncio.gather(*(one() for _ in range(runs)))


def cost(loop: asyncio.Runner, run: Run, runs: int, concurrent: int) -> tuple[float, float]:
    """CPU and wall microseconds of a call, over `runs` runs."""
    gc.collect()
    wall, cpu = time.perf_counter(), time.process_time()
    kept = loop.run(several(run, runs, concurrent))
    cpu, wall = time.process_time() - cpu, time.perf_counter() - wall
    return cpu * 1e6 / (len(kept) * CALLS), wall * 1e6 / (len(kept) * CALLS)


def gate(loop: asyncio.Runner, ways: Ways, base_url: str) -> None:
    """Check the records of a few runs.

    Raises:
        RuntimeError: they are not what the upstream answered.
    """
    answered(base_url)
    for run in (ways.in_rollout, ways.in_capture):
        trajectories = loop.run(several(run, 8, 4))
        lost, doubled = missing(answered(base_url), trajectories)
        if lost or doubled:
            raise RuntimeError(f"{lost} calls lost, {doubled} doubled")
        for call in (c for t in trajectories for c in t.calls):
            ids, logprobs = call.sampled_ids, call.logprobs
            wanted = np.arange(1000, 1000 + SAMPLED)
            if call.error or ids is None or logprobs is None or not np.array_equal(ids, wanted):
                raise RuntimeError(f"wrong record: {call.error}, {ids}")
            if not np.allclose(logprobs, -0.0123456789 * (wanted % 97)):
                raise RuntimeError(f"wrong logprobs: {logprobs}")
            if call.prompt_ids is None or len(call.prompt_ids) != PROMPT:
                raise RuntimeError(f"wrong prompt: {call.prompt_ids}")


def answered(base_url: str) -> list[str]:
    """Record ids that the upstream gave out since this was asked last."""
    told: list[str] = httpx.get(base_url.removesuffix("/v1") + "/answered").json()
    return told


def missing(given_out: Sequence[str], trajectories: Sequence[art.Trajectory]) -> tuple[int, int]:
    """Record ids that were not recorded, and records that are there twice or were never given."""
    kept = Counter(call.record_id for t in trajectories for call in t.calls)
    lost = len(set(given_out) - set(kept))
    return lost, sum(kept.values()) - len(set(given_out) & set(kept))


def soak(base_url: str, calls: int, concurrent: int = 256) -> None:
    """Play `calls` calls and print what was lost or doubled; exit status 1 if anything was."""
    totals = Counter[str]()
    began = time.perf_counter()
    plain, streamed = (Ways(base_url, streaming=side) for side in (False, True))
    shares: list[tuple[Run, int, float]] = [
        *[(plain.bare, BARE_CALLS, 0.09)] * 10,
        (plain.in_rollout, CALLS, 0.08),
        (streamed.in_rollout, CALLS, 0.02),
    ]
    with asyncio.Runner() as loop:
        for run, each, share in shares:
            kept = loop.run(several(run, math.ceil(calls * share / each), concurrent))
            told = answered(base_url)
            lost, doubled = missing(told, kept)
            totals.update(
                calls=len(told),
                lost=lost,
                doubled=doubled,
                broken=sum(not call.trainable for t in kept for call in t.calls),
                incomplete=sum("incomplete" in t.metadata for t in kept),
            )
            print(dict(totals), round(time.perf_counter() - began), "s", flush=True)
    found = {"name": "capture_soak", **totals, "concurrent": concurrent, "machine": machine()}
    print(json.dumps(found))
    if any(totals[name] for name in ("lost", "doubled", "broken", "incomplete")):
        raise SystemExit(1)


def measure(
    ways: Ways, loop: asyncio.Runner, *, runs: int, concurrent: int, repeats: int
) -> dict[str, Costs]:
    """[repeats, 2] CPU and wall microseconds of a call, by way. Each turn begins with another."""
    arms: dict[str, Run] = {
        PEER: ways.plain,
        OURS: ways.in_rollout,
        "ChatArt in capture": ways.in_capture,
        "ChatOpenAI, ids asked": ways.asking,
        "httpx": ways.floor,
    }
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in arms}
    for run in arms.values():
        cost(loop, run, max(concurrent, 8), concurrent)
    for repeat in range(repeats):
        names = list(arms)
        for name in names[repeat % len(names) :] + names[: repeat % len(names)]:
            found[name].append(cost(loop, arms[name], runs, concurrent))
    return {name: np.array(rows) for name, rows in found.items()}


def show(found: dict[str, Costs], concurrent: int) -> None:
    """Print a table: medians, and what is added to the peer with its 10-90 % span."""
    base = found[PEER]
    print(f"{concurrent} concurrent, microseconds of a call")
    for name, rows in found.items():
        low, mid, high = np.percentile(rows[:, 0] - base[:, 0], [10, 50, 90])
        print(
            f"  {name:22} cpu {np.median(rows[:, 0]):6.0f}  added {mid:+6.0f} "
            f"({low:+.0f} to {high:+.0f})  {np.median(rows[:, 0] / base[:, 0]) - 1:+.1%}  "
            f"least {rows[:, 0].min():6.0f}  throughput {np.median(base[:, 1] / rows[:, 1]):.2f}",
            flush=True,
        )


def main() -> None:
    """Check, measure and print the line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="5 repeats of 16 runs, 64 concurrent")
    parser.add_argument("--runs", type=int, default=96, help="runs in one measurement")
    parser.add_argument("--repeats", type=at_least_five, default=15)
    parser.add_argument("--concurrent", type=int, nargs="*", default=[1, 64, 256])
    parser.add_argument("--streaming", action="store_true", help="streamed answers only")
    parser.add_argument("--soak", type=int, metavar="CALLS", help="look for lost or doubled calls")
    args = parser.parse_args()
    if args.quick:
        args.runs, args.repeats, args.concurrent = 16, MIN_REPEATS, [64]
    with fake_upstream(CALLS, PROMPT, SAMPLED) as base_url:
        if args.soak:
            soak(base_url, args.soak)
            return
        with asyncio.Runner() as loop:
            ways = Ways(base_url, streaming=args.streaming)
            gate(loop, ways, base_url)
            for concurrent in args.concurrent:
                runs = max(args.runs, concurrent)
                found = measure(ways, loop, runs=runs, concurrent=concurrent, repeats=args.repeats)
                show(found, concurrent)
                print(_line(found, concurrent, streamed=args.streaming).line())


def _line(found: dict[str, Costs], concurrent: int, *, streamed: bool) -> Comparison:
    ours, peer = found[OURS][:, 0], found[PEER][:, 0]
    low, mid, high = np.percentile(peer / ours, [10, 50, 90])
    return Comparison(
        name=f"capture_overhead, {concurrent} concurrent" + (", streamed" if streamed else ""),
        ours=round(float(np.median(ours)), 1),
        peer=round(float(np.median(peer)), 1),
        peer_name="ChatOpenAI without capture",
        ratio=round(float(mid), 3),
        goal="ratio >= 0.98 and ours <= peer + 60 (CPU us of a call)",
        spread=(round(float(low), 3), round(float(high), 3)),
        machine=machine(),
    )


if __name__ == "__main__":
    main()
