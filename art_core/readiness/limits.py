"""What a base model, an adapter's rank or a quantisation must be for vLLM and for our trainer.

In: a shape, a rank. Out: nothing, or the typed error that says what to do. The doctor collects
these, an engine or a trainer raises them before anything is started. Facts of vLLM are those of
version 0.32, read in its source.
"""

from __future__ import annotations

from art_core.errors import BaseModelError, ConfigError
from art_core.readiness.shape import Quantisation, Shape

RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""What vLLM takes as `--max-lora-rank`."""

_VLLM_READS = {
    "awq", "auto_awq", "awq_marlin", "fp8", "fbgemm_fp8", "fp_quant", "modelopt", "modelopt_fp4",
    "modelopt_mxfp8", "modelopt_mixed", "auto_gptq", "gptq", "gptq_marlin", "humming",
    "compressed-tensors", "experts_int8", "quark", "moe_wna16", "torchao", "inc", "auto-round",
    "mxfp4", "gpt_oss_mxfp4", "deepseek_v4_fp8", "mxfp8",
}  # fmt: skip
"""Quantisations that vLLM serves; a LoRA goes on top of each, since it keeps one tensor a layer."""
_WITHOUT_LORA = {
    "BailingMoeV2_5", "BailingMoeV3", "Bloom", "Cohere2Moe", "Dbrx", "DeepseekV32", "DeepseekV4",
    "DeepseekV41", "Dots3Note", "Falcon", "FalconMamba", "GPT2LMHead", "GPTJ", "Gemma3n",
    "Glm5Next", "HYV4", "HrmText", "IQuestLoopCoder", "Inkling", "KimiK25", "KimiK3", "KimiLinear",
    "KimiVL", "Mamba", "Mamba2", "MiMoV2", "MiMoV2Flash", "MiniMaxM3Sparse", "Orion", "Qwen4Exp",
    "StableLm", "Step1", "Step3Text", "Step3p5", "Step3p7", "Zamba2",
}  # fmt: skip
"""Architectures that vLLM serves, but not with a LoRA."""
_ENDINGS = ("ForCausalLM", "ForConditionalGeneration", "Model")


def served_rank(rank: int) -> int:
    """The `--max-lora-rank` that vLLM is started with for adapters of this rank.

    Raises:
        ConfigError: it is above what vLLM knows.
    """
    for allowed in RANKS:
        if 1 <= rank <= allowed:
            return allowed
    raise ConfigError(
        "a LoRA rank that vLLM can't serve",
        got=rank,
        expected=f"1 to {RANKS[-1]}",
        fix="Train with another rank (LoraSettings.rank).",
    )


def check_vllm_takes_adapters(shape: Shape) -> None:
    """See that vLLM serves the model with a LoRA.

    Raises:
        BaseModelError: its kind or its quantisation takes none.
    """
    if _name(shape.architecture) in _WITHOUT_LORA:
        raise BaseModelError(
            "vLLM serves this kind of model without LoRA only",
            got=shape.architecture,
            expected="one such as LlamaForCausalLM or Qwen3ForCausalLM",
            fix="Choose another base model.",
        )
    found = shape.quantisation
    if found is not None and found.method not in _VLLM_READS:
        raise BaseModelError(
            "vLLM can't serve these quantised weights, with or without LoRA",
            got=found.method,
            expected="weights of 16 bits, or awq, gptq, fp8, compressed-tensors",
            fix=f"Use {_UNQUANTISED}.",
        )


def check_trainable(quantisation: Quantisation | None) -> None:
    """See that our trainer can learn on weights that are kept so.

    Raises:
        BaseModelError: its weights are quantised.
    """
    if quantisation is not None:
        raise BaseModelError(
            "the trainer can't learn on quantised weights",
            got=quantisation.method,
            expected="weights of 16 or 32 bits",
            fix=f"Train on {_UNQUANTISED}; TrainerConfig(load_in_4bit=True) makes 4 bits of them. "
            "The quantised one can serve the adapter, but its answers then differ from those that "
            "were trained.",
        )


_UNQUANTISED = "the repository of the same model with 16-bit weights (no -FP8, -AWQ, -bnb-4bit)"


def _name(architecture: str) -> str:
    for ending in _ENDINGS:
        if architecture.endswith(ending):
            return architecture.removesuffix(ending)
    return architecture
