"""A base model in memory: its weights as they are, or in 4 bits (NF4) for QLoRA.

In: a folder in Hugging Face format. Out: the causal model, on its device. What is made smaller are
the linear layers but the output matrix (Dettmers et al. 2023, arXiv:2305.14314: NF4, its scales
quantised too), by bitsandbytes, each as soon as it is read: never are all of them there in 16 bits.
"""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from art_core.errors import BaseModelError, ConfigError


def load_causal(
    path: Path, *, dtype: torch.dtype, device: torch.device | str, four_bit: bool
) -> Any:
    """The model in `path`.

    Args:
        dtype: of the weights, and with `four_bit` of what is computed with them.

    Raises:
        BaseModelError: it can't be loaded.
        ConfigError: 4 bits are asked for without bitsandbytes.
    """
    from transformers import AutoModelForCausalLM

    how: dict[str, Any] = {}
    if four_bit:
        _check_bitsandbytes()
        how = {"quantization_config": _nf4(dtype), "device_map": {"": device}}
    try:
        base: Any = AutoModelForCausalLM.from_pretrained(
            path, dtype=dtype, local_files_only=True, **how
        )
    except (OSError, ValueError, KeyError) as error:
        raise BaseModelError(
            f"base model can't be loaded ({error})",
            got=str(path),
            expected="a causal model that transformers can load",
            fix="Check the folder, or fetch the model again.",
        ) from error
    return base if four_bit else base.to(device)


def _nf4(dtype: torch.dtype) -> Any:
    from transformers import BitsAndBytesConfig

    return BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=dtype,
    )


def _check_bitsandbytes() -> None:
    if find_spec("bitsandbytes") is None:
        raise ConfigError(
            "weights in 4 bits need bitsandbytes",
            got="it is not installed",
            fix="Run: pip install 'art-langgraph[gpu]'; or set TrainerConfig(load_in_4bit=False).",
        )
