"""Agents' load on vLLM: through our endpoint, which records every call, beside vLLM asked directly.

Rollouts of several turns in groups of 8 with a LoRA on, as many at once as there are streams, from
client processes of their own. Ways, by turns, each with vLLM's prefix cache emptied first and on
the same tasks: vLLM with logprobs and ids in the answer; vLLM with neither, the ceiling; our
endpoint with logprobs and ids in the answer; our endpoint with neither: its records hold them.
Gate: what our endpoint recorded is what it answered, token for token and call by call, no prompt
drifted, and vLLM's own completions endpoint gives the same tokens the same logprobs.
Unit: sampled tokens a second. Beside it: the share of the prompt tokens that vLLM could take from
its prefix cache and did, and the time to the first token of streamed calls.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import random
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from itertools import count
from typing import Any

import httpx2 as httpx
import numpy as np
import torch

from art_core.engine.base import AdapterRef
from art_core.records import TokenRecord
from benchmarks.agent_load import WORDS
from benchmarks.comparison import MIN_REPEATS, Comparison, at_least_five, machine
from benchmarks.served_model import DEFAULT, NAME, House, served

GROUP = 8
DIRECT, CEILING, OURS, SLIM = "vLLM, ids", "vLLM, bare", "ours, ids", "ours, records"
WHOLE: dict[str, Any] = {"logprobs": True, "top_logprobs": 0, "return_token_ids": True}
NOISE = (0.03, 0.5)
"""Nats in bfloat16 between two ways through vLLM: mean and largest; in float32 a tenth of it."""


@dataclass(frozen=True)
class Plan:
    """How much is played; lengths of texts are in words."""

    streams: int = 512
    turns: int = 3
    answer: int = 128
    """Tokens of an answer, on average: half of it to three halves, drawn evenly."""
    system: int = 400
    task: int = 150
    observation: int = 100
    processes: int = 8
    seed: int = 0


@dataclass(frozen=True)
class Door:
    """Where a client calls, and what it asks for."""

    url: str
    headers: Mapping[str, str]
    body: Mapping[str, Any]
    rollouts: str | None
    """What the ids of its rollouts begin with; None: they are not named."""


@dataclass(frozen=True)
class Played:
    """What one client process saw."""

    began: float
    ended: float
    sampled: int
    calls: int
    prompt: int
    """Tokens of all prompts."""
    cached: int
    """Of those, taken from the prefix cache, where the server says so."""
    reusable: int
    """Of those, some earlier call had."""
    first: list[float]
    """Seconds to the first token, of streamed calls."""


# --- the client's side, in processes of its own


def play(plan: Plan, door: Door, streams: range) -> Played:
    """Play the rollouts of `streams`, all at once."""
    return asyncio.run(_play(plan, door, streams))


async def _play(plan: Plan, door: Door, streams: range) -> Played:
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
    began = time.monotonic()
    async with httpx.AsyncClient(limits=limits, timeout=600.0, headers=door.headers) as client:
        found = await asyncio.gather(*(_rollout(client, plan, door, i) for i in streams))
    calls = [call for rollout in found for call in rollout]
    sums = [sum(call[i] for call in calls) for i in range(4)]
    first = [call[4] for call in calls if call[4]]
    sampled, prompt, cached, reusable = map(int, sums)
    return Played(began, time.monotonic(), sampled, len(calls), prompt, cached, reusable, first)


async def _rollout(
    client: httpx.AsyncClient, plan: Plan, door: Door, stream: int
) -> list[tuple[int, int, int, int, float]]:
    """Sampled, prompt, cached and reusable tokens of each call, and the time to its first."""
    group, rollout = divmod(stream, GROUP)
    messages = [
        {"role": "system", "content": _words(random.Random(plan.seed), plan.system)},
        {"role": "user", "content": _words(random.Random(f"{plan.seed}/{group}"), plan.task)},
    ]
    said = random.Random(f"{plan.seed}/{stream}")
    headers = {"x-art-rollout": f"{door.rollouts}-{stream}"} if door.rollouts else {}
    found = []
    before = 0
    for turn in range(plan.turns):
        longest = said.randint(plan.answer // 2, 3 * plan.answer // 2)
        body = {**door.body, "messages": messages, "max_tokens": longest, "temperature": 1.0}
        first = 0.0
        if door.body.get("stream"):
            usage, text, first = await _streamed(client, door.url, body, headers)
        else:
            response = await client.post(door.url, json=body, headers=headers)
            response.raise_for_status()
            told = response.json()
            usage, text = told["usage"], told["choices"][0]["message"]["content"]
        sampled, prompt = usage["completion_tokens"], usage["prompt_tokens"]
        cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
        reusable = before if turn else prompt if rollout else 0
        found.append((sampled, prompt, cached, reusable, first))
        before = prompt + sampled
        messages = [
            *messages,
            {"role": "assistant", "content": text or ""},
            {"role": "user", "content": _words(said, plan.observation)},
        ]
    return found


async def _streamed(
    client: httpx.AsyncClient, url: str, body: dict[str, Any], headers: Mapping[str, str]
) -> tuple[dict[str, Any], str, float]:
    """Usage, text and the seconds to the first token of a streamed call."""
    body = {**body, "stream_options": {"include_usage": True}}
    began, first, text = time.monotonic(), 0.0, []
    usage: dict[str, Any] = {}
    async with client.stream("POST", url, json=body, headers=headers) as response:
        response.raise_for_status()
        async for line in response.aiter_lines():
            if not line.startswith("data: {"):
                continue
            event = json.loads(line[6:])
            usage = event.get("usage") or usage
            for choice in event["choices"]:
                if choice["delta"].get("content"):
                    first = first or time.monotonic() - began
                    text.append(choice["delta"]["content"])
    return usage, "".join(text), first


def _words(rng: random.Random, count: int) -> str:
    return " ".join(rng.choices(WORDS, k=count))


# --- measuring


class Load:
    """Plays plans against a house, by any of the ways."""

    def __init__(self, house: House, processes: int) -> None:
        self.house = house
        self._pool = ProcessPoolExecutor(processes, multiprocessing.get_context("spawn"))
        self._processes = processes
        self._loop = asyncio.Runner()
        self._passes = count()
        self._loop.run(self._named())
        list(self._pool.map(time.sleep, [0.5] * processes))  # they are up

    async def _named(self) -> None:
        """Have the adapter loaded, to know its name in vLLM."""
        ref = AdapterRef(NAME, self.house.run.step)
        async with self.house.engine.shelf.use(ref) as name:
            self.adapter = str(name)

    def door(self, way: str, *, stream: bool = False) -> Door:
        """Where and how a way asks."""
        asked = WHOLE if way in (DIRECT, OURS) else {}
        body: dict[str, Any] = {**asked, **({"stream": True} if stream else {})}
        if way in (DIRECT, CEILING):
            body |= {"model": self.adapter}
            headers = self.house.engine.server.headers
            return Door(self.house.direct + "/chat/completions", headers, body, None)
        body |= {"model": NAME}
        rollouts = f"pass{next(self._passes)}"
        return Door(self.house.endpoint + "/chat/completions", {}, body, rollouts)

    def play(self, plan: Plan, door: Door) -> list[Played]:
        """Play `plan` at `door`, beginning with empty caches."""
        self._loop.run(self.house.engine.forget_prompts())
        each = plan.streams // self._processes
        shares = [range(i * each, (i + 1) * each) for i in range(self._processes)]
        waits = [self._pool.submit(play, plan, door, share) for share in shares]
        return [wait.result() for wait in waits]

    def close(self) -> None:
        self._pool.shutdown()
        self._loop.close()


def rate(played: Sequence[Played]) -> float:
    """Sampled tokens a second, of all processes."""
    wall = max(p.ended for p in played) - min(p.began for p in played)
    return sum(p.sampled for p in played) / wall


def hit_rate(played: Sequence[Played]) -> float:
    """Of the prompt tokens that some earlier call had, those taken from the cache."""
    return sum(p.cached for p in played) / max(1, sum(p.reusable for p in played))


def gate(load: Load, plan: Plan) -> None:
    """Check the records of a small plan.

    Raises:
        RuntimeError: they are not what was answered, or not what vLLM computes.
    """
    house = load.house
    small = replace(plan, streams=GROUP * load._processes, seed=plan.seed + 10_000)
    house.base.service.drifts.clear()
    door = load.door(OURS)
    load.play(small, door)
    found = [
        record
        for stream in range(small.streams)
        for record in house.base.service.records.of_rollout(f"{door.rollouts}-{stream}")
    ]
    if len(found) != small.streams * small.turns or not all(r.complete for r in found):
        raise RuntimeError(f"{len(found)} records, not {small.streams * small.turns} whole ones")
    if house.base.service.drifts:
        raise RuntimeError(f"prompts drifted: {house.base.service.drifts}")
    apart = np.abs(np.concatenate([_difference(load, record) for record in found[:: plan.turns]]))
    is_coarse = torch.cuda.is_available()
    mean, largest = (limit if is_coarse else limit / 10 for limit in NOISE)
    told = f"logprobs apart {apart.mean():.1e}, at most {apart.max():.1e}"
    print(f"gate: {len(found)} records, {told}", flush=True)
    if apart.mean() > mean or apart.max() > largest:
        raise RuntimeError(told)


def _difference(load: Load, record: TokenRecord) -> np.ndarray[Any, Any]:
    """Recorded logprobs less those that vLLM's own completions endpoint gives the same ids."""
    ids = [*record.prompt_ids.tolist(), *record.sampled_ids.tolist()]
    body = {"model": load.adapter, "prompt": ids, "max_tokens": 1, "prompt_logprobs": 0}
    headers = load.house.engine.server.headers
    told = httpx.post(load.house.direct + "/completions", json=body, headers=headers, timeout=600)
    scored = told.raise_for_status().json()["choices"][0]["prompt_logprobs"]
    start = len(record.prompt_ids)
    theirs = [scored[start + i][str(t)]["logprob"] for i, t in enumerate(record.sampled_ids)]
    return record.logprobs - np.array(theirs, np.float32)


