"""A base model with an adapter in its weights, as a folder that any server loads.

In: the base model's folder, an adapter's in peft's format. Out: a folder in Hugging Face format
with weights of the base's own dtype, its tokenizer and chat template, and no adapter. peft does the
arithmetic (W + scale * B A).
"""

from __future__ import annotations

import shutil
from functools import partial
from pathlib import Path
from typing import Any

from art_core.errors import CheckpointError, ConfigError
from art_core.nn.base_identity import check_base, identify
from art_core.sealed import write_sealed

_WEIGHTS = (".safetensors", ".bin", ".gguf", ".pt", ".pth", ".onnx", ".h5", ".msgpack")
_MADE_ANEW = ("config.json", "model.safetensors.index.json", "manifest.json")


def write_merged(base: Path, adapter: Path, target: Path) -> None:
    """Write the merged model into `target`, which appears when it is whole.

    The whole model is in this machine's memory meanwhile.

    Raises:
        ConfigError: `target` is there already.
        CheckpointError: the adapter can't be read, is another base model's, or is not finite.
    """
    if target.exists():
        raise ConfigError(
            "the folder of a merged model is there already",
            got=str(target),
            expected="a new one",
            fix="Choose another, or move it away.",
        )
    target.parent.mkdir(parents=True, exist_ok=True)
    merged = _merged(base, adapter)
    write_sealed(target, partial(_write, merged, base))


def _merged(base: Path, adapter: Path) -> Any:
    from peft import PeftConfig, PeftModel
    from transformers import AutoModelForCausalLM

    try:
        named = PeftConfig.from_pretrained(str(adapter)).base_model_name_or_path
        check_base(adapter, named, identify(base))
        model = AutoModelForCausalLM.from_pretrained(base, dtype="auto")
        tuned = PeftModel.from_pretrained(model, str(adapter))
        return tuned.merge_and_unload(safe_merge=True)
    except (OSError, ValueError, RuntimeError, KeyError, TypeError) as error:
        raise CheckpointError(
            f"the adapter can't be merged ({error})",
            got=str(adapter),
            expected="a LoRA in peft's format, of this base model",
        ) from error


def _write(merged: Any, base: Path, folder: Path) -> None:
    for path in base.iterdir():
        if path.is_file() and path.suffix not in _WEIGHTS and path.name not in _MADE_ANEW:
            shutil.copyfile(path, folder / path.name)
    merged.save_pretrained(folder)
