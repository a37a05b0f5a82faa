"""Layers with ranks and scales of their own mean the same once their scale is in their weights."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch", reason="art-langgraph[train] is not installed")

import torch

from art_core.engine.adapter_files import CONFIG, WEIGHTS, check_servable, read_adapter
from art_core.engine.adapter_folding import fold_into, has_patterns
from art_core.errors import CheckpointError


def peft_adapter(base: Path, folder: Path, dtype: Any, **settings: Any) -> Any:
    """A random adapter of the tiny Llama, saved by peft; the model with it."""
    import peft
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(base)
    config = peft.LoraConfig(target_modules=["q_proj", "v_proj", "o_proj"], **settings)
    adapted = peft.get_peft_model(model, config)
    torch.manual_seed(0)
    for name, parameter in adapted.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.1)
    adapted.to(dtype).save_pretrained(str(folder))
    return adapted.to(torch.float32).eval()


def logits(base: Path, folder: Path) -> Any:
    import peft
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(base)
    adapted = peft.PeftModel.from_pretrained(model, folder).to(torch.float32).eval()
    with torch.no_grad():
        return adapted(torch.tensor([[1, 2, 3, 4]])).logits


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")  # peft's
@pytest.mark.parametrize(("dtype", "off"), [("float32", 2e-5), ("bfloat16", 2e-2)])
@pytest.mark.parametrize("rslora", [False, True])
def test_it_computes_what_it_did(
    dtype: str, off: float, rslora: bool, tiny_llama: Path, tmp_path: Path
) -> None:
    peft_adapter(
        tiny_llama,
        tmp_path / "mixed",
        getattr(torch, dtype),
        r=4,
        lora_alpha=6,
        use_rslora=rslora,
        rank_pattern={"layers.0.self_attn.q_proj": 8, "v_proj": 2},
        alpha_pattern={r"model.layers.\d.self_attn.o_proj": 20},
    )
    (tmp_path / "plain").mkdir()
    source, target = (
        (folder / CONFIG, folder / WEIGHTS) for folder in (tmp_path / "mixed", tmp_path / "plain")
    )
    fold_into(source, target)
    config = json.loads(target[0].read_text())
    assert has_patterns(json.loads(source[0].read_text()))
    assert not has_patterns(config)
    assert config["r"] == config["lora_alpha"] == 8
    found = read_adapter(tmp_path / "mixed")
    assert found.rank == 8
    check_servable(found, max_rank=8)
    with pytest.raises(CheckpointError, match="got 8, expected at most 4"):
        check_servable(found, max_rank=4)
    # peft wants every layer to have the rank that the settings say: it is told of theirs again
    ranks = {"layers.0.self_attn.q_proj": 8, "v_proj": 2, "q_proj": 4, "o_proj": 4}
    alphas = dict(ranks)
    target[0].write_text(json.dumps({**config, "rank_pattern": ranks, "alpha_pattern": alphas}))
    torch.testing.assert_close(
        logits(tiny_llama, tmp_path / "plain"),
        logits(tiny_llama, tmp_path / "mixed"),
        atol=off,
        rtol=0,
    )
