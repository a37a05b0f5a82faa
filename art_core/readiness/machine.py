"""What this machine has: processors, memory, disk, GPUs. Torch is never loaded.

In: nothing but the machine. Out: `Machine`. A container's limits count, not its host's size. GPUs
are asked of NVIDIA's own program, which is there wherever its driver is.
"""

from __future__ import annotations

import os
import platform
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

_QUERY = "name,memory.total,memory.free,driver_version,compute_cap"
_SECONDS, _TORCH_SECONDS = 15.0, 90.0
_MIB = 2**20
_LIMITS = ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes")
_USED = ("/sys/fs/cgroup/memory.current", "/sys/fs/cgroup/memory/memory.usage_in_bytes")
_STATISTICS = ("/sys/fs/cgroup/memory.stat", "/sys/fs/cgroup/memory/memory.stat")
_PACKAGES = ("torch", "transformers", "peft", "unsloth", "bitsandbytes", "langgraph", "openai")


@dataclass(frozen=True)
class Gpu:
    """One GPU."""

    name: str
    total: int
    """Bytes."""
    free: int
    """Bytes, now."""
    capability: tuple[int, int]
    """CUDA's compute capability; vLLM wants 7.0, bfloat16 8.0."""


@dataclass(frozen=True)
class Machine:
    """What was found."""

    system: str
    python: str
    cores: int
    """That this process may use."""
    memory: int
    """Bytes, of the machine or of the container."""
    free_memory: int
    gpus: tuple[Gpu, ...]
    why_no_gpu: str
    """Empty where there is one."""
    driver: str | None
    cuda: str | None
    """Newest CUDA that the driver runs."""
    packages: dict[str, str | None]
    """Versions by name; None: not installed."""
    why_torch_is_blind: str
    """Why torch can't use the GPUs; empty if it can, or if there is nothing to try."""


def look_around() -> Machine:
    """Look at this machine; takes a second where there is a GPU, else nothing."""
    total, free = memory_now()
    packages = {name: _version(name) for name in _PACKAGES}
    shown = _nvidia_smi(f"--query-gpu={_QUERY}", "--format=csv,noheader,nounits")
    gpus = tuple(map(_gpu, shown.lines)) if shown.ok else ()
    head = _nvidia_smi().text if gpus else ""
    cuda = re.search(r"CUDA Version:\s*([\d.]+)", head)
    return Machine(
        system=f"{platform.system()} {platform.machine()}",
        python=platform.python_version(),
        cores=_cores(),
        memory=total,
        free_memory=free,
        gpus=gpus,
        why_no_gpu="" if gpus else shown.why or "NVIDIA's driver shows none",
        driver=shown.lines[0].split(",")[3].strip() if gpus else None,
        cuda=cuda[1] if cuda else None,
        packages=packages,
        why_torch_is_blind=_try_torch() if gpus and packages["torch"] else "",
    )


def _try_torch() -> str:
    """Have torch look at the GPUs, in a process of its own."""
    code = "import torch; torch.zeros(1, device='cuda'); print('seen')"
    try:
        done = subprocess.run(
            [sys.executable, "-P", "-c", code],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=_TORCH_SECONDS,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return str(error)
    return "" if "seen" in done.stdout else (done.stderr.strip().splitlines() or ["no reason"])[-1]


@dataclass(frozen=True)
class _Shown:
    ok: bool
    text: str
    why: str

    @property
    def lines(self) -> list[str]:
        return [line for line in self.text.splitlines() if line.strip()]


def _nvidia_smi(*arguments: str) -> _Shown:
    command = shutil.which("nvidia-smi")
    if command is None:
        return _Shown(False, "", "NVIDIA's driver is not installed")
    try:
        done = subprocess.run(
            [command, *arguments],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=_SECONDS,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return _Shown(False, "", f"nvidia-smi does not answer ({error})")
    if done.returncode:
        return _Shown(False, "", f"nvidia-smi says: {(done.stdout or done.stderr).strip()[:200]}")
    return _Shown(True, done.stdout, "")


def _gpu(line: str) -> Gpu:
    """A line of `_QUERY`; a number that the driver does not tell is 0 ("[N/A]")."""
    name, total, free, _, capability = (field.strip() for field in line.split(","))
    major, _, minor = capability.partition(".")
    return Gpu(name, _number(total) * _MIB, _number(free) * _MIB, (_number(major), _number(minor)))


def _number(text: str) -> int:
    return int(text) if text.isdigit() else 0


def _cores() -> int:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def memory_now() -> tuple[int, int]:
    """(all, free) bytes of the machine or of the container; zeros where the system does not tell.

    Files that a container has read count as used by it, but go when memory is wanted: so they are
    taken as free.
    """
    total = free = 0
    try:
        text = Path("/proc/meminfo").read_text("ascii")
    except OSError:  # not Linux
        if hasattr(os, "sysconf") and "SC_PHYS_PAGES" in os.sysconf_names:
            total = free = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    else:
        found = {key: int(value) * 1024 for key, value in re.findall(r"(\w+):\s+(\d+) kB", text)}
        total, free = found.get("MemTotal", 0), found.get("MemAvailable", 0)
    limit, used = _first_number(_LIMITS), _first_number(_USED)
    if limit and limit < total:
        return limit, min(free, max(0, limit - (used or 0) + _files_kept()))
    return total, free


def _files_kept() -> int:
    """Bytes of a container's files in memory that nobody asked for lately."""
    for file in _STATISTICS:
        try:
            text = Path(file).read_text("ascii")
        except OSError:
            continue
        found = re.search(r"^(?:total_)?inactive_file (\d+)$", text, re.MULTILINE)
        if found:
            return int(found[1])
    return 0


def _first_number(files: tuple[str, ...]) -> int | None:
    for file in files:
        try:
            text = Path(file).read_text("ascii").strip()
        except OSError:
            continue
        if text.isdigit():
            return int(text)
    return None


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None
