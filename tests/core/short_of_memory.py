"""Steps in a process whose memory really ends: `python -m tests.core.short_of_memory BASE`.

Each way is played calm first, and then under a limit of the address space that the system itself
holds: what does not fit is refused by mmap, as on a machine that is full. A line of JSON for each
way says what came of it. To be started with `ENVIRONMENT`, so that what is freed is given back.
"""

from __future__ import annotations

import json
import logging
import re
import resource
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from art_core.batch.sample import Sample
from art_core.config import LoraSettings, TrainConfig, TrainSFTConfig
from art_core.errors import TrainingError
from art_core.nn.lora import LoraModel
from art_core.training import attempt
from art_core.training.sft import train_supervised
from art_core.training.trainer import Trainer
from tests.core.samples import make_sample
from tests.core.tiny_policy import NAME, same_bits, shake, tensors_alive, tiny_policy, weights

ENVIRONMENT = {"MALLOC_MMAP_THRESHOLD_": "16384", "OMP_NUM_THREADS": "1"}
CALLS, LENGTH = 240, 100
CONFIG = TrainConfig(learning_rate=1e-3, max_tokens_per_row=CALLS * LENGTH)
"""One row of 23,760 positions."""
ROWS = CONFIG.model_copy(update={"max_tokens_per_row": CALLS * LENGTH // 4})
"""Four of them and a little."""
Step = Callable[[Trainer, Callable[[int, int], None] | None], dict[str, float]]


def calls() -> list[Sample]:
    rng = np.random.default_rng(0)
    ids = rng.integers(0, 250, (CALLS, LENGTH)).astype(np.int32)
    return [
        make_sample(
            row[:-8],
            row[-8:],
            advantage=float(rng.normal()),
            call=i,
            logprobs=rng.normal(-5.7, 0.3, 8).tolist(),
        )
        for i, row in enumerate(ids)
    ]


def status(name: str) -> int:
    found = re.search(rf"^{name}:\s+(\d+) kB$", Path("/proc/self/status").read_text(), re.MULTILINE)
    assert found is not None
    return int(found[1]) * 1024


def limit(spare: int | None) -> None:
    """Let the address space grow by so many bytes more; None: without limit."""
    size = resource.RLIM_INFINITY if spare is None else status("VmSize") + spare
    resource.setrlimit(resource.RLIMIT_AS, (size, resource.RLIM_INFINITY))


def fill(hog: list[bytearray]) -> None:
    """Take all the memory that there is, but a megabyte for small things."""
    limit(0)
    while True:
        try:
            hog.append(bytearray(2**15))
        except MemoryError:
            del hog[-32:]
            return


def taken(step: Step, trainer: Trainer) -> int:
    """Bytes that a step needs beyond what there is before it."""
    Path("/proc/self/clear_refs").write_text("5")
    before = status("VmRSS")
    step(trainer, None)
    return status("VmHWM") - before


def policy(config: TrainConfig) -> Step:
    return lambda trainer, tell: trainer.step(calls(), config, on_progress=tell)


def supervised(trainer: Trainer, tell: Callable[[int, int], None] | None) -> dict[str, float]:
    config = TrainSFTConfig(learning_rate=1e-3, max_tokens_per_row=CALLS * LENGTH)
    return train_supervised(trainer, [calls()], config, on_progress=tell)


def halved(base: Path, step: Step) -> dict[str, Any]:
    """A limit that a row does not fit in, and half of it does."""
    calm, short = tiny_policy(base), tiny_policy(base)
    needed = taken(step, Trainer(calm, NAME, seed=0))
    trainer = Trainer(short, NAME, seed=0)
    limit(int(0.7 * needed))
    figures = step(trainer, None)
    limit(None)
    return {"needed": needed, "worst": worst(short, calm), **figures}


def in_the_middle(base: Path) -> dict[str, Any]:
    """Memory is filled after two rows of several; it is free again when the step begins anew."""
    calm, short = tiny_policy(base), tiny_policy(base)
    step, told, hog = policy(ROWS), list[int](), list[bytearray]()
    step(Trainer(calm, NAME, seed=0), None)

    class Release(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            hog.clear()
            limit(None)

    def tell(done: int, total: int) -> None:
        told.append(done)
        if len(told) == 2:
            fill(hog)

    release, log = Release(), logging.getLogger(attempt.__name__)
    log.addHandler(release)
    figures = step(Trainer(short, NAME, seed=0), tell)
    log.removeHandler(release)
    return {"told": told, "worst": worst(short, calm), **figures}


def in_the_optimizer(base: Path) -> dict[str, Any]:
    """An adapter of 2 MB whose copies do not fit: nothing smaller helps, and nothing is changed."""
    made = []
    for _ in range(2):
        module = LoraModel.load(base)
        module.create_adapter(NAME, LoraSettings(rank=512, alpha=8.0), seed=0)
        shake(module, 0)
        trainer = Trainer(module, NAME, seed=0)
        trainer.step(calls()[:4], CONFIG)
        made.append((module, trainer))
    (calm, untroubled), (short, trainer) = made
    before, there = weights(short), tensors_alive()
    said, hog = "", list[bytearray]()

    def tell(done: int, total: int) -> None:
        if done == total and not hog:
            fill(hog)

    try:
        trainer.step(calls()[:4], CONFIG, on_progress=tell)
    except TrainingError as error:
        said = str(error)
    limit(None)
    hog.clear()
    unchanged, alive = same_bits(weights(short), before), tensors_alive() - there
    for each in (untroubled, trainer):
        each.step(calls()[4:8], CONFIG)
    return {
        "error": said,
        "unchanged": unchanged,
        "alive": alive,
        "next": same_bits(weights(short), weights(calm)),
    }


def always(base: Path) -> dict[str, Any]:
    """A limit that half a row does not fit in either; then memory is there again."""
    calm, short = tiny_policy(base), tiny_policy(base)
    step = policy(CONFIG)
    untroubled, trainer = (Trainer(each, NAME, seed=0) for each in (calm, short))
    for each in (untroubled, trainer):
        each.step(calls()[:4], CONFIG)
    needed = taken(step, untroubled)
    before, there, said = weights(short), tensors_alive(), ""
    limit(int(0.2 * needed))
    try:
        step(trainer, None)
    except TrainingError as error:
        said = str(error)
    limit(None)
    unchanged, alive = same_bits(weights(short), before), tensors_alive() - there
    step(trainer, None)
    return {"error": said, "unchanged": unchanged, "alive": alive, "worst": worst(short, calm)}


def worst(got: LoraModel, expected: LoraModel) -> float:
    ours, theirs = weights(got), weights(expected)
    scale = max(float(value.abs().max()) for value in theirs.values())
    return max(float((ours[key] - theirs[key]).abs().max()) for key in ours) / scale


WAYS: dict[str, Callable[[Path], dict[str, Any]]] = {
    "step": lambda base: halved(base, policy(CONFIG)),
    "reference": lambda base: halved(
        base, policy(CONFIG.model_copy(update={"kl_penalty_coef": 0.1}))
    ),
    "supervised": lambda base: halved(base, supervised),
    "in the middle": in_the_middle,
    "in the optimizer": in_the_optimizer,
    "always": always,
}


def main(base: str, *names: str) -> None:
    torch.set_num_threads(1)
    taken(policy(CONFIG), Trainer(tiny_policy(Path(base)), NAME, seed=0))  # libraries come in
    for name in names or WAYS:
        print(json.dumps({"way": name, **WAYS[name](Path(base))}), flush=True)  # noqa: T201


if __name__ == "__main__":
    main(*sys.argv[1:])
