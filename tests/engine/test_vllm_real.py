"""The supervisor with the real vLLM: starts that it refuses, deaths, no process left behind."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from art_core.engine.keeper import start_of
from art_core.engine.runtime import VllmRuntime
from art_core.engine.vllm_process import Supervision, VllmProcess
from art_core.engine.vllm_settings import VllmSettings
from art_core.errors import EngineStartFailed
from tests.engine.supervised import all_gone, ask, wait_for

pytestmark = [pytest.mark.slow, pytest.mark.model]

START_S = 600.0
"""Longest start, on a busy machine."""


def real(runtime: VllmRuntime, model: Path, folder: Path, *flags: str, **given: Any) -> VllmProcess:
    """vLLM with SmolLM2, not started yet."""
    settings = VllmSettings(
        model=model,
        served_name="smol",
        max_loras=2,
        dtype="float32" if runtime.is_cpu else "auto",
        max_model_len=given.pop("max_model_len", 1024),
        extra_args=("--enforce-eager", *flags),
    )
    return VllmProcess(settings, python=runtime.python, folder=folder, **given)


def tree(folder: Path) -> list[int]:
    """Every process of the server in `folder`: those of its session, the first one first."""
    if not (folder / "process.json").exists():
        return []
    record = json.loads((folder / "process.json").read_text())
    listed = subprocess.run(
        ["ps", "-e", "-o", "pid=,sid="], capture_output=True, text=True, check=True
    )
    pairs = [line.split() for line in listed.stdout.splitlines()]
    return sorted(int(pid) for pid, session in pairs if int(session) == record["main"][0])


def write_adapter(folder: Path) -> Path:
    """A LoRA of rank 8 on one layer of SmolLM2-135M (576 wide), all zero."""
    from safetensors.numpy import save_file

    folder.mkdir()
    config = {
        "peft_type": "LORA",
        "r": 8,
        "lora_alpha": 16,
        "target_modules": ["q_proj"],
        "bias": "none",
    }
    (folder / "adapter_config.json").write_text(json.dumps(config))
    layer = "base_model.model.model.layers.0.self_attn.q_proj"
    save_file(
        {
            f"{layer}.lora_A.weight": np.zeros((8, 576), np.float32),
            f"{layer}.lora_B.weight": np.zeros((576, 8), np.float32),
        },
        folder / "adapter_model.safetensors",
    )
    return folder


def chat(process: VllmProcess, **more: Any) -> str:
    """What it says to "hi"."""
    messages = [{"role": "user", "content": "hi"}]
    body = {"model": "smol", "messages": messages, "max_tokens": 4, **more}
    answer = ask(process, "/v1/chat/completions", **body)
    return str(answer["choices"][0]["message"]["content"])


@pytest.mark.parametrize(
    ("flags", "given", "why"),
    [
        (["--no-such-flag", "3"], {}, "does not know --no-such-flag"),
        (["--kv-cache-dtype", "odd"], {}, "refuses --kv-cache-dtype: invalid choice"),
        (
            [],
            {"max_model_len": 100_000},
            "max_model_len is 100000, and the model was made for 8192",
        ),
    ],
)
def test_a_refused_start_is_understood(
    flags: list[str],
    given: dict[str, Any],
    why: str,
    vllm: VllmRuntime,
    smollm2: Path,
    tmp_path: Path,
) -> None:
    with pytest.raises(EngineStartFailed, match=why):
        real(vllm, smollm2, tmp_path, *flags, **given).start()


def test_deaths_and_hangs_of_a_running_one(
    vllm: VllmRuntime, smollm2: Path, tmp_path: Path
) -> None:
    adapter = write_adapter(tmp_path / "adapter")
    loaded: list[int] = []

    def load(process: VllmProcess) -> None:
        ask(process, "/v1/load_lora_adapter", lora_name="a", lora_path=str(adapter))
        loaded.append(process.starts)

    process = real(
        vllm,
        smollm2,
        tmp_path / "run",
        on_restart=load,
        supervision=Supervision(hang_after=15.0, restarts=3),
    )
    with process.start():
        assert chat(process)
        load(process)
        assert chat(process, model="a")
        first = tree(process.folder)
        assert len(first) >= 3, "the server, its engine and its worker"

        os.kill(first[0], signal.SIGKILL)
        wait_for(lambda: process.starts == 2 and process.state == "ready", START_S)
        assert all_gone(first)
        assert chat(process, model="a")

        second = tree(process.folder)
        for pid in second[1:]:
            os.kill(pid, signal.SIGSTOP)  # its engine hangs, its front end does not
        wait_for(lambda: process.starts == 3 and process.state == "ready", START_S)
        assert all_gone(second)
        assert chat(process, model="a")

        third = tree(process.folder)
        for pid in third[2:]:
            os.kill(pid, signal.SIGKILL)  # as the system does to what has the most memory
        wait_for(lambda: process.starts == 4 and process.state == "ready", START_S)
        assert loaded == [1, 2, 3, 4]
        last = tree(process.folder)
    assert all_gone(last)


@pytest.mark.parametrize("moment", ["starting", "idle", "calling", "loading", "stopping"])
def test_no_orphan_after_kill_9_of_the_parent(
    moment: str, vllm: VllmRuntime, smollm2: Path, tmp_path: Path
) -> None:
    adapter = write_adapter(tmp_path / "adapter")
    command = [sys.executable, "-m", "tests.engine.test_vllm_real"]
    given = [str(tmp_path / "run"), moment, str(vllm.python), str(smollm2), str(adapter)]
    with subprocess.Popen([*command, *given], stdout=subprocess.PIPE, text=True) as killed:
        assert killed.stdout is not None
        assert next(line for line in killed.stdout if line.startswith("now"))
        if moment == "starting":
            wait_for(lambda: len(tree(tmp_path / "run")) >= 3, START_S)
        left = tree(tmp_path / "run")
        assert left
        assert start_of(left[0]) is not None
        killed.kill()
    wait_for(lambda: all_gone(left), 60.0)
    wait_for(lambda: not (tmp_path / "run" / "process.json").exists(), 60.0)


def be_a_parent(folder: Path, moment: str, python: Path, model: Path, adapter: Path) -> None:
    """Bring vLLM to `moment`, say "now", and go on with it until killed."""
    runtime = VllmRuntime(python, "", "", is_cpu=True, source="named")
    process = real(runtime, model, folder)
    for line in told_while(process, moment):
        sys.stdout.write(f"{line}\n")
        sys.stdout.flush()
    number = 0
    while True:
        number += 1
        if moment == "calling":
            chat(process, max_tokens=900, ignore_eos=True)
        elif moment == "loading":
            name = f"a{number}"
            ask(process, "/v1/load_lora_adapter", lora_name=name, lora_path=str(adapter))
            ask(process, "/v1/unload_lora_adapter", lora_name=name)
        elif moment == "stopping":
            process.stop()
        else:
            signal.pause()


def told_while(process: VllmProcess, moment: str) -> Iterator[str]:
    """Starts it; "now" comes when the moment has come, or is about to."""
    if moment == "starting":
        yield "now"
    process.start()
    yield "now"


if __name__ == "__main__":
    be_a_parent(Path(sys.argv[1]), sys.argv[2], *(Path(given) for given in sys.argv[3:6]))
