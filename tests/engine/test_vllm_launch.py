"""What vLLM is started with: memory shared or not, ranks, and what the engine relies on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from art_core.config import VllmConfig
from art_core.engine.vllm_launch import GpuRoom, vllm_settings
from art_core.engine.vllm_settings import VllmSettings

GB = 2**30
H200 = GpuRoom(free=120 * GB, whole=140 * GB)
SMALL = GpuRoom(free=20 * GB, whole=24 * GB)


@pytest.fixture
def base(tmp_path: Path) -> Path:
    """A base model of 3 GiB, as far as its files' size says."""
    with (tmp_path / "model.safetensors").open("wb") as file:
        file.truncate(3 * GB)
    return tmp_path


def settings(base: Path, room: GpuRoom | None, **config: Any) -> VllmSettings:
    return vllm_settings(base, VllmConfig(**config), rank=24, context_length=4096, room=room)


def test_it_sleeps_only_where_half_of_the_rest_is_too_little(base: Path) -> None:
    """3 GiB of weights and 8 more: half of (120/140 - 0.04) of 140 GiB is 57, of (20/24 - 0.04) of
    24 GiB it is 9.5."""
    big, small = settings(base, H200), settings(base, SMALL)
    assert (big.sleep_mode, small.sleep_mode) == (False, True)
    assert big.gpu_memory_utilization == pytest.approx((120 / 140 - 0.04) / 2)
    assert small.gpu_memory_utilization == pytest.approx(20 / 24 - 0.04)


@pytest.mark.parametrize(("told", "sleeps"), [("sleep", True), ("stay", False)])
def test_a_setting_decides(base: Path, told: str, sleeps: bool) -> None:
    for room in (H200, SMALL):
        assert settings(base, room, while_training=told).sleep_mode is sleeps
    assert settings(base, SMALL, gpu_share=0.3).gpu_memory_utilization == 0.3


def test_a_gpu_of_its_own_is_its_own(base: Path) -> None:
    made = settings(base, SMALL, devices="1", while_training="sleep")
    assert not made.sleep_mode
    assert made.gpu_memory_utilization is None
    assert ("CUDA_VISIBLE_DEVICES", "1") in made.environment


def test_on_a_cpu_it_is_float32_in_small_blocks_and_stays(base: Path) -> None:
    made = settings(base, None, while_training="sleep")
    assert (made.dtype, made.sleep_mode, made.gpu_memory_utilization) == ("float32", False, None)
    assert made.extra_args[-2:] == ("--block-size", "32")
    own = settings(base, None, extra_args=("--block-size", "64"))
    assert own.extra_args.count("--block-size") == 1


def test_the_door_and_the_limits_are_in_the_command_line(base: Path) -> None:
    made = settings(base, H200, context_length=100_000, kept_adapters=2, max_adapters=6)
    line = " ".join(made.arguments(5000))
    assert "--middleware art_token_door.TokenDoor" in line
    assert "--logprobs-mode processed_logprobs" in line
    assert "--max-lora-rank 32" in line
    assert "--max-model-len 4096" in line  # no more than the model was made for
    assert "--max-loras 6 --max-cpu-loras 6" in line
    [path] = [value for name, value in made.environment if name == "PYTHONPATH"]
    assert (Path(path) / "art_token_door.py").is_file()
