"""A new adapter taking over in vLLM while calls are answered: how long, and what it costs them.

An adapter is changed in the trainer's memory; then it is saved, loaded, served, and asked: to the
first token sampled by it. Meanwhile 64 calls decode, one of them streamed, so that each decode step
is seen. Peer: as ART does it: saved, vLLM put to sleep and woken, half a second waited, and
`/v1/load_lora_adapter` from disk, to the first token of a direct call.
Gate: no call breaks off; every call says which step answered it, and vLLM's logprobs under that
step are those that the call was sampled with, which those under the step before are not.
Unit: milliseconds a swap: the 95th percentile of ours, the median of the peer's.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import httpx2 as httpx
import numpy as np
import torch

from art_core import checkpoints
from art_core.config import VllmConfig
from art_core.engine.base import AdapterRef
from art_core.nn.lora import LoraModel
from art_core.records import TokenRecord
from art_core.training.requests import Loading
from art_core.training.trainer import Trainer
from art_core.training.workbench import load_module
from benchmarks.comparison import MIN_REPEATS, Comparison, machine
from benchmarks.served_model import DEFAULT, NAME, ON_CPU, House, served

_ART_WAITS = 0.5
"""Seconds that ART waits in a swap, whatever happens."""
PROMPT = [{"role": "user", "content": "Tell me a long story about a shop and its customers."}]
NOISE = 0.05
"""Nats in bfloat16 that two ways through vLLM differ by on average."""


@dataclass
class Stream:
    """What a client saw of one call."""

    policy: str | None = None
    error: str | None = None
    arrivals: list[float] = field(default_factory=list)
    record_id: str = ""


# --- calls that go on meanwhile, in a process of their own


def keep_busy(pipe: Connection, url: str, streams: int, tokens: int, streamed: int) -> None:
    """Keep `streams` calls of `tokens` tokens going until told to stop; then tell what was seen.

    Args:
        streamed: so many of them are streamed.
    """
    pipe.send(asyncio.run(_keep_busy(pipe, url, streams, tokens, streamed)))


async def _keep_busy(
    pipe: Connection, url: str, streams: int, tokens: int, streamed: int
) -> list[Stream]:
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
    async with httpx.AsyncClient(limits=limits, timeout=600.0) as client:
        done: list[Stream] = []

        async def one(number: int) -> None:
            first = tokens * (number + 1) // streams  # they do not all end at once
            while not pipe.poll():
                body = _body(NAME, first, stream=number < streamed)
                done.append(await _watched(client, url, body, {}))
                first = tokens

        await asyncio.gather(*(one(i) for i in range(streams)))
    return done


def _body(model: str, tokens: int, *, stream: bool) -> dict[str, Any]:
    return {
        "model": model,
        "messages": PROMPT,
        "max_tokens": tokens,
        "min_tokens": tokens,
        "temperature": 1.0,
        "stream": stream,
        **({"return_token_ids": True} if stream else {}),  # a token may have no text of its own
    }


async def _watched(
    client: httpx.AsyncClient, url: str, body: dict[str, Any], headers: Mapping[str, str]
) -> Stream:
    """One call, to its end."""
    seen = Stream()
    try:
        async with client.stream("POST", url, json=body, headers=headers) as response:
            response.raise_for_status()
            if not body["stream"]:
                told = json.loads(await response.aread())
                seen.policy, seen.record_id = told["art_policy"], told["system_fingerprint"]
                return seen
            async for line in response.aiter_lines():
                if line.startswith("data: {"):
                    _take(seen, json.loads(line[6:]))
    except (httpx.HTTPError, KeyError, ValueError) as error:
        seen.error = repr(error)
    return seen


def _take(seen: Stream, event: dict[str, Any]) -> None:
    """An event of a stream."""
    if "error" in event:
        seen.error = str(event["error"])
        return
    seen.policy = event.get("art_policy", event["model"])
    seen.record_id = event.get("system_fingerprint") or ""
    if any(choice.get("token_ids") for choice in event["choices"]):
        seen.arrivals.append(time.monotonic())


# --- swaps


@dataclass(frozen=True)
class Swap:
    """One swap, in seconds."""

    began: float
    saved: float
    loaded: float
    first_token: float

    @property
    def whole(self) -> float:
        """From the trainer's memory to the first token."""
        return self.first_token - self.began


