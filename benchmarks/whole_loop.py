"""The whole loop behind vLLM: the quickstart's agent learns, and what each step costs is written.

In: a base model, a number of steps. Out: a line for each step: rewards, seconds by phase, the
canary's figures, memory of the GPU, of the trainer and of all processes, which answered; last one
line of JSON. On one GPU vLLM sleeps while a step is trained (`--while-training`), and the memory
that it gives back is watched from this process. Nothing is compared: this is a proof, not a race.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import tempfile
import threading
import time
import warnings
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, Self

import numpy as np
import torch

import art_core as art
from art_core.config import VllmConfig
from art_core.engine.vllm import VllmEngine
from art_core.runlog import summarize
from art_langgraph import ChatArt, SamplingOverridden
from art_langgraph.quickstart.clientele import Clientele, make_clientele
from art_langgraph.quickstart.loop import Desk, warm_up
from art_langgraph.quickstart.recipe import Recipe
from art_langgraph.quickstart.shop import Shop, support_agent
from benchmarks.comparison import machine
from benchmarks.served_model import ON_CPU

GIB = 2**30
_LOOK_SECONDS = 0.02


class MemoryWatch:
    """Looks at the GPU's memory all the time, from a thread, within a `with`."""

    def __init__(self) -> None:
        self._least, self._most = math.inf, 0.0
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._look)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()

    def since_last(self) -> dict[str, float]:
        """GiB of the GPU that were in use since this was asked last: most and least."""
        told = {"gpu_most": round(self._most, 2), "gpu_least": round(self._least, 2)}
        self._least, self._most = math.inf, 0.0
        return told if torch.cuda.is_available() else {}

    def _look(self) -> None:
        while torch.cuda.is_available() and not self._ended.wait(_LOOK_SECONDS):
            free, whole = torch.cuda.mem_get_info()
            used = (whole - free) / GIB
            self._least, self._most = min(self._least, used), max(self._most, used)


def memory() -> dict[str, float]:
    """GiB of the machine now: of this process, and with the trainer's and vLLM's."""
    told = {"host": _resident("self")}
    told["host_all"] = round(sum(map(_resident, _offspring("self"))) + told["host"], 3)
    return told


def _offspring(process: str) -> Iterator[str]:
    """Ids of the processes that each thread of a process started, and that those started."""
    for children in Path(f"/proc/{process}/task").glob("*/children"):
        try:
            found = children.read_text().split()
        except OSError:  # it ended meanwhile
            continue
        for pid in found:
            yield pid
            yield from _offspring(pid)


def _resident(pid: str) -> float:
    try:
        text = Path(f"/proc/{pid}/statm").read_text()
    except OSError:  # it ended meanwhile
        return 0.0
    return round(int(text.split()[1]) * 4096 / GIB, 3)


class Loop:
    """One model learning to be the shop's assistant."""

    def __init__(self, desk: Desk, clientele: Clientele, watch: MemoryWatch) -> None:
        self._desk, self._clientele, self._watch = desk, clientele, watch
        self.rows: list[dict[str, Any]] = []

    async def step(self, number: int) -> dict[str, Any]:
        """Play and learn step `number`, counted from 0."""
        desk, began = self._desk, time.monotonic()
        self._watch.since_last()
        groups = await art.gather_trajectory_groups(
            (
                art.TrajectoryGroup(desk.serve(customer) for _ in range(desk.recipe.group_size))
                for customer in self._clientele.of_step(number, desk.recipe.groups)
            ),
            max_exceptions=0.5,
            progress=False,
            key=f"step-{number}",
        )
        gathered = time.monotonic() - began
        result = await desk.model.train(groups, desk.recipe.train_config(number))
        told = summarize(groups)
        answered = Counter(c.step for g in groups for t in g for c in t.calls)
        row = {
            "step": result.step,
            "reward": round(told["reward"], 3),
            "success": round(told["success"], 3),
            "failed": sum(len(g.exceptions) for g in groups),
            "answered_by": {str(step): calls for step, calls in answered.items()},
            "gather_s": round(gathered, 2),
            "train_s": round(time.monotonic() - began - gathered, 2),
            **self._watch.since_last(),
            **memory(),
            **{
                name: round(value, 4)
                for name, value in result.metrics.items()
                if name.startswith(("swap/", "seconds", "memory/", "drift", "entropy", "mismatch"))
                or name.endswith("_seconds")
            },
        }
        self.rows.append(row)
        print(json.dumps(row), flush=True)
        return row

    async def examine(self, when: str) -> float:
        """Share of the held-out customers served right, greedily."""
        groups = await self._desk.examine(self._clientele.held_out, when)
        told = summarize(groups)
        print(f"held out {when}: success {told['success']:.3f}, reward {told['reward']:.3f}")
        return float(told["success"])


