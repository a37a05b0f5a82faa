"""A merged model is the base with its adapter: for transformers alone, without peft."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("torch", reason="art-langgraph[train] is not installed")

import torch

from art_core.config import LoraSettings
from art_core.errors import CheckpointError, ConfigError
from art_core.nn.lora import LoraModel
from art_core.nn.merged_folder import write_merged
from art_langgraph.cli import main
from tests.core.tiny_policy import shake

pytestmark = pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing.:FutureWarning")  # peft


def adapter_of(base: Path, folder: Path, *, rslora: bool = False) -> tuple[Path, torch.Tensor]:
    """An adapter that is felt, and the logits that it gives ids 1, 2, 3."""
    model = LoraModel.load(base, dtype=torch.float32)
    model.create_adapter("a", LoraSettings(rank=4, alpha=16.0), seed=0)
    shake(model, 0, "a")
    model.save_adapter("a", folder)
    if rslora:
        config = folder / "adapter_config.json"
        config.write_text(config.read_text().replace('"use_rslora": false', '"use_rslora": true'))
    return folder, ids_logits(base, folder)


def ids_logits(base: Path, adapter: Path | None) -> torch.Tensor:
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32).eval()
    if adapter is not None:
        model = PeftModel.from_pretrained(model, str(adapter)).eval()
    with torch.no_grad():
        found: torch.Tensor = model(torch.tensor([[1, 2, 3]])).logits
    return found


@pytest.mark.parametrize("rslora", [False, True])
def test_the_merged_model_is_the_adapted_one(
    tiny_llama: Path, tmp_path: Path, rslora: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "adapter").mkdir()
    adapter, expected = adapter_of(tiny_llama, tmp_path / "adapter", rslora=rslora)
    out = tmp_path / "merged"
    arguments = ["model", "merge", str(adapter), str(out), "--base-model", str(tiny_llama)]
    assert main(arguments) == 0, capsys.readouterr().err
    found = ids_logits(out, None)
    assert (found - expected).abs().max() < 1e-5
    assert (found - ids_logits(tiny_llama, None)).abs().max() > 1e-2
    assert (out / "tokenizer.json").exists()
    assert not (out / "adapter_config.json").exists()
    assert main(arguments) == 1
    assert "there already" in capsys.readouterr().err


def test_what_can_not_be_merged_leaves_nothing(tiny_llama: Path, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="can't be merged"):
        write_merged(tiny_llama, tmp_path, tmp_path / "out")
    assert not (tmp_path / "out").exists()
    with pytest.raises(ConfigError, match="there already"):
        write_merged(tiny_llama, tmp_path, tmp_path)
