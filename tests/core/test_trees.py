"""What may be computed as trees, how far, and in which rows."""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch", reason="art-langgraph[train] is not installed")

import torch

from art_core.batch.forest import plant
from art_core.batch.leaves import leaves_of
from art_core.config import EngineConfig
from art_core.engine.embedded import EmbeddedEngine
from art_core.engine.tokenizer import ByteTokenizer
from art_core.errors import BaseModelError, GroupError
from art_core.nn import gpu_plan
from art_core.nn.flex import padded_length
from art_core.nn.head import find_head
from art_core.nn.lora import LoraModel
from art_core.training.logprobs import chunk_size, entry_logprobs, tree_row
from art_core.training.rows import rows_for
from tests.core.families import make_model
from tests.core.samples import make_sample, random_calls


def model_of(name: str) -> LoraModel:
    return LoraModel(make_model(name), Path(name))


def test_rotary_embeddings_by_length_are_used_up_to_where_they_change(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO, "art_core")
    model = model_of("phi3 with longrope")
    assert model.context_length == 64
    assert "is used for up to 64 positions" in caplog.text
    (row,) = plant([make_sample([3] * 60, [5] * 6)], 100)
    with pytest.raises(GroupError, match=r"longer than the model's context: got '65 tokens'"):
        entry_logprobs(model, row)
    (row,) = plant([make_sample([3] * 60, [5] * 5)], 100)
    assert torch.isfinite(entry_logprobs(model, row)[0]).all()


@pytest.mark.parametrize(("name", "served"), [("mistral with a window", 6), ("llama", 256)])
def test_the_engine_serves_as_far_as_windows_hide_nothing(name: str, served: int) -> None:
    engine = EmbeddedEngine(model_of(name), ByteTokenizer(), base_model=name, config=EngineConfig())
    asyncio.run(engine.close())
    assert engine.context_length == served


@pytest.mark.parametrize("name", ["gemma2", "gpt-oss", "mamba", "bloom"])
def test_the_engine_refuses_what_it_would_serve_wrongly(name: str) -> None:
    with pytest.raises(BaseModelError, match="the embedded engine can't serve"):
        EmbeddedEngine(model_of(name), ByteTokenizer(), base_model=name, config=EngineConfig())


def test_logits_made_in_an_unknown_way_are_refused() -> None:
    model: Any = make_model("llama")
    hidden = torch.randn(3, 32, dtype=torch.float64)
    matrix = model.get_output_embeddings()
    with pytest.raises(BaseModelError, match="makes its logits in a way that is not known"):
        find_head(matrix, model.config, hidden, matrix(hidden) ** 3, tolerance=1e-5)


def test_a_leaf_holds_what_extends_each_other() -> None:
    """[1 2 3], then [1 2 3 4 5], extend each other; [1 2 9] does not."""
    calls = [([1, 2], [3, 4]), ([1, 2, 3, 4], [5, 6]), ([1, 2], [9, 9])]
    samples = [make_sample(prompt, sampled, call=i) for i, (prompt, sampled) in enumerate(calls)]
    assert [[s.call for s in leaf.samples] for leaf in leaves_of(samples)] == [[0, 1], [2]]


def test_models_that_share_nothing_get_rows_of_one_sequence() -> None:
    model, samples = model_of("lfm2"), random_calls(0)
    rows = rows_for(model, samples, 10_000)
    assert all(row.depth.tolist() == list(range(len(row))) for row in rows)
    assert sorted(c for row in rows for c in set(row.entries.call)) == list(range(len(samples)))


def test_what_only_goes_on_is_one_segment() -> None:
    """Three calls of one rollout, and another that leaves after the first: 3 segments, not 5."""
    turns = [([1], [2, 3]), ([1, 2, 3, 4], [5, 6]), ([1, 2, 3, 4, 5, 6, 7], [8, 9])]
    samples = [make_sample(prompt, sampled, call=i) for i, (prompt, sampled) in enumerate(turns)]
    (row,) = plant([*samples, make_sample([1, 2, 9], [9, 9], call=3)], 100)
    tree = tree_row(row)
    assert tree.start.tolist() == [0, 2, 8]
    assert tree.subtree_end.tolist() == [10, 8, 10]


@pytest.mark.model
def test_a_trained_model_in_bfloat16_shares_positions(smollm2: Path) -> None:
    """On a GPU models are trained in it; the probe may not take its rounding for other branches."""
    model = LoraModel.load(smollm2, dtype=torch.bfloat16)
    assert model.why_alone is None
    assert model.shares_positions


def test_few_large_pieces_are_told_from_many_small_ones() -> None:
    """A stem with 16 leaves is three calls; a hundred stems are too many to be worth it."""
    stem = list(range(5000))
    (row,) = plant([make_sample([*stem, 9000 + i] * 1, [1] * 50) for i in range(16)], 10_000)
    pieces = tree_row(row)._pieces
    assert pieces is not None
    assert [(p.q0, p.q1, p.k0, p.k1, len(p.cuts)) for p in pieces] == [
        (0, 5000, 0, 5000, 0),
        (5000, 5800, 5000, 5800, 17),
        (5000, 5800, 0, 5000, 0),
    ]
    many = [make_sample([i] * 9 + [j], [1] * 9) for i in range(100) for j in range(2)]
    (row,) = plant(many, 10_000)
    assert tree_row(row)._pieces is None
    assert gpu_plan.pieces([], 0) == []


def test_the_head_takes_little_memory_beside_all_logits() -> None:
    """0.012 of 32,768 positions, held twice: 196.6, in eights."""
    assert chunk_size(32_768) == 192
    assert chunk_size(32_768, held=3) == 128
    assert chunk_size(100) == 64  # fewer would waste the processor
    assert chunk_size(10**9) == 1024


def test_rows_are_padded_to_a_few_lengths() -> None:
    lengths = {padded_length(n) for n in range(1025, 16_385)}
    assert lengths == {1536, 2048, 3072, 4096, 6144, 8192, 12_288, 16_384}
    assert all(padded_length(n) >= n for n in range(1, 3000))
