"""`art-langgraph sft`: what a user sees of a file, and of training on it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import art_core as art
from art_core import checkpoints
from art_core.rundir import RunDir
from art_langgraph.cli import main
from tests.core.sft_run import write_rows


def test_a_clean_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["sft", "validate", str(write_rows(tmp_path / "rows.jsonl"))]) == 0
    out = capsys.readouterr().out
    assert "10 rows to train (10 OpenAI)" in out
    assert "10 answers to learn, 0 rows with tools" in out


def test_one_is_not_many(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["sft", "validate", str(write_rows(tmp_path / "rows.jsonl", 1))]) == 0
    out = capsys.readouterr().out
    assert "1 row to train (1 OpenAI)\n1 answer to learn, 0 rows with tools\n" in out


def test_what_is_refused_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = write_rows(tmp_path / "rows.jsonl")
    good = file.read_text().splitlines()
    odd = json.dumps({**json.loads(good[0]), "source": "x"})
    off = good[1].replace('"aaa"', '"b"').replace('b"}', 'b", "weight": 0}')
    ugly = '{"messages": [{"role": "user", "content": "\\u001b[31mq"}, {"role": "\\u001b[0m"}]}'
    file.write_text("\n".join([*good, "", good[0][:30], odd, ugly, off]))
    assert main(["sft", "validate", str(file)]) == 1
    out = capsys.readouterr().out
    assert "11 rows to train" in out
    assert "1 repeat of an earlier row\n" in out
    assert "line 12 refused: not JSON" in out
    assert "line 14 refused: message 1 has the role" in out
    assert 'ignored: unknown key "source" of the row (1 row, first in line 13)' in out
    assert "\x1b" not in out
    assert "1 row left out: no answer has a weight above 0" in out


def test_a_file_that_is_none(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["sft", "validate", str(tmp_path)]) == 1
    assert "is a folder, not a file" in capsys.readouterr().err


@pytest.mark.parametrize("option", ["", "--eval-file"])
def test_a_file_is_looked_at_before_a_model_is_fetched(
    option: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    good, gone = str(write_rows(tmp_path / "rows.jsonl")), str(tmp_path / "gone.jsonl")
    files = [good, option, gone] if option else [gone]
    assert main(["sft", "train", *files, "--base-model", str(tmp_path / "no-model")]) == 1
    assert "gone.jsonl' can't be read: No such file" in capsys.readouterr().err


def test_training_and_going_on(
    tiny_llama: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = write_rows(tmp_path / "rows.jsonl")
    command = ["sft", "train", str(file), "--base-model", str(tiny_llama), "--path", str(tmp_path)]
    options = ["--eval-file", str(file), "--learning-rate", "1e-2"]
    assert main([*command, *options]) == 0
    out = capsys.readouterr().out
    assert "step 1 after 5 optimizer steps" in out
    assert "held-out loss " in out
    run = RunDir.at(tmp_path, "sft", "sft-001")
    assert str(run.checkpoints / "0001") in out.replace("\n", "")
    model = eval(out.splitlines()[-1].removeprefix("go on with  "), {"art": art})  # noqa: S307 - ours
    assert RunDir.at(model.base_path, model.project, model.name).path == run.path
    assert model.base_model == str(tiny_llama)
    assert main([*command, *options, "--epochs", "2"]) == 0
    assert "step 2 after 10 optimizer steps" in capsys.readouterr().out
    assert "nothing was left" not in out
    assert main([*command, *options, "--epochs", "2"]) == 0
    assert "nothing was left to do" in capsys.readouterr().out
    assert checkpoints.steps(run) == [0, 1, 2]


def test_why_a_row_is_left_out_is_told(
    tiny_llama: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = write_rows(tmp_path / "rows.jsonl", 2)
    long = {"role": "user", "content": "x" * 200}, {"role": "assistant", "content": "a"}
    file.write_text(file.read_text() + json.dumps({"messages": long}) + "\n")
    command = ["sft", "train", str(file), "--base-model", str(tiny_llama), "--path", str(tmp_path)]
    assert main([*command, "--max-length", "100"]) == 0
    assert "1 row left out; the first: too long: 2" in capsys.readouterr().out
