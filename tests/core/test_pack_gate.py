"""The gate of the packing benchmark: it passes what is right, and nothing else."""

from dataclasses import replace

import numpy as np
import pytest

import art_core as art
from art_core.batch.forest import Row
from art_core.engine.tokenizer import ByteTokenizer
from benchmarks.agent_load import Load, trajectory_groups
from benchmarks.pack import gate, pack

LOAD = Load(3, 4, 3, system=20, task=(5, 15), answer=(2, 8), observation=(5, 20))
CONFIG = art.TrainConfig(max_tokens_per_row=2000)
CONVERSATIONS = LOAD.draw(ByteTokenizer(), seed=0)


def packed() -> list[Row]:
    return pack(trajectory_groups(CONVERSATIONS), CONFIG)


def test_rows_of_several_trees_pass() -> None:
    """The tree is as large as the set of all prefixes."""
    rows = packed()
    assert len(rows) > 1
    prefixes = {
        turn.prompt_ids.tobytes()[: 4 * n] + turn.sampled_ids.tobytes()[: 4 * m]
        for group in CONVERSATIONS
        for one in group
        for turn in one.turns
        for n, m in [
            *((i, 0) for i in range(1, len(turn.prompt_ids) + 1)),
            *((len(turn.prompt_ids), i) for i in range(1, len(turn.sampled_ids))),
        ]
    }
    assert gate(CONVERSATIONS, rows, CONFIG) == len(prefixes)


@pytest.mark.parametrize("name", ["position", "target", "logprob", "advantage", "weight"])
def test_an_entry_that_is_other_is_found(name: str) -> None:
    rows = packed()
    values = getattr(rows[0].entries, name).copy()
    values[7] += 1
    rows[0] = replace(rows[0], entries=replace(rows[0].entries, **{name: values}))
    with pytest.raises(RuntimeError, match="are not"):
        gate(CONVERSATIONS, rows, CONFIG)


def test_a_context_that_is_other_is_found() -> None:
    """An id in the stem; a segment that sees less than it should."""
    rows = packed()
    ids = rows[0].ids.copy()
    ids[3] += 1
    with pytest.raises(RuntimeError, match="are not those of the calls"):
        gate(CONVERSATIONS, [replace(rows[0], ids=ids), *rows[1:]], CONFIG)
    segments = rows[0].segments
    ends = np.minimum(segments.subtree_end, segments.end[1])
    ends = np.maximum(ends, segments.end)
    less = replace(rows[0], segments=replace(segments, subtree_end=ends))
    with pytest.raises(RuntimeError, match="are not those of the calls"):
        gate(CONVERSATIONS, [less, *rows[1:]], CONFIG)


def test_rows_that_are_missing_or_too_long_are_found() -> None:
    rows = packed()
    with pytest.raises(RuntimeError, match="are not those of the calls"):
        gate(CONVERSATIONS, rows[1:], CONFIG)
    with pytest.raises(RuntimeError, match="longer than it may be"):
        gate(CONVERSATIONS, rows, art.TrainConfig(max_tokens_per_row=100))
