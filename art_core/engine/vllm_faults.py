"""Why vLLM ended, read from its log and its exit status: the known causes and what to do.

In: what it wrote, how it ended. Out: `Fault`: the cause in a clause, a fix, the lines that tell.
Left out: faults of single requests.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

TAIL_LINES = 15
"""Lines of the log in an error."""
_NOISE = r"nanobind: | - (leaked|\.\.\. skipped)|See https://nanobind|.*resource_tracker|\s*$"
"""Lines that say nothing: what Triton's bindings and Python tell at every end."""
_SEARCHED_LINES = 300
"""Lines in which a cause is searched: what was told long before is of something else."""


@dataclass(frozen=True)
class Fault:
    """A cause."""

    cause: str
    fix: str
    tail: str
    """The last lines of the log."""
    is_port_taken: bool = False
    """Another port may work."""


@dataclass(frozen=True)
class _Known:
    pattern: str
    """Searched in the log."""
    cause: str
    """May name groups of the pattern."""
    fix: str


_PORT_TAKEN = "its port was taken by another program"
_KNOWN = (
    _Known(
        r"[Aa]ddress already in use",
        _PORT_TAKEN,
        "Start again: another port is taken.",
    ),
    _Known(
        r"unrecognized arguments: (?P<flags>.+)",
        "this version of vLLM does not know {flags}",
        "Leave it out of extra_args, or serve with a version that has it.",
    ),
    _Known(
        r"error: argument (?P<flag>--[\w-]+).*?: (?P<why>.*invalid.*)",
        "vLLM refuses {flag}: {why}",
        "Set another value.",
    ),
    _Known(
        r"Free memory on device .*?\((?P<free>[\d.]+)/(?P<all>[\d.]+) GiB\).*?"
        r"less than desired GPU memory utilization \((?P<share>[\d.]+)",
        "the GPU has {free} of its {all} GiB free, and vLLM was to take a share of {share}",
        "End what uses the GPU, or set a smaller gpu_memory_utilization.",
    ),
    _Known(
        r"Available memory on node \S+ \((?P<free>[\d.]+)/(?P<all>[\d.]+) GiB\).*?requested memory "
        r"for kv \((?P<need>[\d.]+)",
        "the machine has {free} of its {all} GiB free, and {need} were to hold keys and values",
        "Set a smaller cpu_cache_gb, or end what uses the memory.",
    ),
    _Known(
        r"(?P<need>[\d.]+) GiB KV cache is needed, which is larger than the available KV cache "
        r"memory \((?P<have>[\d.]+) GiB\)",
        "a sequence of max_model_len needs {need} GiB of keys and values and {have} GiB are left",
        "Set a smaller max_model_len, or a bigger gpu_memory_utilization (on a CPU cpu_cache_gb).",
    ),
    _Known(
        r"No available memory for the cache blocks",
        "the weights leave no memory for keys and values",
        "Set a bigger gpu_memory_utilization, serve a smaller model, or use a bigger GPU.",
    ),
    _Known(
        r"CUDA out of memory|OutOfMemoryError|CUDA error: out of memory",
        "the GPU is out of memory",
        "End what uses the GPU, or set a smaller max_model_len, max_loras or "
        "gpu_memory_utilization.",
    ),
    _Known(
        r"MemoryError|[Cc]annot allocate memory|DefaultCPUAllocator: can't allocate memory",
        "the machine is out of memory",
        "Serve a smaller model, or set a smaller max_model_len or cpu_cache_gb.",
    ),
    _Known(
        r"User-specified max_model_len \((?P<asked>\d+)\) is greater than the derived "
        r"max_model_len \D*(?P<made>\d+)",
        "max_model_len is {asked}, and the model was made for {made}",
        "Set a smaller max_model_len.",
    ),
    _Known(
        r"(?P<name>\w+) does not support LoRA",
        "vLLM can't put adapters on a {name}",
        "Serve this model with the embedded engine, or choose another base model.",
    ),
    _Known(
        r"Model architectures? (?P<name>\[.*?\]|\S+) (?:is|are) not supported",
        "this version of vLLM does not know the architecture {name}",
        "Serve with a newer version within the tested range, or choose another base model.",
    ),
    _Known(
        r"model type [`'\"](?P<name>[\w-]+)[`'\"].*does not recognize this architecture",
        "the transformers beside vLLM does not know the model type {name}",
        "Serve with a newer version within the tested range, or choose another base model.",
    ),
    _Known(
        r"[Ll]o[Rr][Aa] rank (?P<rank>\d+) is greater than max_lora_rank (?P<most>\d+)",
        "an adapter has the rank {rank}, and slots were made for {most}",
        "Start with lora_rank of at least that of the adapter.",
    ),
    _Known(
        r"No module named '(?P<name>[\w.]+)'",
        "its environment has no module {name}",
        "Delete the environment's folder and run: art-langgraph setup vllm",
    ),
    _Known(
        r"Failed to infer device type|No CUDA GPUs are available|no NVIDIA driver",
        "this build of vLLM is for GPUs, and it finds none",
        "Check nvidia-smi and CUDA_VISIBLE_DEVICES, or run: art-langgraph setup vllm --cpu",
    ),
    _Known(
        r"NVIDIA driver on your system is too old",
        "the NVIDIA driver is too old for this build of vLLM",
        "Update the driver.",
    ),
    _Known(
        r"No space left on device",
        "the disk is full",
        "Free space in the home and temporary folders.",
    ),
)
_ENDED = {
    -9: (
        "it was killed, as the system does when memory runs out",
        "See the system's log (dmesg). Serve a smaller model, or free memory.",
    ),
    -4: (
        "this processor lacks instructions that the build was made with",
        "Use a build of vLLM for this processor (ART_VLLM_PYTHON).",
    ),
}


def find_fault(told: str, status: int | None, *, otherwise: str = "") -> Fault:
    """What is known of why vLLM ended, or does not answer.

    Args:
        told: its log since the start.
        status: how it ended, negative for a signal; None if it has not.
        otherwise: the cause if none is known.
    """
    lines = [line for line in told.splitlines() if not re.match(_NOISE, line)]
    tail = "\n".join(lines[-TAIL_LINES:])
    late = "\n".join(lines[-_SEARCHED_LINES:])
    for known in _KNOWN:
        if found := re.search(known.pattern, late):
            parts = {name: text or "" for name, text in found.groupdict().items()}
            cause = known.cause.format(**parts)
            return Fault(cause, known.fix, tail, is_port_taken=known.cause == _PORT_TAKEN)
    if status in _ENDED:
        return Fault(*_ENDED[status], tail)
    return Fault(otherwise or _in_words(status), "The log may say more.", tail)


def _in_words(status: int | None) -> str:
    if status is None:
        return "it does not answer"
    return f"it was ended by signal {-status}" if status < 0 else f"it ended with status {status}"
