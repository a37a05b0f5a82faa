"""Sealed folders: whole or absent, and honest about damage."""

from __future__ import annotations

from pathlib import Path

import pytest

from art_core.sealed import MANIFEST, find_damage, remove_leftovers, write_sealed


def fill(folder: Path) -> None:
    """Two files, one of them in a folder."""
    (folder / "deep").mkdir()
    (folder / "deep" / "a.bin").write_bytes(b"abc")
    (folder / "b.txt").write_text("b", "utf-8")


def test_a_written_folder_is_whole_and_alone(tmp_path: Path) -> None:
    target = tmp_path / "new" / "target"
    write_sealed(target, fill)
    assert find_damage(target) is None
    assert (target / "deep" / "a.bin").read_bytes() == b"abc"
    assert [p.name for p in target.parent.iterdir()] == ["target"]


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("deep/a.bin", None, "deep/a.bin is missing"),
        ("deep/a.bin", b"ab", "deep/a.bin has 2 bytes, not 3"),
        ("deep/a.bin", b"abd", "deep/a.bin does not have the SHA-256"),
        (MANIFEST, None, f"{MANIFEST} is missing"),
        (MANIFEST, b'{"files": {"b.t', f"{MANIFEST} can't be read"),
        (MANIFEST, b"[]", f"{MANIFEST} can't be read"),
    ],
)
def test_damage_is_named(tmp_path: Path, name: str, content: bytes | None, said: str) -> None:
    target = tmp_path / "target"
    write_sealed(target, fill)
    if content is None:
        (target / name).unlink()
    else:
        (target / name).write_bytes(content)
    damage = find_damage(target)
    assert damage is not None
    assert damage.startswith(said)


def test_a_failed_write_leaves_the_old_folder_and_no_part(tmp_path: Path) -> None:
    target = tmp_path / "target"
    write_sealed(target, fill)

    def fails(folder: Path) -> None:
        (folder / "half").write_bytes(b"x")
        raise OSError(28, "No space left on device")

    with pytest.raises(OSError, match="No space left"):
        write_sealed(target, fails)
    assert find_damage(target) is None
    assert [p.name for p in tmp_path.iterdir()] == ["target"]


def test_a_second_write_replaces_the_folder(tmp_path: Path) -> None:
    target = tmp_path / "target"
    write_sealed(target, fill)
    write_sealed(target, lambda folder: (folder / "c").touch())
    assert find_damage(target) is None
    assert sorted(p.name for p in target.iterdir()) == ["c", MANIFEST]


def test_leftovers_of_killed_writers_go_and_nothing_else(tmp_path: Path) -> None:
    (tmp_path / ".tmp-target-1a").mkdir()
    (tmp_path / ".tmp-other-1a").mkdir()
    write_sealed(tmp_path / "target", fill)
    remove_leftovers(tmp_path / "target")
    assert sorted(p.name for p in tmp_path.iterdir()) == [".tmp-other-1a", "target"]
