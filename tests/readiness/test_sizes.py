"""Shapes and numbers of weights, from configs alone.

The expected totals are those of the models on the hub: what `parameters` of their safetensors says
without a head that repeats the embedding, and without vision parts.
"""

from __future__ import annotations

import pytest

from art_core.errors import BaseModelError
from art_core.readiness.shape import Quantisation, shape_of
from art_core.readiness.sizes import sizes_of
from tests.readiness.models import MODELS, folder, shape

TOTALS = {
    "gemma-3-1b": 999_885_952,
    "gpt-oss-20b": 20_914_757_184,
    "llama-3.1-8b": 8_030_261_248,
    "llama-3.2-1b": 1_235_814_400,
    "mistral-nemo": 12_247_782_400,
    "phi-3.5-mini": 3_821_079_552,
    "phi-4-mini": 3_836_021_760,
    "qwen2.5-0.5b": 494_032_768,
    "qwen3-32b-fp8": 32_762_123_264,
    "qwen3-4b-2507": 4_022_468_096,
    "qwen3-8b": 8_190_735_360,
    "qwen3.5-27b": 26_895_998_464,
    "qwen3.6-27b": 26_895_998_464,
    "smollm3-3b": 3_075_098_624,
}


@pytest.mark.parametrize("name", MODELS)
def test_every_weight_is_counted(name: str) -> None:
    sizes = sizes_of(shape(name))
    assert sizes is not None
    assert sizes.total == TOTALS[name]


@pytest.mark.parametrize("name", MODELS)
def test_the_count_is_what_transformers_builds(name: str) -> None:
    """Without memory, on torch's meta device."""
    torch = pytest.importorskip("torch", reason="art-langgraph[train] is not installed")
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.from_pretrained(folder(name)).get_text_config()
    config.quantization_config = None
    del config.quantization_config
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    assert sum(each.numel() for each in model.parameters()) == TOTALS[name]


def test_an_adapter_of_a_known_shape() -> None:
    """Qwen2.5-0.5B: 24 layers of q (896+896), k and v (896+128), o (896+896), gate, up and down
    (896+4864) make 24 * (1792 + 2*1024 + 1792 + 3*5760) = 549,888 a rank."""
    sizes = sizes_of(shape("qwen2.5-0.5b"))
    assert sizes is not None
    assert sizes.adapter_per_rank == 549_888


def test_experts_take_no_adapter() -> None:
    sizes = sizes_of(shape("gpt-oss-20b"))
    assert sizes is not None
    # 24 layers of 32 experts with three matrices of 2880 x 2880
    assert sizes.experts == 24 * 32 * 3 * 2880 * 2880
    # q (2880+4096), k and v (2880+512), o (4096+2880)
    assert sizes.adapter_per_rank == 24 * (6976 + 2 * 3392 + 6976)


def test_layers_of_unknown_form_are_not_counted() -> None:
    assert sizes_of(shape("llama-3.1-8b", kv_lora_rank=512)) is None
    assert sizes_of(shape("llama-3.1-8b", layer_types=["mamba"] * 32)) is None


def test_quantisations_are_read() -> None:
    assert shape("qwen3-32b-fp8").quantisation == Quantisation("fp8", 8)
    assert shape("gpt-oss-20b").quantisation == Quantisation("mxfp4", 4)
    assert shape("qwen3.6-27b").quantisation == Quantisation("modelopt", 4)
    assert shape("qwen3-8b").quantisation is None
    awq = {"quant_method": "awq", "bits": 4}
    assert shape("qwen3-8b", quantization_config=awq).quantisation == Quantisation("awq", 4)
    eight = {"quant_method": "bitsandbytes", "load_in_8bit": True}
    assert shape("qwen3-8b", quantization_config=eight).quantisation == Quantisation(
        "bitsandbytes", 8
    )
    group = {"group_0": {"weights": {"num_bits": 4}}}
    packed = {"quant_method": "compressed-tensors", "config_groups": group}
    assert shape("qwen3-8b", quantization_config=packed).quantisation == Quantisation(
        "compressed-tensors", 4
    )
    assert shape("qwen3-8b", quantization={"bits": 4, "group_size": 64}).quantisation == (
        Quantisation("mlx", 4)
    )


def test_kinds_of_layers_windows_and_heads() -> None:
    gemma = shape("gemma-3-1b")
    assert gemma.layers[:6] == ("sliding_attention",) * 5 + ("full_attention",)
    assert (gemma.window, gemma.head_dim, gemma.tied) == (512, 256, True)
    hybrid = shape("qwen3.5-27b")
    assert (hybrid.layers.count("linear_attention"), hybrid.layers.count("full_attention")) == (
        48,
        16,
    )
    assert hybrid.sees_images
    assert shape("qwen2.5-0.5b").window is None, "use_sliding_window is off"


def test_what_is_no_language_model_is_refused() -> None:
    with pytest.raises(BaseModelError, match="hidden_size"):
        shape_of({"architectures": ["CLIPModel"], "model_type": "clip"})