def measure(house: House, plan: Plan, repeats: int) -> Comparison:
    """Check, then play all ways by turns; the line of the goal with logprobs and ids."""
    load = Load(house, plan.processes)
    try:
        gate(load, plan)
        rates, hits = _rates(load, plan, repeats)
        _first_tokens(load, plan)
    finally:
        load.close()
    ours, peer = rates[OURS], rates[DIRECT]
    low, mid, high = np.percentile(ours / peer, [10, 50, 90])
    slim = float(np.median(rates[SLIM] / peer))
    ceiling = float(np.median(rates[SLIM] / rates[CEILING]))
    print(f"records kept, nothing in the answer: {slim:.2f} of {DIRECT}, {ceiling:.2f} of the bare")
    print(f"prefix cache: {np.median(hits):.3f} of what could be reused")
    return Comparison(
        name=f"serving_load, {plan.streams} streams",
        ours=round(float(np.median(ours)), 1),
        peer=round(float(np.median(peer)), 1),
        peer_name="vLLM direct with logprobs and ids",
        ratio=round(float(mid), 3),
        goal="ratio >= 0.97, without logprobs in the answer >= 1.7 (tok/s)",
        spread=(round(float(low), 3), round(float(high), 3)),
        machine=machine(),
    )


def _rates(
    load: Load, plan: Plan, repeats: int
) -> tuple[dict[str, np.ndarray[Any, Any]], list[float]]:
    """Tokens a second of each way, and the hit rates of ours."""
    ways = [DIRECT, OURS, CEILING, SLIM]
    found: dict[str, list[float]] = {way: [] for way in ways}
    hits = []
    warm = replace(plan, turns=1, seed=plan.seed + 20_000)
    for way in ways:
        load.play(warm, load.door(way))
    for repeat in range(repeats):
        for way in ways[repeat % 4 :] + ways[: repeat % 4]:
            spent = time.process_time()
            played = load.play(replace(plan, seed=plan.seed + repeat), load.door(way))
            spent = time.process_time() - spent
            found[way].append(rate(played))
            calls = sum(p.calls for p in played)
            print(
                f"{repeat} {way:14} {rate(played):8.0f} tok/s  {calls} calls, endpoint "
                f"{1e3 * spent / calls:.2f} ms of CPU a call, hits {hit_rate(played):.3f}",
                flush=True,
            )
            if way in (OURS, SLIM):
                hits.append(hit_rate(played))
    return {way: np.array(rates) for way, rates in found.items()}, hits


