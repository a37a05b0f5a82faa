"""A trained model on the tiny base model, small enough to be trained in a blink.

Also a program: `python -m tests.core.small_run BASE RUNS GROUPS...` registers the model, says so,
and at each line that it is given trains the next file of groups. A line "die" in front of it makes
it kill itself in the middle of saving.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from openai.types.chat import ChatCompletion

import art_core as art
from art_core.trajectory_files import read_trajectories

NAME, PROJECT = "agent", "project"
CONFIG = art.TrainConfig(learning_rate=1e-2, minibatches=2)
"""Steps that are felt in every answer; two updates, so that their order counts."""
SETTINGS = art.ModelConfig(
    lora=art.LoraSettings(rank=4, alpha=8.0),
    engine=art.EngineConfig(threads=1),
    sampling=art.SamplingConfig(max_tokens=6),
)


def small_model(base: Path, runs: Path, **changes: Any) -> art.TrainableModel[Any]:
    """The model, not registered yet; its run folder is below `runs`."""
    fields = {"name": NAME, "project": PROJECT, "base_model": str(base), "art_config": SETTINGS}
    return art.TrainableModel(**{**fields, "base_path": str(runs), **changes})


def run_folder(runs: Path, name: str = NAME) -> Path:
    return runs / PROJECT / "models" / name


async def say(
    model: art.TrainableModel[Any], text: str = "Hi", *, name: str | None = None, **options: Any
) -> ChatCompletion:
    """A call over HTTP; by default of the latest step."""
    completion: ChatCompletion = await model.openai_client().chat.completions.create(
        model=name or model.name, messages=[{"role": "user", "content": text}], **options
    )
    return completion


async def figures(model: art.TrainableModel[Any], name: str) -> list[float]:
    """What `name` thinks of an answer: the logprobs of six greedy tokens.

    They differ by batch noise at most where the policy is the same.
    """
    completion = await say(model, "figures", name=name, temperature=0, max_tokens=6, logprobs=True)
    logprobs = completion.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.content is not None
    return [token.logprob for token in logprobs.content]


async def play(
    model: art.TrainableModel[Any], *rewards: Sequence[float | None], key: str = "play"
) -> list[art.TrajectoryGroup]:
    """A group for each sequence of rewards; each rollout is a conversation of two calls."""

    async def rollout(text: str, reward: float | None) -> art.Trajectory:
        messages: list[Any] = [{"role": "user", "content": text}]
        for again in ("And then?", None):
            completion = await model.openai_client().chat.completions.create(
                model=model.name, messages=messages
            )
            messages += [completion.choices[0].message.model_dump(include={"role", "content"})]
            messages += [{"role": "user", "content": again}] if again else []
        return art.Trajectory(reward=reward)

    groups = [
        art.TrajectoryGroup(rollout(f"scenario {i}", reward) for reward in column)
        for i, column in enumerate(rewards)
    ]
    return await art.gather_trajectory_groups(groups, progress=False, key=key)


def trained_bytes(runs: Path, step: int, name: str = NAME) -> dict[str, bytes]:
    """What training left in a checkpoint, bit for bit."""
    folder = run_folder(runs, name) / "checkpoints" / f"{step:04d}"
    files = ("adapter_model.safetensors", "optimizer.safetensors", "trainer.json")
    return {file: (folder / file).read_bytes() for file in files}


def die_when_saving() -> None:
    """Kill this process, as `kill -9` does, when a checkpoint is about to get its name."""

    def watch(event: str, args: tuple[object, ...]) -> None:
        if event == "os.rename" and "checkpoints" in str(args[0]):
            os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(watch)


async def main(base: str, runs: str, *files: str) -> None:
    model = small_model(Path(base), Path(runs))
    backend = art.LocalBackend(show_progress=False)
    await model.register(backend)
    for file in files:
        print("ready at step", await model.get_step(), flush=True)  # noqa: T201 - a program
        if (await asyncio.to_thread(sys.stdin.readline)).strip() == "die":
            die_when_saving()
        await model.train(read_trajectories(Path(file)), CONFIG)
    print("done", flush=True)  # noqa: T201 - a program
    await backend.close()


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