class Swaps:
    """Swaps adapters of a house while it is busy: a trainer of its own has them, in this process,
    for the house's is in another and takes steps only."""

    def __init__(self, house: House) -> None:
        self.house = house
        self._url = house.endpoint + "/chat/completions"
        has_gpu = torch.cuda.is_available()
        self._module = load_module(Loading(Path(house.model.base_model), on_gpu=has_gpu))
        self._module.create_adapter(NAME, house.model.art_config.lora, seed=0)
        self._trainer = Trainer(self._module, NAME, seed=0)

    async def ours(self) -> Swap:
        """Change the adapter, then save, load, publish and ask."""
        house, step = self.house, self.house.run.step + 1
        changed(self._module, NAME)
        began = time.monotonic()
        await asyncio.to_thread(checkpoints.save, house.run.folder, step, self._trainer.save)
        saved = time.monotonic()
        house.run.step = step
        await house.run._serve(step)
        async with house.engine.shelf.use(AdapterRef(NAME, step)):
            loaded = time.monotonic()
        async with httpx.AsyncClient(timeout=60.0) as client:
            seen = await _watched(client, self._url, _body(NAME, 2, stream=True), {})
        if seen.error or seen.policy != f"{NAME}@{step}" or not seen.arrivals:
            raise RuntimeError(f"the new step did not answer: {seen}")
        return Swap(began, saved, loaded, seen.arrivals[0])

    async def as_art(self, folder: Path) -> float:
        """Seconds of a swap in ART's way."""
        house = self.house
        changed(self._module, NAME)
        began = time.monotonic()
        await asyncio.to_thread(self._trainer.save, folder)
        name = f"{NAME}-{folder.name}"
        headers = house.engine.server.headers
        async with httpx.AsyncClient(timeout=60.0, headers=headers) as client:
            root = house.engine.server.base_url
            (await client.post(f"{root}/sleep?level=1")).raise_for_status()
            (await client.post(f"{root}/wake_up")).raise_for_status()
            await asyncio.sleep(_ART_WAITS)
            body = {"lora_name": name, "lora_path": str(folder)}
            (await client.post(f"{root}/v1/load_lora_adapter", json=body)).raise_for_status()
            url = f"{root}/v1/chat/completions"
            seen = await _watched(client, url, _body(name, 2, stream=True), {})
            took = (seen.arrivals or [float("nan")])[0] - began
            await client.post(f"{root}/v1/unload_lora_adapter", json={"lora_name": name})
        if seen.error:
            raise RuntimeError(f"the peer did not answer: {seen.error}")
        return took

    def written(self) -> float:
        """Seconds to write a step: what a checkpoint costs but for the disk."""
        with tempfile.TemporaryDirectory() as folder:
            began = time.monotonic()
            self._trainer.save(Path(folder))
            return time.monotonic() - began


def changed(module: LoraModel, name: str) -> None:
    """Other weights in the adapter, as a step would leave them, but further away."""
    for key, weight in module.adapter_weights(name).items():
        if "lora_B" in key:
            torch.nn.init.normal_(weight, std=0.02)
    if torch.cuda.is_available():
        torch.cuda.synchronize()


async def under_load(
    maker: Swaps, *, swaps: int, streams: int, tokens: int, pause: float
) -> tuple[list[Swap], list[Stream]]:
    """Swap so often while calls go on.

    Args:
        pause: seconds between two swaps. Calls end with the step that they began with: with too
            many steps at once vLLM has no slot for the new one (`VllmConfig.max_adapters`).
    """
    house, context = maker.house, multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    url = house.endpoint + "/chat/completions"
    client = context.Process(target=keep_busy, args=(there, url, streams, tokens, 1))
    client.start()
    try:
        while house.engine.running < streams:  # noqa: ASYNC110 - another process starts them
            await asyncio.sleep(0.05)
        await asyncio.sleep(1.0)
        made = []
        for _ in range(swaps):
            made.append(await maker.ours())
            await asyncio.sleep(pause)
        here.send("stop")
        seen: list[Stream] = await asyncio.to_thread(here.recv)
    finally:
        client.join(60)
        if client.is_alive():
            client.kill()
    return made, seen


def stalls(made: list[Swap], seen: list[Stream]) -> tuple[float, list[float]]:
    """Seconds of a usual decode step, and the longest pause of a stream in each swap."""
    gaps = [
        (after, after - before)
        for stream in seen
        for before, after in zip(stream.arrivals, stream.arrivals[1:], strict=False)
    ]
    usual = float(np.median([gap for _, gap in gaps])) if gaps else float("nan")
    within = [
        [gap for at, gap in gaps if swap.began <= at <= swap.first_token + 2 * usual] or [0.0]
        for swap in made
    ]
    return usual, [max(pauses) for pauses in within]


async def gate(house: House, seen: list[Stream]) -> None:
    """See that no call was lost, and that each was answered by the step that it says.

    Raises:
        RuntimeError: one was.
    """
    broken = [stream.error for stream in seen if stream.error or stream.policy is None]
    if broken:
        raise RuntimeError(f"{len(broken)} of {len(seen)} calls broke off, one by {broken[0]}")
    known = {ref.step for ref in house.engine.adapters()}
    for stream in [s for s in seen if s.policy != f"{NAME}@0"][-8:]:
        record = house.base.service.records.get([stream.record_id])[stream.record_id, 0]
        if f"{record.model}@{record.step}" != stream.policy or record.step not in known:
            raise RuntimeError(f"{stream.policy} answered, {record.model}@{record.step} is kept")
        assert record.step is not None
        apart = await _apart(house, record, record.step)
        other = await _apart(house, record, record.step - 1)
        print(f"gate: {stream.policy} is {apart:.4f} nats from itself, {other:.4f} from the last")
        limit = NOISE if torch.cuda.is_available() else NOISE / 10
        if apart > limit or other < 2 * apart:
            raise RuntimeError(f"a call of {stream.policy} was not answered by it alone")


