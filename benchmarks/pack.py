"""How fast captured trajectories become packed tensors, beside OpenPipe ART's tokenise-and-pack.

Both sides: the same rollouts, whose ids and logprobs were captured; one thread; from trajectory
groups to tensors that a step can be computed from, advantages and weights included. Gate: every
sampled token of every call is an entry that reads exactly its own context, with its logprob,
advantage and weight, and ART trains the same ids with the same logprobs and advantages. The tree is
counted apart, by the distinct prefixes of all calls. Unit: tokens of the rollouts a CPU second,
each rollout's conversation counted once. Goal: 100 times ART's, at most 1.02 times the tree's
positions, and rows at least 98 % full, the last one included.
"""

from __future__ import annotations

import argparse
import gc
import json
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import torch

import art_core as art
from art_core.batch.forest import Row, plant
from art_core.batch.minibatches import minibatches
from art_core.batch.select import select
from art_core.engine.tokenizer import HFTokenizer
from art_core.nn.base_model import resolve_base_model
from art_core.nn.memory import keep_freed_memory
from benchmarks.agent_load import MODEL, Conversation, Load, trajectory_groups
from benchmarks.comparison import MIN_REPEATS, Comparison, at_least_five, compare_seconds, machine

BASE = "HuggingFaceTB/SmolLM2-135M-Instruct"
"""Only its tokenizer is used."""
VOCABULARY = 49_152
"""Ids that its model knows."""
GOAL = ">= 100 times ART's tokens/s, positions <= 1.02 of the tree, fill >= 0.98"

Hashes: TypeAlias = npt.NDArray[np.uint64]
Peer: TypeAlias = Callable[[str], dict[str, Any]]


@dataclass(frozen=True)
class Size:
    """What the rows hold."""

    positions: int
    tree: int
    rows: int
    room: int

    @property
    def of_tree(self) -> float:
        return self.positions / self.tree

    @property
    def fill(self) -> float:
        return self.positions / (self.rows * self.room)


def pack(groups: Sequence[art.TrajectoryGroup], config: art.TrainConfig) -> list[Row]:
    """All that a train call does before its first row is computed; one optimizer step."""
    selection = select(groups, model=MODEL, step=0, config=config, vocab_size=VOCABULARY)
    (samples,) = minibatches(selection.samples, config, key=(0,))
    return plant(samples, config.max_tokens_per_row)


def as_tensors(rows: Sequence[Row]) -> list[list[torch.Tensor]]:
    """What ART's side ends with; they share the rows' memory."""
    parts = [(row.ids, row.depth, *vars(row.segments).values(), *vars(row.entries).values())
             for row in rows]  # fmt: skip
    return [[torch.from_numpy(array) for array in arrays] for arrays in parts]


# --- the gate ------------------------------------------------------------------------------------


def context_hashes(ids: npt.NDArray[Any], depth: npt.NDArray[Any]) -> Hashes:
    """A number for each (id, depth); a path's hash is the sum over it, modulo 2**64."""
    x = ids.astype(np.uint64) << np.uint64(32) | depth.astype(np.uint64)
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        x = (x + np.uint64(0x9E3779B97F4A7C15) ^ x >> np.uint64(shift)) * np.uint64(factor)
    mixed: Hashes = x ^ x >> np.uint64(31)
    return mixed


def row_hashes(row: Row) -> Hashes:
    """[N] the hash of what each position sees, itself included, read off the segments alone."""
    own = np.cumsum(context_hashes(row.ids, row.depth), dtype=np.uint64)
    before = np.concatenate([[np.uint64(0)], own])
    segments = row.segments
    whole = before[segments.end] - before[segments.start]
    above = np.zeros(len(row) + 1, np.uint64)
    np.add.at(above, segments.end, whole)
    np.subtract.at(above, segments.subtree_end, whole)
    lengths = segments.end - segments.start
    inside = own - np.repeat(before[segments.start], lengths)
    seen: Hashes = inside + np.cumsum(above, dtype=np.uint64)[:-1]
    return seen


