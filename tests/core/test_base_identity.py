"""An adapter of another base model is refused though its shapes fit."""

from __future__ import annotations

import logging
from pathlib import Path

import numpy as np
import pytest

from art_core.errors import BaseModelError, CheckpointError
from art_core.nn.base_identity import FILE, BaseIdentity, check_base, identify

numpy = pytest.importorskip("safetensors.numpy", reason="safetensors is not installed")
ADAPTER = Path("adapter")


def base(folder: Path, *, last: float = 0.0, files: int = 1) -> Path:
    folder.mkdir(parents=True)
    big = np.zeros(1000, np.float32)
    big[-1] = last
    tensors = {"a.weight": big, "b.weight": np.ones(3, np.float32)}
    if files == 1:
        numpy.save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    else:
        for i, (name, tensor) in enumerate(tensors.items()):
            numpy.save_file({name: tensor}, folder / f"model-{i}.safetensors")
    return folder


def test_the_same_weights_are_the_same_model_wherever_they_are(tmp_path: Path) -> None:
    first = identify(base(tmp_path / "one"), "Org/Model")
    moved = identify(base(tmp_path / "two", files=2))
    assert (first.name, moved.name) == ("Org/Model", "two")
    assert first.sha256 == moved.sha256
    first.write(tmp_path)
    check_base(tmp_path, None, moved)


def test_other_weights_of_the_same_shape_are_another_model(tmp_path: Path) -> None:
    first = identify(base(tmp_path / "a" / "model"))
    other = identify(base(tmp_path / "b" / "model", last=1.0))
    first.write(tmp_path)
    with pytest.raises(CheckpointError, match=r"trained on another base model: got 'model \("):
        check_base(tmp_path, None, other)
    (tmp_path / FILE).write_text("{")
    with pytest.raises(CheckpointError, match=FILE):
        check_base(tmp_path, None, other)


@pytest.mark.parametrize(
    ("theirs", "ours", "is_other", "is_told"),
    [
        ("Qwen/Qwen2.5-0.5B", "Qwen/Qwen2.5-0.5B-Instruct", True, False),
        ("unsloth/Qwen2.5-0.5B", "Qwen/qwen2.5-0.5b", False, False),
        ("/data/my base", "Qwen/Qwen2.5-0.5B", False, True),  # a folder of any machine
        ("/data/Qwen2.5-0.5B", "Qwen/Qwen2.5-0.5B", False, False),
        (None, "Qwen/Qwen2.5-0.5B", False, False),
    ],
)
def test_where_no_weights_are_known_names_are_compared(
    theirs: str | None, ours: str, is_other: bool, is_told: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """Case 084: another base by its name, and one that was moved."""
    with caplog.at_level(logging.WARNING):
        if is_other:
            with pytest.raises(CheckpointError, match=f"got '{theirs}', expected {ours}"):
                check_base(ADAPTER, theirs, BaseIdentity(ours, "abc"))
        else:
            check_base(ADAPTER, theirs, BaseIdentity(ours, "abc"))
    assert bool(caplog.records) is is_told


def test_a_folder_is_no_model_on_the_hub(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "models" / "my-base").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    check_base(ADAPTER, "models/my-base", BaseIdentity("Qwen/Qwen2.5-0.5B", None))
    check_base(ADAPTER, "../my-base", BaseIdentity("Qwen/Qwen2.5-0.5B", None))
    assert len(caplog.records) == 2


@pytest.mark.parametrize("damage", [b"", b"\x05", b"\xff" * 16, b"\x02" + b"\0" * 7 + b"[]", None])
def test_a_damaged_file_of_weights_is_named(tmp_path: Path, damage: bytes | None) -> None:
    (file,) = base(tmp_path / "model").glob("*.safetensors")
    file.write_bytes(file.read_bytes()[:40] if damage is None else damage)
    with pytest.raises(BaseModelError, match=file.name):
        identify(tmp_path / "model")


def test_a_model_in_the_hubs_cache_has_its_name(tmp_path: Path) -> None:
    folder = tmp_path / "models--Qwen--Qwen2.5-0.5B" / "snapshots" / ("0123456789" * 4)
    assert identify(base(folder)).name == "Qwen/Qwen2.5-0.5B"


def test_the_same_weights_in_mistrals_own_format_do_not_count(tmp_path: Path) -> None:
    folder = base(tmp_path / "plain")
    before = identify(folder)
    numpy.save_file({"x": np.ones(3, np.float32)}, folder / "consolidated.safetensors")
    assert identify(folder).sha256 == before.sha256


def test_a_model_without_such_files_has_a_name_alone(tmp_path: Path) -> None:
    assert identify(tmp_path).sha256 is None
