"""What the doctor says of a machine: each thing that serving and training need, with its fix.

In: facts (`Machine`, `Place`s, whether loopback works, what vLLM there is). Out: findings. A
machine without GPU or torch is no fault: it can run agents, and the embedded engine serves small
models.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from art_core.finding import Finding
from art_core.readiness.machine import Machine
from art_core.readiness.memory import GIB
from art_core.readiness.places import Place

_LITTLE_DISK = 5 * GIB
_VLLM_CAPABILITY, _BRAIN_CAPABILITY = (7, 0), (8, 0)
_TRAINING = ("torch", "transformers", "peft")
_INSTALL = "pip install 'art-langgraph[train]'"
_INSTALL_GPU = "pip install 'art-langgraph[train,gpu]'"


@dataclass(frozen=True)
class VllmSeen:
    """The vLLM that would serve."""

    version: str | None
    """None: there is none."""
    is_cpu: bool = False
    why_not: str = ""
    fix: str = ""


def about_machine(
    machine: Machine,
    places: Mapping[str, Place],
    loopback: str,
    vllm: VllmSeen,
    proxy: str | None = None,
) -> list[Finding]:
    """One finding or more for each thing.

    Args:
        places: by what they are for.
        loopback: why it does not work; empty if it does.
        proxy: that may get what is meant for loopback.
    """
    return [
        Finding("system", "pass", f"{machine.system}, Python {machine.python}"),
        Finding("processor", "pass", f"{machine.cores} cores, {_memory(machine)}"),
        *_gpus(machine),
        *_packages(machine),
        _vllm(machine, vllm),
        *(_place(name, place) for name, place in places.items()),
        _loopback(loopback, proxy),
    ]


def gib(count: int) -> str:
    """Bytes in words."""
    return f"{count / GIB:.1f} GiB"


def _memory(machine: Machine) -> str:
    if not machine.memory:
        return "memory unknown"
    return f"{gib(machine.memory)} of memory, {gib(machine.free_memory)} free"


def _gpus(machine: Machine) -> list[Finding]:
    if not machine.gpus:
        return [
            Finding(
                "GPU",
                "warn",
                f"none: {machine.why_no_gpu}",
                "Models up to about 0.5B train on the processor; for bigger ones take a machine "
                "with an NVIDIA GPU and its driver.",
            )
        ]
    found = []
    for gpu in machine.gpus:
        major, minor = gpu.capability
        room = f"{gib(gpu.total)}, {gib(gpu.free)} free"
        what = f"{gpu.name}, {room}, compute capability {major}.{minor}"
        if gpu.capability < _VLLM_CAPABILITY:
            found.append(Finding("GPU", "fail", what, "vLLM needs capability 7.0 or newer."))
        elif gpu.capability < _BRAIN_CAPABILITY:
            found.append(Finding("GPU", "warn", what, "It has no bfloat16, which training uses."))
        elif gpu.free < gpu.total // 2:
            found.append(
                Finding("GPU", "warn", what, "Another program uses it: see nvidia-smi, and end it.")
            )
        else:
            found.append(Finding("GPU", "pass", what))
    driver = f"driver {machine.driver}, CUDA up to {machine.cuda or 'unknown'}"
    return [*found, Finding("driver", "pass", driver)]


def _packages(machine: Machine) -> list[Finding]:
    versions = machine.packages
    shown = ", ".join(f"{name} {number}" for name, number in versions.items() if number)
    absent = [name for name in _TRAINING if not versions[name]]
    found = [Finding("packages", "pass", shown)]
    if absent:
        what = f"{', '.join(absent)} not installed: agents run here, nothing is trained"
        found.append(Finding("training", "warn", what, f"To train on this machine: {_INSTALL}"))
    elif machine.why_torch_is_blind:
        found.append(
            Finding(
                "training",
                "fail",
                f"torch {versions['torch']} can't use the GPU: {machine.why_torch_is_blind}",
                f"Install a torch built for CUDA {machine.cuda or ''} or older.".replace("  ", " "),
            )
        )
    else:
        where = "on the GPU" if machine.gpus else "on the processor"
        found.append(Finding("training", "pass", f"torch computes {where}"))
        found += _for_gpus(machine)
    return found


def _for_gpus(machine: Machine) -> list[Finding]:
    """What a trainer on a GPU may be set to."""
    if not machine.gpus:
        return []
    number, unsloth = (machine.packages[name] for name in ("bitsandbytes", "unsloth"))
    if number:
        what = f"bitsandbytes {number} packs base models for TrainerConfig(load_in_4bit=True)"
        found = [Finding("4 bits", "pass", what)]
    else:
        what = "bitsandbytes is not installed: base models are trained in 16 bits"
        found = [Finding("4 bits", "skipped", what, f"For less memory: {_INSTALL_GPU}")]
    if unsloth:
        what = f"{unsloth} is used by TrainerConfig(layers='unsloth') alone"
        found.append(Finding("Unsloth", "pass", what))
    return found


def _vllm(machine: Machine, vllm: VllmSeen) -> Finding:
    if vllm.version is None:
        if machine.gpus:
            return Finding("vLLM", "warn", vllm.why_not, vllm.fix)
        return Finding("vLLM", "skipped", f"{vllm.why_not}; the embedded engine serves", vllm.fix)
    kind = "for the processor" if vllm.is_cpu else "for GPUs"
    if vllm.is_cpu and machine.gpus:
        return Finding(
            "vLLM", "warn", f"{vllm.version} {kind}, beside a GPU", "Run: art-langgraph setup vllm"
        )
    return Finding("vLLM", "pass", f"{vllm.version} {kind}")


def _place(name: str, place: Place) -> Finding:
    if place.why_not:
        return Finding(
            name,
            "fail",
            f"{place.folder} can't be written: {place.why_not}",
            "Set ART_HOME to a folder that can be." if "models" in name else "Use another folder.",
        )
    if place.why_no_wal:
        return Finding(
            name,
            "fail",
            f"SQLite can't keep a write-ahead log in {place.folder}: {place.why_no_wal}",
            "Take a folder on a local disk; network disks often can't.",
        )
    what = f"{place.folder}, {gib(place.free)} free, SQLite keeps a write-ahead log"
    if place.free < _LITTLE_DISK:
        return Finding(name, "warn", what, f"Free some space: {gib(_LITTLE_DISK)} are soon used.")
    return Finding(name, "pass", what)


def _loopback(why_not: str, proxy: str | None) -> Finding:
    if why_not:
        return Finding(
            "loopback",
            "fail",
            f"nothing can be served on 127.0.0.1: {why_not}",
            "Allow local ports; everything is served there.",
        )
    if proxy is not None:
        return Finding(
            "loopback",
            "warn",
            f"a proxy is set ({proxy}), and clients may send it what is meant for 127.0.0.1",
            "Run: export NO_PROXY=127.0.0.1,localhost",
        )
    return Finding("loopback", "pass", "a free port on 127.0.0.1 answers")
