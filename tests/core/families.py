"""Tiny random models of many kinds, made from transformers' own configs."""

from __future__ import annotations

from typing import Any

VOCABULARY = 120

_SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "initializer_range": 0.2,
    "tie_word_embeddings": False,
    "bos_token_id": None,
    "eos_token_id": 1,
    "pad_token_id": 0,
}
_BY_NAME: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {}),
    "llama with dynamic rotary": (
        "Llama",
        {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}},
    ),
    "llama with yarn": (
        "Llama",
        {
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 1e4,
                "factor": 2.0,
                "original_max_position_embeddings": 128,
            }
        },
    ),
    "qwen2": ("Qwen2", {}),
    "qwen2 with windows": (
        "Qwen2",
        {"use_sliding_window": True, "sliding_window": 7, "max_window_layers": 1},
    ),
    "qwen3": ("Qwen3", {"head_dim": 16}),
    "mistral with a window": ("Mistral", {"sliding_window": 6}),
    "gemma": ("Gemma", {"head_dim": 8}),
    "gemma2": (
        "Gemma2",
        {
            "head_dim": 8,
            "sliding_window": 5,
            "query_pre_attn_scalar": 8,
            "attn_logit_softcapping": 3.0,
            "final_logit_softcapping": 4.0,
        },
    ),
    "gemma3": (
        "Gemma3Text",
        {
            "head_dim": 8,
            "sliding_window": 5,
            "num_hidden_layers": 3,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        },
    ),
    "phi3": ("Phi3", {}),
    "phi3 with longrope": (
        "Phi3",
        {
            "original_max_position_embeddings": 64,
            "rope_parameters": {
                "rope_type": "longrope",
                "rope_theta": 1e4,
                "short_factor": [1.0, 1.5, 2.0, 2.5],
                "long_factor": [2.0, 3.0, 4.0, 5.0],
                "original_max_position_embeddings": 64,
            },
        },
    ),
    "phi": ("Phi", {}),
    "gpt-neox": ("GPTNeoX", {}),
    "gpt2": ("GPT2", {"n_inner": 48}),
    "olmo2": ("Olmo2", {}),
    "olmo3": ("Olmo3", {"sliding_window": 5}),
    "granite": ("Granite", {"logits_scaling": 4.0, "attention_multiplier": 0.2}),
    "cohere": ("Cohere", {"logit_scale": 0.25}),
    "cohere2": ("Cohere2", {"logit_scale": 0.25, "sliding_window": 5}),
    "smollm3": ("SmolLM3", {}),
    "starcoder2": ("Starcoder2", {"sliding_window": 6}),
    "glm4": ("Glm4", {"head_dim": 8}),
    "deepseek v3": (
        "DeepseekV3",
        {
            "q_lora_rank": 16,
            "kv_lora_rank": 16,
            "qk_rope_head_dim": 8,
            "qk_nope_head_dim": 8,
            "v_head_dim": 8,
            "first_k_dense_replace": 2,
            "num_key_value_heads": 4,
            "n_routed_experts": 4,
            "n_group": 1,
            "topk_group": 1,
            "num_experts_per_tok": 2,
        },
    ),
    "gpt-oss": (
        "GptOss",
        {"head_dim": 8, "sliding_window": 5, "num_local_experts": 4, "num_experts_per_tok": 2},
    ),
    "qwen3 moe": (
        "Qwen3Moe",
        {"head_dim": 8, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24},
    ),
    "mamba": ("Mamba", {"state_size": 4, "time_step_rank": 2}),
    "mamba2": ("Mamba2", {"state_size": 4, "num_heads": 8, "head_dim": 8, "n_groups": 2}),
    "qwen3-next": (
        "Qwen3Next",
        {
            "head_dim": 8,
            "linear_num_value_heads": 4,
            "linear_num_key_heads": 2,
            "linear_key_head_dim": 8,
            "linear_value_head_dim": 8,
            "num_experts": 0,
            "layer_types": ["linear_attention", "full_attention"],
        },
    ),
    "bamba": (
        "Bamba",
        {"attn_layer_indices": [1], "mamba_n_heads": 8, "mamba_d_head": 8, "mamba_d_state": 4},
    ),
    "falcon-h1": (
        "FalconH1",
        {"mamba_d_ssm": 32, "mamba_n_heads": 4, "mamba_d_head": 8, "mamba_d_state": 4},
    ),
    "lfm2": ("Lfm2", {"layer_types": ["conv", "full_attention"]}),
    "recurrent gemma": ("RecurrentGemma", {"num_hidden_layers": 3, "lru_width": 32}),
    "llama4": ("Llama4Text", {"head_dim": 8, "attention_chunk_size": 8}),
    "bloom": ("Bloom", {"n_head": 4, "n_layer": 2}),
    "mpt": ("Mpt", {"d_model": 32, "n_heads": 4, "n_layers": 2}),
    "falcon with alibi": ("Falcon", {"alibi": True, "num_kv_heads": 2}),
    "gpt-neo": ("GPTNeo", {"attention_types": [[["global", "local"], 1]], "window_size": 5}),
    "opt": ("OPT", {"ffn_dim": 48, "word_embed_proj_dim": 32}),
    "gpt-j": ("GPTJ", {"n_embd": 32, "n_head": 4, "n_layer": 2, "rotary_dim": 4}),
}
FAMILIES = list(_BY_NAME)
ALONE = FAMILIES[FAMILIES.index("mamba") : FAMILIES.index("opt")]
"""They compute each sequence by itself."""


def make_model(name: str) -> Any:
    """The model in float64, its weights the same each time, its attention its own."""
    import torch
    import transformers

    family, more = _BY_NAME[name]
    config = getattr(transformers, f"{family}Config")(**{**_SIZES, **more})
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = transformers.AutoModelForCausalLM.from_config(
            config, dtype=torch.float64, experts_implementation="eager"
        )
        for parameter in model.parameters():  # no layer is idle for want of an initial value
            if float(parameter.detach().std()) == 0:
                torch.nn.init.normal_(parameter, float(parameter.detach().mean()), 0.1)
    return model.eval()
