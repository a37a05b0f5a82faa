"""What a step takes: the formula against what was measured, and how its parts add up."""

from __future__ import annotations

import pytest

from art_core.nn.keeping import layers_that_keep
from art_core.readiness.memory import Load, needs, training_step
from art_core.readiness.shape import Shape
from art_core.readiness.sizes import Sizes, sizes_of
from art_core.readiness.step_memory import Step, step_memory
from tests.readiness.models import shape

QWEN3 = {
    "0.6B": {"hidden_size": 1024, "num_hidden_layers": 28, "num_attention_heads": 16,
             "intermediate_size": 3072},
    "4B": {"hidden_size": 2560, "num_hidden_layers": 36, "num_attention_heads": 32,
           "intermediate_size": 9728},
}  # fmt: skip
"""benchmarks/gpu_update.py, which the figures of benchmarks/RESULTS.md were measured with."""
PREFIX = 8192 + 16 * 511
SHORT = 8192 + 16 * 63
AGENT = 1024 + 8 * (5 * (64 + 448) + 63)
"""Positions of a row: the last sampled token of a path is never read."""
GB = 10**9


def qwen3(name: str) -> tuple[Shape, Sizes]:
    found = shape("qwen3-8b", **QWEN3[name], tie_word_embeddings=True)
    sizes = sizes_of(found)
    assert sizes is not None
    return found, sizes


@pytest.mark.parametrize(
    ("name", "row", "measured"),
    [
        ("0.6B", PREFIX, 23.4),
        ("0.6B", SHORT, 13.8),
        ("0.6B", AGENT, 31.0),
        ("4B", PREFIX, 75.5),
        ("4B", SHORT, 46.3),
        ("4B", AGENT, 98.4),
    ],
)
def test_the_estimate_meets_what_an_h200_took(name: str, row: int, measured: float) -> None:
    """Peaks of torch's tensors in GB (benchmarks/RESULTS.md, "Trees on an H200"), rank 16, nothing
    computed twice; within 2 %. The program's own memory is not in those figures.
    """
    step = training_step("train", *qwen3(name), Load(length=row, rank=16))
    estimated = step.total - step.fixed["the program"]
    assert estimated / GB == pytest.approx(measured, rel=0.02)


def test_weights_and_adapter_are_counted() -> None:
    """Qwen3-0.6B has 596,049,920 weights; rank 16 trains 10,092,544, at 16 bytes each."""
    found, sizes = qwen3("0.6B")
    fixed = training_step("train", found, sizes, Load(length=512, rank=16)).fixed
    assert sizes.total == 596_049_920
    assert fixed["weights"] == 2 * 596_049_920
    assert fixed["adapter and optimizer"] == 16 * 10_092_544


@pytest.mark.parametrize(("row", "measured"), [(490, 1.912), (1486, 2.806), (2988, 4.177)], ids=str)
def test_the_estimate_meets_what_a_processor_took(row: int, measured: float) -> None:
    """SmolLM2-135M-Instruct, float32, rank 8: the peak of the whole process in GB, without an
    engine's keys and values; within 6 %."""
    smol = shape(
        "llama-3.2-1b", hidden_size=576, intermediate_size=1536, num_hidden_layers=30,
        num_attention_heads=9, num_key_value_heads=3, vocab_size=49152, head_dim=64,
        tie_word_embeddings=True,
    )  # fmt: skip
    sizes = sizes_of(smol)
    assert sizes is not None
    assert sizes.total == 134_515_008, "that is SmolLM2-135M"
    (need,) = (n for n in needs(smol, sizes, Load(row, rank=8, cached=0)) if n.way == "embedded")
    assert need.total / GB == pytest.approx(measured, rel=0.06)


def test_the_doctor_and_a_plan_ask_the_same() -> None:
    found, sizes = qwen3("4B")
    load = Load(length=4096, rank=16)
    (need,) = (n for n in needs(found, sizes, load) if n.way == "train")
    step = training_step("train", found, sizes, load)
    assert (need.parts, need.least) == (step.parts, step.least)


def test_layers_computed_again_keep_their_input_only() -> None:
    """Of 36 layers 10 keep all: 26 inputs, and one layer's part while it computes again."""
    found, _ = qwen3("4B")
    need = step_memory(found, Step(row=1000, weights=0, adapter=0))
    assert need.inputs == 1000 * 2560 * 2
    assert need.at(10) == 11 * need.layer + 26 * need.inputs + need.working + need.loss
    assert need.at(36) == need.total
    assert need.least == need.at(0)


def test_a_second_update_keeps_a_copy_to_undo_the_first() -> None:
    """Weights and both moments of each trained number, in float32."""
    found, _ = qwen3("4B")
    once, twice = (step_memory(found, Step(8, 0, 1000, updates=n)).total for n in (1, 2))
    assert twice - once == 1000 * 12


def test_what_is_made_dense_of_4_bits_counts() -> None:
    """The gate and the value of one layer, side by side in bfloat16."""
    found, _ = qwen3("4B")
    plain, small = (step_memory(found, Step(8, 0, 0, four_bit=four)) for four in (False, True))
    assert small.working - plain.working == 2 * 2560 * 9728 * 2


@pytest.mark.parametrize(
    ("room", "kept"),
    [
        (1000, 10),  # 10 x 50 are under 700
        (600, 8),  # 420 for layers that keep: 8; with 2 inputs and one layer more 460, of 540
        (150, 0),  # 2 x 50 are under 105, but with 10 inputs and one layer more they are 170
    ],
)
def test_fewer_layers_keep_where_the_others_leave_no_room(room: int, kept: int) -> None:
    assert layers_that_keep(room, layer=50, inputs=5, layers=10) == kept