def _first_tokens(load: Load, plan: Plan) -> None:
    """Print the time to the first token of streamed calls at an eighth of the streams."""
    few = replace(plan, streams=max(load._processes, plan.streams // 8), turns=2)
    for i, way in enumerate((CEILING, SLIM, DIRECT, OURS)):
        played = load.play(replace(few, seed=few.seed + i), load.door(way, stream=True))
        first = np.concatenate([p.first for p in played]) * 1e3
        print(
            f"{way}, {few.streams} streamed: first token after {np.median(first):.0f} ms, "
            f"p95 {np.percentile(first, 95):.0f} ms; {rate(played):.0f} tok/s",
            flush=True,
        )


def main() -> None:
    """Serve, check, measure and print the line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="16 streams of SmolLM2, short answers")
    parser.add_argument("--base-model", default=DEFAULT, help="name or folder")
    parser.add_argument("--random", action="store_true", help="random weights of 0.5B")
    parser.add_argument("--streams", type=int, default=512)
    parser.add_argument("--answer", type=int, default=128)
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--processes", type=int, default=8)
    parser.add_argument("--repeats", type=at_least_five, default=MIN_REPEATS)
    args = parser.parse_args()
    plan = Plan(args.streams, args.turns, args.answer, processes=args.processes)
    if args.quick:
        plan = Plan(16, 2, 8, system=40, task=20, observation=10, processes=2)
    with served(args.base_model, random_weights=args.random) as house:
        print(measure(house, plan, args.repeats).line())


if __name__ == "__main__":
    main()
