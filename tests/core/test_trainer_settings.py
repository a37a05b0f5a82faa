"""What a trainer is set to and a processor can't do: told by name, before anything is loaded."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch", reason="art-langgraph[train] is not installed")

import torch

from art_core.config import EngineConfig, ModelConfig, TrainerConfig
from art_core.errors import ConfigError
from art_core.local.backend import LocalBackend
from art_core.model import TrainableModel
from art_core.nn.lora import LoraModel
from art_core.training.trainer import Trainer
from tests.core.tiny_policy import NAME, tiny_policy


@pytest.mark.parametrize(
    "setting", [{"load_in_4bit": True}, {"layers": "unsloth"}, {"optimizer": "adamw_8bit"}], ids=str
)
async def test_a_processor_refuses_what_is_made_for_gpus(
    setting: dict[str, Any], tiny_llama: Path, tmp_path: Path
) -> None:
    config = ModelConfig(
        engine=EngineConfig(kind="embedded"), trainer=TrainerConfig.model_validate(setting)
    )
    model = TrainableModel(name="agent", project="p", base_model=str(tiny_llama), art_config=config)
    async with LocalBackend(tmp_path) as backend:
        with pytest.raises(
            ConfigError, match=rf"TrainerConfig\({next(iter(setting))}.* needs a GPU"
        ):
            await model.register(backend)


async def test_models_on_one_base_model_share_its_module(tiny_llama: Path, tmp_path: Path) -> None:
    def agent(name: str, trainer: TrainerConfig) -> TrainableModel:
        config = ModelConfig(engine=EngineConfig(kind="embedded"), trainer=trainer)
        return TrainableModel(name=name, project="p", base_model=str(tiny_llama), art_config=config)

    async with LocalBackend(tmp_path) as backend:
        await agent("one", TrainerConfig()).register(backend)
        with pytest.raises(ConfigError, match="a LocalBackend for each"):
            await agent("two", TrainerConfig(load_in_4bit=True)).register(backend)


def test_moments_in_8_bits_need_a_gpu(tiny_llama: Path) -> None:
    model = tiny_policy(tiny_llama)
    if model.device.type == "cuda":
        pytest.skip("not on this platform: there is a GPU")
    with pytest.raises(ConfigError, match=r"moments in 8 bits need a GPU.*optimizer='adamw'"):
        Trainer(model, NAME, seed=0, optimizer="adamw_8bit")


def test_weights_in_4_bits_need_bitsandbytes(tiny_llama: Path) -> None:
    if find_spec("bitsandbytes") is not None:
        pytest.skip("not on this platform: bitsandbytes is installed")
    with pytest.raises(ConfigError, match=r"need bitsandbytes.*art-langgraph\[gpu\]"):
        LoraModel.load(tiny_llama, four_bit=True)


def test_unsloths_layers_need_a_gpu(tiny_llama: Path) -> None:
    with pytest.raises(ConfigError, match=r"float32 on cpu.*layers=.own"):
        LoraModel.load(tiny_llama, dtype=torch.float32, layers="unsloth")
