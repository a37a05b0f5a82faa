"""vLLM started as our engine: its settings, its process, the adapters' shelf, and the engine on top.

In: a base model's folder, and `EngineConfig.vllm`. Out: a `VllmEngine` that answers. Left out:
which Python has vLLM (runtime.py) and how the process is kept alive (vllm_process.py).
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

from art_core.config import VllmConfig
from art_core.engine import inside_vllm
from art_core.engine.base import Tokenizer
from art_core.engine.vllm import VllmEngine
from art_core.engine.vllm_adapters import AdapterShelf
from art_core.engine.vllm_http import VllmHttp
from art_core.engine.vllm_process import Progress, Supervision, VllmProcess
from art_core.engine.vllm_settings import RANKS, VllmSettings
from art_core.engine.vllm_wire import DOOR

_SERVED_NAME = "base"
"""Inside vLLM; what clients ask for is our endpoint's business."""


def vllm_settings(
    path: Path, config: VllmConfig, *, rank: int, context_length: int, has_gpu: bool
) -> VllmSettings:
    """How vLLM is started for the base model in `path`.

    Args:
        rank: of the adapters, if the settings name none.
        context_length: what the base model was made for.
        has_gpu: it will run on one.

    Raises:
        ConfigError: settings that vLLM can't have.
    """
    variables = {"PYTHONPATH": str(Path(inside_vllm.__file__).parent)}
    if config.devices is not None:
        variables["CUDA_VISIBLE_DEVICES"] = config.devices
    own = ("--middleware", DOOR, "--structured-outputs-config", json.dumps({"backend": "guidance"}))
    dtype = "float32" if config.dtype == "auto" and not has_gpu else config.dtype
    return VllmSettings(
        model=path,
        served_name=_SERVED_NAME,
        max_loras=config.max_adapters,
        max_cpu_loras=max(config.kept_adapters, config.max_adapters),
        lora_rank=config.max_rank or rank,
        max_model_len=min(config.context_length or context_length, context_length),
        gpu_memory_utilization=(config.gpu_share or (0.9 if sleeps(config, has_gpu) else 0.45))
        if has_gpu
        else None,
        dtype=dtype,
        sleep_mode=sleeps(config, has_gpu),
        cpu_cache_gb=config.cpu_cache_gb,
        extra_args=(*own, *config.extra_args),
        environment=(*variables.items(), *config.environment),
    )


def sleeps(config: VllmConfig, has_gpu: bool) -> bool:
    """Whether it gives its memory back while a step is trained."""
    return has_gpu and config.devices is None and config.while_training == "sleep"


def start_vllm(
    settings: VllmSettings,
    tokenizer: Tokenizer,
    *,
    python: Path,
    folder: Path,
    base_model: str,
    vocab_size: int,
    base_shapes: Mapping[str, tuple[int, ...]] | None = None,
    supervision: Supervision | None = None,
    progress: Progress | None = None,
) -> VllmEngine:
    """Start vLLM and wait until it answers.

    Args:
        settings: of `vllm_settings`, its `max_model_len` set.
        folder: of this vLLM alone, for its log and its adapters' files.
        base_model: the name that the engine has above.
        vocab_size: ids that the model has.
        base_shapes: of the base model's weights, which adapters are compared with.

    Raises:
        EngineStartFailed: it did not come up; with the cause, where it is known.
    """
    assert settings.max_model_len is not None
    process = VllmProcess(settings, python=python, folder=folder, supervision=supervision)
    process.start(progress)
    http = VllmHttp(process)
    shelf = AdapterShelf(
        http,
        folder / "adapters",
        slots=settings.max_cpu_loras or settings.max_loras,
        max_rank=next(rank for rank in RANKS if rank >= settings.lora_rank),
        base_shapes=base_shapes,
    )
    return VllmEngine(
        process,
        tokenizer,
        base_model=base_model,
        context_length=settings.max_model_len,
        vocab_size=vocab_size,
        shelf=shelf,
        http=http,
    )
