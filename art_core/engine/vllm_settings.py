"""How vLLM is started: its flags and its environment.

In: `VllmSettings`. Out: the arguments of `vllm.entrypoints.openai.api_server`, and the variables it
sees. No parser is among them: vLLM is asked in ids and answers in ids, and our endpoint reads them
(`forms/`); its own parsers would never be called. Left out: whether the model fits in memory.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from art_core.errors import ConfigError
from art_core.readiness.limits import served_rank

_FIXED = {
    "logprobs-mode": "processed_logprobs",  # of the distribution sampled from; default: raw
    "generation-config": "vllm",  # else the model's folder brings sampling settings of its own
}
_OURS = frozenset({"host", "port", "model", "served-model-name", "enable-lora", "api-key", "uds"})
"""Flags that extra arguments can't set: what else is started here relies on them."""

_OPENED = {
    "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1",  # adapters come and go while it serves
    "VLLM_SERVER_DEV_MODE": "1",  # sleep, wake, pause, resume, reset of the prefix cache
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    "HF_HUB_OFFLINE": "1",  # the model is a folder
    "NO_COLOR": "1",
    "PYTHONUNBUFFERED": "1",  # the last lines before a crash are in the log
    "PYTHONNOUSERSITE": "1",
}
_LEFT_OUT = re.compile(
    r"PYTORCH_.*ALLOC_CONF|PYTORCH_NO_CUDA_MEMORY_CACHING"  # of the trainer; clash with sleep
    r"|PYTHON.*|VIRTUAL_ENV|__PYVENV_LAUNCHER__|LD_PRELOAD"  # lead to other packages than its own
    r"|(LOCAL_|GROUP_)?RANK|(LOCAL_)?WORLD_SIZE|MASTER_(ADDR|PORT)|TORCHELASTIC_.*"  # of torchrun
    r"|TORCH_LOGS|TORCHDYNAMO_.*|CUDA_LAUNCH_BLOCKING|OMP_.*|MKL_NUM_THREADS|UNSLOTH_.*"
    r"|.*(API_?KEY|TOKEN|SECRET|PASSWORD).*"  # it talks to nobody, and a crash may print them
)


@dataclass(frozen=True)
class VllmSettings:
    """What is served, and with what of the machine."""

    model: Path
    """Folder of the base model."""
    served_name: str
    """Name of the base model in requests."""
    max_loras: int = 4
    """Adapters in one batch. Each has a slot in memory, as large as an adapter of `lora_rank`."""
    max_cpu_loras: int | None = None
    """Adapters kept ready in the machine's memory; None: as many as `max_loras`."""
    lora_rank: int = 16
    """Largest rank of an adapter; slots are made for the next that vLLM takes."""
    max_model_len: int | None = None
    """Tokens of prompt and answer; None: what the model was made for."""
    gpu_memory_utilization: float | None = None
    """Share of the GPU's memory that it takes; None: vLLM's own choice. On a CPU
    `cpu_cache_gb` counts instead."""
    dtype: str = "auto"
    """Of the weights served; on a CPU "float32" is twice as fast as "bfloat16"."""
    sleep_mode: bool = False
    """Memory can be given back while something else trains; GPU only."""
    cpu_cache_gb: float = 1.0
    """Keys and values kept on a CPU, in 2**30 bytes; vLLM takes whole ones, so it is rounded up.
    Ignored on a GPU."""
    extra_args: tuple[str, ...] = ()
    """Further flags, as on vLLM's command line; they win over those above."""
    environment: tuple[tuple[str, str], ...] = ()
    """Further variables; they win over all others."""

    def __post_init__(self) -> None:
        if self.max_loras < 2:
            raise ConfigError(
                "max_loras", got=self.max_loras, expected="at least 2: the step before is in use"
            )
        served_rank(self.lora_rank)
        share = self.gpu_memory_utilization
        if share is not None and not 0.0 < share <= 1.0:
            raise ConfigError(
                "gpu_memory_utilization", got=share, expected="a share above 0 and at most 1"
            )
        if self.cpu_cache_gb <= 0.0:
            raise ConfigError("cpu_cache_gb", got=self.cpu_cache_gb, expected="more than 0")
        if taken := sorted(_OURS & {_flag(argument) for argument in self.extra_args}):
            raise ConfigError(
                "flags of vLLM that are set elsewhere",
                got=[f"--{name}" for name in taken],
                fix="Leave them out of extra_args.",
            )

    def arguments(self, port: int) -> list[str]:
        """The command line after the name of the program.

        Args:
            port: on 127.0.0.1.
        """
        flags: dict[str, object] = {
            "model": self.model,
            "served-model-name": self.served_name,
            "host": "127.0.0.1",
            "port": port,
            **_FIXED,
            "max-loras": self.max_loras,
            "max-cpu-loras": self.max_cpu_loras,
            "max-lora-rank": served_rank(self.lora_rank),
            "max-model-len": self.max_model_len,
            "gpu-memory-utilization": self.gpu_memory_utilization,
            "dtype": self.dtype,
        }
        switches = {
            "enable-lora": True,
            "disable-uvicorn-access-log": True,  # a line a call fills the disk
            "enable-sleep-mode": self.sleep_mode,
        }
        own = {_flag(argument) for argument in self.extra_args}
        given = [
            text
            for name, value in flags.items()
            if value is not None and name not in own
            for text in (f"--{name}", str(value))
        ]
        on = [f"--{name}" for name, is_on in switches.items() if is_on and name not in own]
        return [*given, *on, *self.extra_args]

    def variables(self, ours: Mapping[str, str], python: Path, api_key: str) -> dict[str, str]:
        """The environment it is started in.

        Args:
            ours: the environment of this process.
            python: of vLLM; programs beside it are found first.
            api_key: what requests must carry.
        """
        path = f"{python.parent}:{ours.get('PATH', '/usr/local/bin:/usr/bin:/bin')}"
        cache = {"VLLM_CPU_KVCACHE_SPACE": str(math.ceil(self.cpu_cache_gb))}
        return {
            **without_ours(ours),
            **cache,
            **_OPENED,
            "PATH": path,
            "VLLM_API_KEY": api_key,
            **dict(self.environment),
        }


def without_ours(variables: Mapping[str, str]) -> dict[str, str]:
    """`variables` without what is meant for our Python, our training or our services."""
    return {name: value for name, value in variables.items() if not _LEFT_OUT.fullmatch(name)}


def _flag(argument: str) -> str:
    """The name of a flag, however it is spelt; "" for a value."""
    if not argument.startswith("--"):
        return ""
    name = argument[2:].partition("=")[0].replace("_", "-")
    return name.removeprefix("no-")
