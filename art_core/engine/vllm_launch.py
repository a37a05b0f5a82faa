"""vLLM started as our engine: settings, process, the shelf of adapters, and the engine on top.

In: a base model's folder, and `EngineConfig.vllm`. Out: a `VllmEngine` that answers. Left out:
which Python has vLLM (runtime.py) and how the process is kept alive (vllm_process.py).
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from art_core.config import VllmConfig
from art_core.engine import inside_vllm
from art_core.engine.adapter_files import weight_shapes
from art_core.engine.base import Tokenizer
from art_core.engine.runtime import VllmRuntime
from art_core.engine.vllm import VllmEngine
from art_core.engine.vllm_adapters import AdapterShelf
from art_core.engine.vllm_http import VllmHttp
from art_core.engine.vllm_process import Supervision, VllmProcess
from art_core.engine.vllm_server import Progress
from art_core.engine.vllm_settings import VllmSettings
from art_core.engine.vllm_wire import DOOR
from art_core.nn.base_identity import identify
from art_core.readiness.limits import served_rank

_SLACK = 0.04
"""Share of a GPU's memory that is left for its driver and for what the trainer rounds up."""
_CACHE_BYTES = 8 * 2**30
"""Keys, values and whatever else vLLM needs beside its weights in order to serve well."""
_SERVED_NAME = "base"
"""Inside vLLM; what clients ask for is our endpoint's business."""


@dataclass(frozen=True)
class GpuRoom:
    """Memory of the GPU that vLLM runs on, in bytes, once the trainer's weights are there."""

    free: int
    whole: int


def vllm_settings(
    path: Path,
    config: VllmConfig,
    *,
    rank: int,
    context_length: int,
    room: GpuRoom | None,
) -> VllmSettings:
    """How vLLM is started for the base model in `path`.

    Args:
        rank: of the adapters, if the settings name none.
        context_length: what the base model was made for.
        room: None: there is no GPU.

    Raises:
        ConfigError: settings that vLLM can't have.
    """
    variables = {"PYTHONPATH": str(Path(inside_vllm.__file__).parent)}
    if config.devices is not None:
        variables["CUDA_VISIBLE_DEVICES"] = config.devices
    own = ["--middleware", DOOR, "--structured-outputs-config", json.dumps({"backend": "guidance"})]
    if room is None and "--block-size" not in config.extra_args:
        own += ["--block-size", "32"]  # 128 by default: most prompts would not be kept
    is_shared = room is not None and config.devices is None
    sleeps = room is not None and is_shared and _sleeps(path, config, room)
    share = config.gpu_share
    if share is None and room is not None and is_shared:
        share = _share(room) if sleeps else _share(room) / 2
    return VllmSettings(
        model=path,
        served_name=_SERVED_NAME,
        max_loras=config.max_adapters,
        max_cpu_loras=max(config.kept_adapters, config.max_adapters),
        lora_rank=config.max_rank or rank,
        max_model_len=min(config.context_length or context_length, context_length),
        gpu_memory_utilization=share,
        dtype="float32" if config.dtype == "auto" and room is None else config.dtype,
        sleep_mode=sleeps,
        cpu_cache_gb=config.cpu_cache_gb,
        extra_args=(*own, *config.extra_args),
        environment=(*variables.items(), *config.environment),
    )


def _share(room: GpuRoom) -> float:
    """Of the GPU's memory, what the trainer's weights leave."""
    return max(0.05, room.free / room.whole - _SLACK)


def _sleeps(path: Path, config: VllmConfig, room: GpuRoom) -> bool:
    """Whether it gives its memory back while a step is trained."""
    if config.while_training != "auto":
        return config.while_training == "sleep"
    weights = sum(file.stat().st_size for file in path.glob("*.safetensors"))
    return weights + _CACHE_BYTES > room.whole * _share(room) / 2


def start_vllm(
    settings: VllmSettings,
    tokenizer: Tokenizer,
    *,
    runtime: VllmRuntime,
    folder: Path,
    base_model: str,
    vocab_size: int,
    supervision: Supervision | None = None,
    progress: Progress | None = None,
) -> VllmEngine:
    """Start vLLM and wait until it answers.

    Args:
        settings: of `vllm_settings`, its `max_model_len` set.
        folder: of this vLLM alone, for its log and its adapters' files.
        base_model: the name that the engine has above.
        vocab_size: ids that the model has.

    Raises:
        EngineStartFailed: it did not come up; with the cause, where it is known.
        CheckpointError: there is no GPU, and the base model's calls can't be told from others.
    """
    assert settings.max_model_len is not None
    process = VllmProcess(settings, python=runtime.python, folder=folder, supervision=supervision)
    http = VllmHttp(process)
    process.start(progress)
    try:  # only now: the folder may have been another's
        shelf = AdapterShelf(
            http,
            folder / "adapters",
            slots=settings.max_cpu_loras or settings.max_loras,
            max_rank=served_rank(settings.lora_rank),
            base_shapes=weight_shapes(settings.model),
            identity=identify(settings.model),
            stand_in=runtime.is_cpu,
        )
    except BaseException:
        process.stop()
        raise
    return VllmEngine(
        process,
        tokenizer,
        base_model=base_model,
        context_length=settings.max_model_len,
        vocab_size=vocab_size,
        shelf=shelf,
        http=http,
        scores_alone=runtime.is_cpu,
    )
