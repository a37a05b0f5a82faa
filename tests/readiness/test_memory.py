"""Memory of serving and training: sums that can be done by hand, and what fits where."""

from __future__ import annotations

from dataclasses import replace

import pytest

from art_core.readiness.about_memory import about_memory, rows
from art_core.readiness.machine import Gpu, Machine
from art_core.readiness.memory import (
    GIB,
    Load,
    Need,
    kv_bytes,
    needs,
    weight_bytes,
)
from art_core.readiness.shape import Shape
from art_core.readiness.sizes import Sizes, sizes_of
from tests.readiness.models import shape

LOAD = Load()
LAPTOP = Machine(
    system="Linux x86_64",
    python="3.12.1",
    cores=8,
    memory=16 * GIB,
    free_memory=12 * GIB,
    gpus=(),
    why_no_gpu="NVIDIA's driver is not installed",
    driver=None,
    cuda=None,
    packages={
        "torch": "2.13.0+cpu",
        "transformers": "5.24.0",
        "peft": "0.21.2",
        "bitsandbytes": None,
        "unsloth": None,
    },
    why_torch_is_blind="",
)


def with_gpus(*gib: int) -> Machine:
    gpus = tuple(Gpu("NVIDIA Test", size * GIB, size * GIB, (9, 0)) for size in gib)
    return replace(LAPTOP, gpus=gpus, why_no_gpu="", driver="580.65", cuda="13.0")


def sized(name: str) -> tuple[Shape, Sizes]:
    found = shape(name)
    sizes = sizes_of(found)
    assert sizes is not None
    return found, sizes


def need(name: str, way: str, load: Load = LOAD) -> Need:
    return next(each for each in needs(*sized(name), load) if each.way == way)


def test_keys_and_values_of_a_token() -> None:
    # Llama-3.1-8B: keys and values, 32 layers, 8 heads of 128, 2 bytes
    assert kv_bytes(shape("llama-3.1-8b")) == 2 * 32 * 8 * 128 * 2
    # Qwen3.5-27B: only 16 of 64 layers attend, 4 heads of 256
    assert kv_bytes(shape("qwen3.5-27b")) == 2 * 16 * 4 * 256 * 2


def test_sliding_layers_keep_a_window_only() -> None:
    """Gemma 3 1B: 22 of 26 layers keep 512 of 4,096 tokens; keys and values of 1 head of 256."""
    load = Load(length=4096, calls=3)
    parts = need("gemma-3-1b", "serve", load).parts
    assert parts["keys and values"] == 3 * 2 * 256 * 2 * (22 * 512 + 4 * 4096)


def test_linear_layers_keep_a_state_whatever_the_length() -> None:
    """Qwen3.5-27B: 48 layers of 48 heads of 128 x 128 numbers of 4 bytes."""
    short, long = (need("qwen3.5-27b", "serve", Load(length=n, calls=1)) for n in (1024, 2048))
    grown = long.parts["keys and values"] - short.parts["keys and values"]
    assert grown == 1024 * kv_bytes(shape("qwen3.5-27b"))
    assert short.parts["keys and values"] - grown == 48 * 48 * 128 * 128 * 4


def test_weights_as_they_are_stored() -> None:
    full, sizes = sized("qwen3-8b")
    assert weight_bytes(full, sizes) == 2 * 8_190_735_360
    small, sizes = sized("qwen3-32b-fp8")
    rest = sizes.total - sizes.matrices
    assert weight_bytes(small, sizes) == sizes.matrices + 2 * rest


def test_computing_layers_again_needs_less() -> None:
    for name in ("llama-3.1-8b", "qwen2.5-0.5b", "gpt-oss-20b"):
        found = need(name, "train")
        assert found.parts["weights"] < found.least < found.total
        assert need(name, "train 4-bit").least < found.least


def test_a_model_that_drops_out_computes_nothing_again() -> None:
    found = shape("llama-3.1-8b", attention_dropout=0.1)
    sizes = sizes_of(found)
    assert sizes is not None
    train = next(each for each in needs(found, sizes, LOAD) if each.way == "train")
    assert train.least == train.total


def test_experts_are_not_made_smaller_in_training() -> None:
    """bitsandbytes makes linear layers smaller; experts are no linear layers."""
    _, sizes = sized("gpt-oss-20b")
    assert need("gpt-oss-20b", "train 4-bit").parts["weights"] > 2 * sizes.experts


@pytest.mark.parametrize(
    ("name", "gpus", "failed"),
    [
        ("qwen2.5-0.5b", (8,), []),
        ("llama-3.1-8b", (8,), ["memory for serving", "memory for training"]),
        ("llama-3.1-8b", (24,), []),
        ("qwen3.5-27b", (24,), ["memory for serving", "memory for training"]),
    ],
)
def test_what_fits_on_a_gpu(name: str, gpus: tuple[int, ...], failed: list[str]) -> None:
    machine = with_gpus(*gpus)
    found = about_memory(rows(needs(*sized(name), Load()), machine), machine)
    assert [each.check for each in found if each.status == "fail"] == failed
    assert all("GiB is enough" in each.fix for each in found if each.status == "fail")


@pytest.mark.parametrize(
    ("name", "gpus", "said"),
    [
        ("qwen2.5-0.5b", (16,), "side by side"),
        ("llama-3.1-8b", (24,), "take turns"),
        ("llama-3.1-8b", (24, 24), "a GPU each"),
    ],
)
def test_how_serving_and_training_share(name: str, gpus: tuple[int, ...], said: str) -> None:
    machine = with_gpus(*gpus)
    found = about_memory(rows(needs(*sized(name), Load()), machine), machine)
    assert said in found[-1].what


def test_without_a_gpu_the_processor_counts_and_the_gpu_that_is_enough_is_named() -> None:
    (fits,) = about_memory(rows(needs(*sized("qwen2.5-0.5b"), Load()), LAPTOP), LAPTOP)
    assert fits.status == "pass"
    (fails,) = about_memory(rows(needs(*sized("llama-3.1-8b"), Load()), LAPTOP), LAPTOP)
    assert (fails.status, fails.fix) == ("fail", "Use a smaller model, or a GPU of 24 GiB.")
