"""Supervised passes over a small file on the tiny model.

Also a program: `python -m tests.core.sft_run BASE RUNS FILE DIES` trains as `PASSES` says and kills
itself, as `kill -9` does, when checkpoint DIES is about to get its name.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import art_core as art
from art_core.bookmarks import Bookmark
from art_core.config import TrainSFTConfig
from tests.core.small_run import small_model

ROWS = 10
PASSES: dict[str, Any] = {
    "epochs": 3,
    "batch_size": 2,
    "peak_lr": 2e-2,
    "steps_per_checkpoint": 1,
}
"""15 optimizer steps, each a checkpoint."""


def write_rows(path: Path, count: int = ROWS) -> Path:
    """Row i asks "q<i>" and answers by a letter of its own."""
    rows = [
        {
            "messages": [
                {"role": "user", "content": f"q{i}"},
                {"role": "assistant", "content": "abcdefghijklmnop"[i] * 3},
            ]
        }
        for i in range(count)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


class WatchedBackend(art.LocalBackend):
    """The real one, which notes the rows that it trains."""

    def __init__(self) -> None:
        super().__init__(show_progress=False)
        self.seen: list[list[int]] = []
        """The rows of each step."""

    async def train_sft(
        self,
        model: art.TrainableModel[Any],
        trajectories: Sequence[art.Trajectory],
        config: TrainSFTConfig,
        *,
        bookmark: Bookmark | None = None,
    ) -> art.TrainResult:
        self.seen.append([int(t.messages()[0]["content"][1:]) for t in trajectories])
        return await super().train_sft(model, trajectories, config, bookmark=bookmark)


async def passes(
    base: Path, runs: Path, file: Path, **options: Any
) -> tuple[art.SFTResult, list[list[int]]]:
    """Go on with the run below `runs`; what it did, and the rows of each step."""
    model = small_model(base, runs)
    async with WatchedBackend() as backend:
        await model.register(backend)
        result = await art.train_sft_from_file(model, file, **{**PASSES, **options})
        return result, backend.seen


def die_when_saving(step: int) -> None:
    def watch(event: str, args: tuple[object, ...]) -> None:
        if event == "os.rename" and f".tmp-{step:04d}" in str(args[0]):
            os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(watch)


def main(base: str, runs: str, file: str, dies: str) -> None:
    die_when_saving(int(dies))
    asyncio.run(passes(Path(base), Path(runs), Path(file)))


if __name__ == "__main__":
    main(*sys.argv[1:])
