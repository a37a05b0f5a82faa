"""`art-langgraph doctor` as it is called."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from art_langgraph.cli import main
from tests.readiness.models import folder


@pytest.fixture(autouse=True)
def at_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In an empty folder, with nothing kept, and no hub."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("ART_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("COLUMNS", "200")


def test_a_machine_alone(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor"]) == 0
    shown, error = capfd.readouterr()
    assert shown.startswith("This machine\n")
    assert "Nothing stands in the way: " in shown
    assert error == ""
    assert list(tmp_path.iterdir()) == [], "nothing is left behind"


def test_json_is_all_there_is(capfd: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("torch", reason="art-langgraph[train] is not installed")
    assert (
        main(
            [
                "doctor",
                "--json",
                "--max-length",
                "1024",
                "--base-model",
                str(folder("qwen2.5-0.5b")),
            ]
        )
        == 0
    )
    shown, error = capfd.readouterr()
    found = json.loads(shown)
    assert error == ""
    assert found["status"] == "ok"
    model = found["model"]
    assert (model["tool_parser"], model["reasoning_parser"]) == ("hermes", None)
    assert model["load"]["length"] == 1024
    ways = {row["way"]: row for row in model["memory"]}
    assert set(ways) == {"serve", "serve 4-bit", "train", "train 4-bit", "embedded"}
    assert ways["train"]["least"] < ways["train"]["most"]
    said = {finding["check"]: finding for finding in model["findings"]}
    assert said["computing"]["what"].startswith("trees")
    assert said["LoRA"]["what"].startswith("on down_proj")


def test_a_model_that_is_too_big_is_shown_with_what_it_needs(
    capfd: pytest.CaptureFixture[str],
) -> None:
    """A rank that vLLM does not know fails anywhere; the table is shown all the same."""
    pytest.importorskip("torch", reason="art-langgraph[train] is not installed")
    assert main(["doctor", "--rank", "600", "--base-model", str(folder("qwen3-8b"))]) == 1
    shown, _ = capfd.readouterr()
    assert "serve by vLLM, 4 bits" in shown
    assert "can't be served and trained here as it is" in shown
    assert "got 600, expected 1 to 512" in shown


@pytest.mark.parametrize("as_json", [True, False])
def test_a_model_that_is_not_to_be_had(as_json: bool, capfd: pytest.CaptureFixture[str]) -> None:
    options = ["--json"] if as_json else []
    assert main(["doctor", "--base-model", "no-one/no-such-model", *options]) == 1
    shown, error = capfd.readouterr()
    assert error == ""
    assert "the base model is not to be had" in shown
    if as_json:
        found = json.loads(shown)
        assert found["status"] == "problems"
        assert [f["check"] for f in found["model"]["findings"]] == ["base model"]


def test_a_folder_that_holds_no_model(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "empty").mkdir()
    assert main(["doctor", "--base-model", "empty"]) == 1
    assert "the folder holds no base model" in capfd.readouterr().out


def test_wrong_usage(capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--max-length", "3"]) == 2
    assert "max-length" in capfd.readouterr().err