def gate(
    conversations: list[list[Conversation]], rows: Sequence[Row], config: art.TrainConfig
) -> int:
    """Check the rows; the number of the tree's positions.

    Raises:
        RuntimeError: an entry is missing, doubled, or other than it should be.
    """
    prefixes: list[Hashes] = []
    wanted: list[tuple[Any, ...]] = []
    for group in conversations:
        mean = sum(one.reward for one in group) / len(group)
        for one in group:
            for turn in one.turns:
                path = np.concatenate([turn.prompt_ids, turn.sampled_ids[:-1]])
                hashes = np.cumsum(context_hashes(path, np.arange(len(path))), dtype=np.uint64)
                prefixes.append(hashes)
                n = len(turn.sampled_ids)
                contexts = hashes[len(turn.prompt_ids) - 1 :]
                advantage = np.full(n, one.reward - mean)
                wanted.append((contexts, turn.sampled_ids, turn.logprobs, advantage))
    found = [
        (row_hashes(row)[e.position], e.target, e.logprob, e.advantage)
        for row in rows
        for e in [row.entries]
    ]
    if not _same(_table(wanted), _table(found)):
        raise RuntimeError("the rows' entries are not those of the calls")
    total = sum(len(columns[0]) for columns in wanted)
    weights = np.concatenate([row.entries.weight for row in rows])
    if not np.allclose(weights, 1 / total, rtol=1e-12, atol=0):
        raise RuntimeError("the weights are not 1 / tokens of the step")
    if max(map(len, rows)) > config.max_tokens_per_row:
        raise RuntimeError("a row is longer than it may be")
    return len(np.unique(np.concatenate(prefixes)))


def gate_peer(conversations: list[list[Conversation]], file: Path) -> None:
    """Check that ART trains the same tokens of the same conversations.

    Raises:
        RuntimeError: it does not.
    """
    told = np.load(file)
    everyone = [one for group in conversations for one in group]
    ids = np.concatenate([one.ids for one in everyone])
    trained = told["mask"].astype(bool)
    logprobs = np.concatenate([turn.logprobs for one in everyone for turn in one.turns])
    sampled = np.concatenate([turn.sampled_ids for one in everyone for turn in one.turns])
    means = np.repeat([np.mean([one.reward for one in group]) for group in conversations],
                      [len(group) for group in conversations])  # fmt: skip
    advantages = np.array([one.reward for one in everyone]) - means
    if not (
        np.array_equal(told["ids"], ids)
        and np.array_equal(told["ids"][trained], sampled)
        and np.array_equal(told["logprobs"][trained].astype(np.float32), logprobs)
        and np.allclose(told["advantages"], advantages, rtol=1e-9, atol=1e-12)
    ):
        raise RuntimeError("ART tokenises the conversations otherwise than they were captured")


def _table(columns: Sequence[tuple[Any, ...]]) -> npt.NDArray[np.float64]:
    """Entries as rows of numbers, in an order of their own."""
    context = np.concatenate([c[0] for c in columns])
    parts = [context >> np.uint64(32), context & np.uint64(2**32 - 1)]
    parts += [np.concatenate([c[i] for c in columns]) for i in (1, 2, 3)]
    table = np.stack([part.astype(np.float64) for part in parts])
    exact = table[-2::-1]  # an advantage may differ in its last bit
    return table[:, np.lexsort(exact)]


def _same(one: npt.NDArray[np.float64], other: npt.NDArray[np.float64]) -> bool:
    return one.shape == other.shape and np.allclose(one, other, rtol=1e-12, atol=0)


# --- the peer ------------------------------------------------------------------------------------


