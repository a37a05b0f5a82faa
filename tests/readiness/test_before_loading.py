"""What is refused before a base model is loaded, by whoever loads it."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from art_core.errors import BaseModelError, NotEnoughMemory, RuntimeMissing
from art_core.readiness.before_loading import check_before_loading, check_weights
from art_core.readiness.memory import GIB
from tests.readiness.models import folder


def test_a_small_whole_model_passes() -> None:
    check_before_loading(folder("qwen2.5-0.5b"))


def test_quantised_weights_are_refused() -> None:
    with pytest.raises(BaseModelError, match="can't learn on quantised weights: got 'fp8'"):
        check_before_loading(folder("qwen3-32b-fp8"))


def test_a_model_that_was_not_made_to_chat_is_refused(tmp_path: Path) -> None:
    shutil.copy(folder("llama-3.1-8b") / "config.json", tmp_path)
    with pytest.raises(BaseModelError, match=r"no chat template.*-Instruct or -Chat"):
        check_before_loading(tmp_path)


def test_weights_that_are_bigger_than_the_machine(tmp_path: Path) -> None:
    """A sparse file of 2**44 bytes, which takes no room."""
    shutil.copy(folder("qwen3-8b") / "config.json", tmp_path)
    with (tmp_path / "model.safetensors").open("wb") as file:
        file.truncate(2**44 - 2**13)  # as long as ext4 takes
    with pytest.raises(NotEnoughMemory, match="art-langgraph doctor"):
        check_before_loading(tmp_path)


def test_the_message_says_how_much_is_needed() -> None:
    check_weights(15 * GIB, 15 * GIB)
    with pytest.raises(NotEnoughMemory, match=r"got '12.0 GiB', expected more than the 15.0 GiB"):
        check_weights(15 * GIB, 12 * GIB)


async def test_registering_refuses_before_anything_is_loaded(
    tiny_llama: Path, tmp_path: Path
) -> None:
    import art_core as art

    quantised = tmp_path / "quantised"
    shutil.copytree(tiny_llama, quantised)
    config = json.loads((quantised / "config.json").read_text("utf-8"))
    config["quantization_config"] = {"quant_method": "awq", "bits": 4}
    (quantised / "config.json").write_text(json.dumps(config))
    model: art.TrainableModel[None] = art.TrainableModel(
        name="a", project="p", base_model=str(quantised), base_path=str(tmp_path / "runs")
    )
    async with art.LocalBackend(show_progress=False) as backend:
        with pytest.raises(BaseModelError, match="got 'awq'"):
            await model.register(backend)
    assert not (tmp_path / "runs").exists()


async def test_a_vllm_for_gpus_where_there_is_none(tiny_llama: Path, tmp_path: Path) -> None:
    """Said at once, before the model is loaded; the stand-in for its Python says what it has."""
    torch = pytest.importorskip("torch", reason="art-langgraph[train] is not installed")
    if torch.cuda.is_available():
        pytest.skip("not on this platform: there is a GPU")
    import art_core as art
    from art_core.config import VllmConfig

    told = {"vllm": "0.32.0", "torch": "2.13.0", "accelerator": "12.8", "python": "3.12"}
    python = tmp_path / "python"
    python.write_text(f"#!/bin/sh\necho '{json.dumps(told)}'\n")
    python.chmod(0o755)
    engine = art.EngineConfig(kind="vllm", vllm=VllmConfig(python=python))
    model: art.TrainableModel[None] = art.TrainableModel(
        name="a",
        project="p",
        base_model=str(tiny_llama),
        base_path=str(tmp_path / "runs"),
        art_config=art.ModelConfig(engine=engine),
    )
    async with art.LocalBackend(show_progress=False) as backend:
        with pytest.raises(RuntimeMissing, match=r"built for GPUs.*setup vllm --cpu"):
            await model.register(backend)