async def scorings(house: House) -> float:
    """Seconds that the canary of a step takes (engine/swap_proof.py): 8 sequences, two steps."""
    ids = np.resize(np.arange(100, 300, dtype=np.int32), 256)
    began = time.monotonic()
    for _ in range(8):
        for step in (house.run.step - 1, house.run.step):
            await house.engine.score(AdapterRef(NAME, step), ids)
    return time.monotonic() - began


async def _apart(house: House, record: TokenRecord, step: int) -> float:
    """Mean nats between a record's logprobs and those that `step` gives the same ids."""
    ids = np.concatenate([record.prompt_ids, record.sampled_ids])
    scored = await house.engine.score(AdapterRef(NAME, step), ids)
    return float(np.abs(scored[len(record.prompt_ids) - 1 :] - record.logprobs).mean())


async def _measure(
    house: House, *, swaps: int, streams: int, tokens: int, pause: float, repeats: int
) -> Comparison:
    maker = Swaps(house)
    for _ in range(2):
        await maker.ours()  # the first ones compile
    made, seen = await under_load(maker, swaps=swaps, streams=streams, tokens=tokens, pause=pause)
    await gate(house, seen)
    usual, paused = stalls(made, seen)
    whole = np.array([swap.whole for swap in made]) * 1e3
    for name, values in {
        "whole": whole,
        "saved": np.array([s.saved - s.began for s in made]) * 1e3,
        "loaded": np.array([s.loaded - s.saved for s in made]) * 1e3,
        "first token": np.array([s.first_token - s.loaded for s in made]) * 1e3,
        "longest pause": np.array(paused) * 1e3,
    }.items():
        print(f"{name}: {np.median(values):.1f} ms, p95 {np.percentile(values, 95):.1f} ms")
    print(f"{len(seen)} calls went on, none lost; a decode step takes {usual * 1e3:.1f} ms")
    print(f"a canary of 16 scorings would add {1e3 * await scorings(house):.0f} ms")
    print(f"to write the files, without syncing them, took {1e3 * maker.written():.0f} ms")
    with tempfile.TemporaryDirectory() as folder:
        peer = []
        for i in range(repeats + 1):
            (Path(folder) / str(i)).mkdir()
            peer.append(1e3 * await maker.as_art(Path(folder) / str(i)))
    theirs = np.array(peer[1:])
    ours = float(np.percentile(whole, 95))
    low, mid, high = (float(np.percentile(theirs, q)) for q in (10, 50, 90))
    return Comparison(
        name=f"weight_swap, {streams} streams",
        ours=round(ours, 1),
        peer=round(mid, 1),
        peer_name="load_lora_adapter as ART does it, no streams",
        ratio=round(mid / ours, 3),
        goal="p95 <= 100 ms, pause <= 2 steps or 20 ms, ratio >= 5",
        spread=(round(low / ours, 3), round(high / ours, 3)),
        machine=machine(),
    )


def measure(
    house: House, *, swaps: int, streams: int, tokens: int, pause: float, repeats: int
) -> Comparison:
    """Swap under load, check, then in the peer's way; the line."""
    return asyncio.run(
        _measure(house, swaps=swaps, streams=streams, tokens=tokens, pause=pause, repeats=repeats)
    )


def vllm_config() -> VllmConfig:
    """vLLM that stays awake for us and can sleep for the peer."""
    if not torch.cuda.is_available():
        return ON_CPU
    return VllmConfig(while_training="stay", extra_args=("--enable-sleep-mode",))


def main() -> None:
    """Serve, measure and print the line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="5 swaps, 8 streams")
    parser.add_argument("--base-model", default=DEFAULT, help="name or folder")
    parser.add_argument("--random", action="store_true", help="random weights of 0.5B")
    parser.add_argument("--swaps", type=int, default=20)
    parser.add_argument("--streams", type=int, default=64)
    args = parser.parse_args()
    swaps, streams, tokens, pause = args.swaps, args.streams, 256, 1.0
    if args.quick:
        swaps, streams, tokens, pause = 5, 8, 64, 3.0
    with served(args.base_model, random_weights=args.random, vllm=vllm_config()) as house:
        line = measure(
            house,
            swaps=swaps,
            streams=streams,
            tokens=tokens,
            pause=pause,
            repeats=MIN_REPEATS,
        ).line()
        print(line)


if __name__ == "__main__":
    main()