@contextmanager
def art_process(
    python: Path, model: Path, conversations: list[list[Conversation]], room: int, file: Path
) -> Iterator[Peer]:
    """ART in a process of its own environment; give it a word, get its answer."""
    told = file.with_suffix(".json")
    told.write_text(json.dumps([[_told(one) for one in group] for group in conversations]))
    program = Path(__file__).with_name("art_peer.py")
    command = [str(python), str(program), str(told), str(model), str(room), str(file)]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=file.parent
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        stdin, stdout = process.stdin, process.stdout

        def ask(word: str) -> dict[str, Any]:
            print(word, file=stdin, flush=True)
            return _answer(stdout)

        _answer(stdout)
        yield ask
        stdin.close()


def _answer(lines: Any) -> dict[str, Any]:
    for line in lines:
        if line.startswith("{"):  # its libraries print, too
            answer: dict[str, Any] = json.loads(line)
            return answer
    raise RuntimeError("ART's process ended; see what it wrote to stderr")


def _told(one: Conversation) -> dict[str, Any]:
    turns = [[turn.sampled_ids.tolist(), turn.logprobs.tolist()] for turn in one.turns]
    return {"messages": one.messages, "turns": turns, "reward": one.reward}


# --- the figures ---------------------------------------------------------------------------------


def main() -> None:
    """Check, measure and print the line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="8 groups of 4 rollouts, 3 turns")
    parser.add_argument("--model", default=BASE, help="name or folder of the base model")
    parser.add_argument("--row", type=int, default=32_768, help="positions a row may have")
    parser.add_argument("--repeats", type=at_least_five, default=7)
    parser.add_argument(
        "--peer-python",
        type=lambda told: Path(told).absolute(),
        help="python of an environment with benchmarks/requirements-art.txt; without it only the "
        "gate and our own figures",
    )
    args = parser.parse_args()
    load, repeats = (Load(8, 4, 3), MIN_REPEATS) if args.quick else (Load(), args.repeats)
    torch.set_num_threads(1)
    keep_freed_memory()  # as in a process that trains
    base = resolve_base_model(args.model)
    conversations = load.draw(HFTokenizer(base), seed=0)
    tokens = sum(len(one.ids) for group in conversations for one in group)
    groups = trajectory_groups(conversations)
    config = art.TrainConfig(max_tokens_per_row=args.row)

    rows = pack(groups, config)
    tree = gate(conversations, rows, config)
    size = Size(sum(map(len, rows)), tree, len(rows), args.row)
    print(f"{load}: {tokens} tokens, {size}, of the tree {size.of_tree:.4f}, fill {size.fill:.4f}")

    def ours() -> float:
        gc.collect()  # what runs before leave behind is not this one's work
        began = time.process_time()
        as_tensors(pack(groups, config))
        return time.process_time() - began

    if args.peer_python is None:
        seconds = sorted(ours() for _ in range(repeats))[repeats // 2]
        print(f"ours alone: {tokens / seconds:.3g} tokens a CPU second")
        return
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "trained.npz"
        with art_process(args.peer_python, base, conversations, args.row, file) as ask:
            ask("check")
            gate_peer(conversations, file)
            told = ask("run")
            theirs = Size(told["positions"], tree, told["rows"], args.row)
            print(f"ART: of the tree {theirs.of_tree:.4f}, fill {theirs.fill:.4f}")
            mine, other, ratio, spread = compare_seconds(
                ours, lambda: float(ask("run")["seconds"]), repeats=repeats
            )
    found = Comparison(
        name="pack",
        ours=round(tokens / mine),
        peer=round(tokens / other),
        peer_name="openpipe-art 0.5.18, tokenize_trajectory_groups and packed_tensors",
        ratio=round(ratio, 1),
        goal=f"{GOAL}; got {size.of_tree:.4f} and {size.fill:.4f}",
        spread=(round(spread[0], 1), round(spread[1], 1)),
        machine=machine(),
    )
    print(found.line())


if __name__ == "__main__":
    main()
