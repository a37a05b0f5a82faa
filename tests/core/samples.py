"""Samples of calls, small and hand-made, and what a row says about them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from art_core.batch.forest import Row
from art_core.batch.sample import Sample
from art_core.calls import Ids


def make_sample(
    prompt: Sequence[int] | Ids,
    sampled: Sequence[int] | Ids,
    *,
    advantage: float = 1.0,
    weight: float = 1.0,
    logprobs: Sequence[float] | None = None,
    temperature: float = 1.0,
    distorted: bool = False,
    call: int = 0,
    trajectory: int | None = None,
    staleness: int = 0,
) -> Sample:
    """One call; its trajectory is a trajectory of its own unless another is named."""
    return Sample(
        prompt_ids=np.array(prompt, np.int32),
        sampled_ids=np.array(sampled, np.int32),
        logprobs=np.array(logprobs if logprobs is not None else [0.0] * len(sampled), np.float32),
        advantage=advantage,
        weight=weight,
        temperature=temperature,
        distorted=distorted,
        call=call,
        trajectory=call if trajectory is None else trajectory,
        staleness=staleness,
    )


def random_calls(seed: int, *, vocab: int = 40, groups: int = 3) -> list[Sample]:
    """Calls as an agent's rollouts make them: nested stems, repeats, prefixes, parallel branches.

    Every group has a prompt over a common stem; of its rollouts some go on with a second call, some
    answer the same prompt twice, some start anew, and one is a copy of another.
    """
    rng = np.random.default_rng(seed)

    def draw(low: int, high: int) -> list[int]:
        return [int(x) for x in rng.integers(0, vocab, int(rng.integers(low, high)))]

    calls: list[tuple[list[int], list[int], int]] = []
    stem = draw(5, 9)
    trajectory = 0
    for _ in range(groups):
        prompt = stem + draw(2, 6)
        answer: list[int] = []
        for kind in ("chain", "parallel", "foreign", "single token"):
            answer = draw(1, 2) if kind == "single token" else draw(1, 5)
            calls.append((prompt, answer, trajectory))
            if kind == "chain":
                calls.append((prompt + answer + draw(1, 4), draw(1, 5), trajectory))
            elif kind == "parallel":
                calls.append((prompt, draw(1, 5), trajectory))
            elif kind == "foreign":
                calls.append((draw(1, 3), draw(1, 4), trajectory))
            trajectory += 1
        calls.append((prompt, answer, trajectory))  # the same call again, in another trajectory
        trajectory += 1
    order = rng.permutation(len(calls))
    return [
        make_sample(
            calls[at][0],
            calls[at][1],
            advantage=float(rng.normal()),
            weight=float(rng.random()),
            logprobs=rng.normal(-2.0, 0.5, len(calls[at][1])).tolist(),
            temperature=float(rng.choice([0.5, 1.0, 2.0])),
            distorted=bool(rng.random() < 0.2),
            call=index,
            trajectory=calls[at][2],
            staleness=index % 3,
        )
        for index, at in enumerate(order)
    ]


def learned(figures: Mapping[str, float]) -> set[str]:
    """Names of the figures that say what was learned, not how long it took and in what memory."""
    return {f for f in figures if "seconds" not in f and not f.startswith("memory/")}


def policy_calls(seed: int = 0) -> list[Sample]:
    """Random calls whose sampler was near the policy: old logprobs of about -log 300."""
    rng = np.random.default_rng([seed, 1])
    return [
        sample._replace(
            logprobs=rng.normal(-5.7, 0.3, len(sample.sampled_ids)).astype(np.float32),
            weight=0.0,
        )
        for sample in random_calls(seed, vocab=300, groups=2)
    ]


def ancestors(row: Row) -> list[list[int]]:
    """For each position of the row, the positions it sees, from the root on, itself the last.

    Read off the segments alone: a position sees its own segment up to itself, and the whole of
    every segment below which it lies.
    """
    segments = list(
        zip(
            row.segments.start.tolist(),
            row.segments.end.tolist(),
            row.segments.subtree_end.tolist(),
            strict=True,
        )
    )
    seen = []
    for position in range(len(row)):
        path: list[int] = []
        for start, end, below in segments:
            if end <= position < below:
                path += range(start, end)
            elif start <= position < end:
                path += range(start, position + 1)
        seen.append(path)
    return seen