async def run(
    recipe: Recipe, vllm: VllmConfig, trainer: art.TrainerConfig, kept_in: str, seconds: float
) -> dict[str, Any]:
    """The loop, from loading to the held-out customers after it.

    Args:
        seconds: after which no further step is begun.
    """
    settings = recipe.model_config().model_copy(
        update={"engine": art.EngineConfig(kind="vllm", vllm=vllm), "trainer": trainer}
    )
    model: art.TrainableModel[Any] = art.TrainableModel(
        name="shop",
        project="loop",
        base_model=recipe.base_model,
        base_path=kept_in,
        art_config=settings,
    )
    clientele = make_clientele(recipe)
    began = time.monotonic()
    with MemoryWatch() as watch:
        async with art.LocalBackend(show_progress=False) as backend:
            await model.register(backend)
            phases = {"load": time.monotonic() - began}
            [base] = backend._bases.values()
            assert isinstance(base.engine, VllmEngine)
            print(f"loaded in {phases['load']:.1f} s; {memory()}", flush=True)
            shop = Shop(clientele.orders)
            agent = support_agent(ChatArt(temperature=0, max_tokens=recipe.max_tokens), shop)
            desk = Desk(agent, model, recipe, progress=False)
            loop = Loop(desk, clientele, watch)
            with timed(phases, "before"):
                cold = await loop.examine("before")
            with timed(phases, "warm up"):
                await warm_up(desk, clientele.lessons, shop)
            with timed(phases, "before"):
                warm = await loop.examine("after the warm-up")
            with timed(phases, "learn"):
                learning = time.monotonic()
                for step in range(recipe.max_steps):
                    if time.monotonic() - learning < seconds:
                        await loop.step(step)
            with timed(phases, "after"):
                after = await loop.examine("after")
            drifts = dict(base.service.drifts)
            shop.close()
            with timed(phases, "close"):
                await backend.close()
    return {**summed_up(loop.rows), "held_out": [cold, warm, after], "drifts": drifts} | {
        "phases_s": {name: round(seconds, 1) for name, seconds in phases.items()}
    }


@contextmanager
def timed(phases: dict[str, float], name: str) -> Iterator[None]:
    """Add the seconds of what is inside."""
    began = time.monotonic()
    yield
    phases[name] = phases.get(name, 0.0) + time.monotonic() - began


def summed_up(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """What the steps say together."""
    swaps = Counter(
        "none" if "swap/proved" not in row else "proved" if row["swap/proved"] else "inconclusive"
        for row in rows
    )
    slopes = [row["swap/slope"] for row in rows if row.get("swap/proved")] or [math.nan]
    late = [row for row in rows if row["step"] > rows[0]["step"] + 1]  # the first ones compile
    growth = {
        name: round(late[-1][name] - late[0][name], 3)
        for name in ("host", "host_all", "tensors", "gpu_most", "gpu_least")
        if late and name in late[0]
    }
    return {
        "name": "whole_loop",
        "steps": len(rows),
        "reward": [row["reward"] for row in rows],
        "swaps": dict(swaps),
        "slope": [round(float(np.percentile(slopes, q)), 3) for q in (0, 50, 100)]
        if slopes
        else [],
        "growth_gib": growth,
        "step_s": round(float(np.median([r["gather_s"] + r["train_s"] for r in rows])), 2),
    }


def main() -> None:
    """Run it and print the line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="2 small steps that teach nothing")
    parser.add_argument("--base-model", default=Recipe().base_model, help="name or folder")
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--seconds", type=float, default=math.inf, help="begin no step later")
    parser.add_argument("--rate", type=float, help="learning rate; the recipe's")
    parser.add_argument("--decay", type=float, default=0.96, help="of the rate, a step")
    parser.add_argument("--while-training", choices=("auto", "sleep", "stay"), default="auto")
    parser.add_argument("--gpu-share", type=float, help="of the memory, for vLLM")
    parser.add_argument("--layers", choices=("own", "unsloth"), default="own")
    parser.add_argument("--vllm-arg", action="append", default=[], help="further flags of vLLM")
    args = parser.parse_args()
    recipe = replace(Recipe(base_model=args.base_model), max_steps=args.steps)
    recipe = replace(recipe.quick() if args.quick else recipe, rate_decay=args.decay)
    if args.rate:
        train = recipe.train.model_copy(update={"learning_rate": args.rate})
        recipe = replace(recipe, train=train)
    while_training: Literal["auto", "sleep", "stay"] = args.while_training
    base = VllmConfig() if torch.cuda.is_available() else ON_CPU
    vllm = base.model_copy(
        update={
            "context_length": 2048,
            "while_training": while_training,
            "gpu_share": args.gpu_share,
            "extra_args": (*base.extra_args, *args.vllm_arg),
        }
    )
    warnings.simplefilter("ignore", SamplingOverridden)  # training explores, evaluation is greedy
    with tempfile.TemporaryDirectory() as folder:
        try:
            trainer = art.TrainerConfig(layers=args.layers)
            found = asyncio.run(run(recipe, vllm, trainer, folder, args.seconds))
        finally:
            print(_told(Path(folder)), flush=True)
    print(json.dumps({**found, "layers": args.layers, "machine": machine()}))


def _told(folder: Path) -> str:
    """What vLLM's log says of sleeping and waking."""
    words = ("fall asleep", "wake up", "Sleep mode", "GPU KV cache size", "Available KV")
    lines = [
        line.split("] ", 1)[-1]
        for log in folder.rglob("vllm.log")
        for line in log.read_text(errors="replace").splitlines()
        if any(word in line for word in words)
    ]
    return "\n".join(lines)


if __name__ == "__main__":
    main()
