"""Files of conversations: what is read, what is refused and why, and in which order it comes."""

from __future__ import annotations

import gzip
import json
import os
from pathlib import Path
from typing import Any

import pytest

import art_core as art
from art_core.errors import ConfigError, DataFileError
from art_core.sft.file import ConversationFile, FileReport, validate

MESSAGES = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yo"}]
ROW = json.dumps({"messages": MESSAGES})
OTHER_ORDER = json.dumps(
    {"messages": [{"content": m["content"], "role": m["role"]} for m in MESSAGES]}
)


def row(text: str, **more: Any) -> str:
    return json.dumps({"messages": [*MESSAGES[:1], {**MESSAGES[1], "content": text}], **more})


def written(folder: Path, data: str | bytes, name: str = "rows.jsonl") -> Path:
    path = folder / name
    path.write_bytes(data if isinstance(data, bytes) else data.encode())
    return path


def report(folder: Path, data: str | bytes, name: str = "rows.jsonl") -> FileReport:
    return validate(written(folder, data, name))


@pytest.mark.parametrize(
    "data",
    [
        b"\xef\xbb\xbf" + f"{ROW}\n{ROW}\n".encode(),
        f"{ROW}\r\n{ROW}\r\n".encode(),
        f"{ROW}\n\n  \t \n{ROW}".encode(),
        gzip.compress(f"{ROW}\n{ROW}\n".encode()),
        b"\xef\xbb\xbf\r\n" + f"  {ROW}  \n{ROW}".encode(),
    ],
    ids=["bom", "crlf", "mixed_blank", "gz", "bom_blank_and_spaces"],
)
def test_files_of_two_rows(tmp_path: Path, data: bytes) -> None:
    """Case 080: two rows each; they are the same, so one repeats."""
    found = report(tmp_path, data, "rows.jsonl.gz")
    assert (found.rows, found.refused, found.repeats) == (2, 0, 1)
    assert found.is_clean
    assert [t.messages_and_choices[1] for t in art.iterate_file(tmp_path / "rows.jsonl.gz")] == [
        {"role": "assistant", "content": "yo", "weight": 1.0}
    ] * 2


def test_separators_inside_texts_are_texts(tmp_path: Path) -> None:
    """Case 080, separators: texts are byte for byte what the file says, a CR too."""
    text = "a\u2028b\u0085c\\rd\x1ce\u2029"
    data = ROW.replace("yo", text)
    with pytest.raises(DataFileError, match="Invalid control character"):
        list(art.iterate_file(written(tmp_path, data)))  # U+001C must be escaped in JSON
    data = data.replace("\x1c", "\\u001c")
    (one, two) = art.iterate_file(written(tmp_path, f"{data}\n{ROW}\n"), shuffle_buffer_size=1)
    assert one.messages()[1]["content"] == "a\u2028b\u0085c\rd\x1ce\u2029"
    assert two.messages()[1]["content"] == "yo"


@pytest.mark.parametrize(
    ("data", "line", "why"),
    [
        (json.dumps(json.loads(ROW), indent=1), 1, "an object must not be spread over lines"),
        (f"{ROW}\n{ROW[:-1]},}}\n", 2, "not JSON"),
        (f"{ROW},\n{ROW},\n", 1, '"," follows the object'),
        (f"{ROW} {ROW}\n", 1, "another value follows the object"),
        (f"{ROW}\r{ROW}\r", 1, "another value follows the object"),
        ("3\n", 1, "must be an object, not 3"),
        ("null\n", 1, "must be an object, not null"),
        (f"\n\n{ROW}\n\n[{ROW}]\n", 5, "must be an object"),
        (ROW.replace("yo", "caf\xe9").encode("cp1252"), 1, "not UTF-8 (byte 0xE9 at offset "),
        (ROW.replace("}]}", '}], "messages": []}'), 1, 'the key "messages" is given twice'),
        (ROW.replace('"yo"', "NaN"), 1, "NaN is not JSON"),
        (ROW.replace("yo", "\\ud83d"), 1, "half of a surrogate pair"),
        (ROW.replace('"yo"', "[" * 100_000), 1, "nested too deep"),
        (f"{ROW}\n{ROW}".encode("utf-16-le"), 1, "NUL bytes"),
        (ROW[: len(ROW) // 2], 1, "not JSON"),
    ],
    ids=[
        "pretty", "trailing_comma", "comma_between", "fused", "fused_by_cr", "scalar", "null",
        "late_array", "cp1252", "twice_key", "nan", "surrogate", "deep", "utf16_no_mark", "cut",
    ],
)  # fmt: skip
def test_refused_lines_say_where_and_why(
    tmp_path: Path, data: str | bytes, line: int, why: str
) -> None:
    """Case 080: physical line numbers, and never more than 80 characters of content."""
    found = report(tmp_path, data)
    number, reason = found.reasons[0]
    assert number == line
    assert why in reason
    assert len(reason) < 80 + 100
    assert not found.is_clean
    with pytest.raises(DataFileError, match=f"line {line} of "):
        art.iterate_file(tmp_path / "rows.jsonl")


@pytest.mark.parametrize(
    ("data", "why"),
    [
        (f"[{ROW},\n{ROW}]", "JSON array"),
        (f"\n[\n{ROW},\n{ROW}\n]", "JSON array"),
        (f"{ROW}\n{ROW}".encode("utf-16"), "UTF-16"),
        (gzip.compress(f"{ROW}\n".encode("utf-16")), "UTF-16"),
        (gzip.compress(ROW.encode())[:-9], "can't be unpacked"),
        (b"PK\x03\x04rest", "zip"),
        (b"PAR1rest", "Parquet"),
        (b"\x28\xb5\x2f\xfdrest", "zstandard"),
    ],
    ids=["array", "pretty_array", "utf16", "utf16_gz", "cut_gz", "zip", "parquet", "zstd"],
)
def test_files_of_another_kind_are_named(tmp_path: Path, data: str | bytes, why: str) -> None:
    with pytest.raises(DataFileError, match=why):
        report(tmp_path, data)


@pytest.mark.parametrize("data", ["", "\n\n\n", f"{row('a')}\n".replace("}]}", ', "weight": 0}]}')])
def test_files_without_rows(tmp_path: Path, data: str) -> None:
    assert report(tmp_path, data).rows == 0
    with pytest.raises(DataFileError, match="has no rows to train"):
        art.iterate_file(tmp_path / "rows.jsonl")


def test_a_folder_and_a_missing_file(tmp_path: Path) -> None:
    with pytest.raises(DataFileError, match="not a file"):
        validate(tmp_path)
    with pytest.raises(DataFileError, match="can't be read: No such file"):
        validate(tmp_path / "missing.jsonl")


def test_a_pipe_and_a_path_that_can_not_be_looked_at(tmp_path: Path) -> None:
    """A pipe would be waited for; what the system says of a path is told as it is of a file."""
    os.mkfifo(tmp_path / "pipe.jsonl")
    with pytest.raises(DataFileError, match="is a pipe or a device, not a file"):
        validate(tmp_path / "pipe.jsonl")
    with pytest.raises(DataFileError, match="can't be read: File name too long"):
        validate(tmp_path / ("x" * 300))


def test_repeats_are_told_and_dropped_only_if_asked(tmp_path: Path) -> None:
    """Case 080, dup: six rows are kept, five of them say what the first says."""
    path = written(tmp_path, "\n".join([ROW] * 5 + [OTHER_ORDER]))
    found = validate(path)
    assert (found.rows, found.repeats) == (6, 5)
    with ConversationFile(path, drop_repeats=True) as file:
        assert len(file) == 1


def test_one_bad_line_of_a_thousand(tmp_path: Path) -> None:
    """Case 080: an error that names line 500; with the skip option 999 rows and a count."""
    lines = [row(f"answer {i}") for i in range(1000)]
    lines[499] = lines[499][: len(lines[499]) // 2]
    path = written(tmp_path, "\n".join(lines))
    with pytest.raises(DataFileError, match="line 500 of"):
        art.iterate_file(path)
    assert sum(1 for _ in art.iterate_file(path, skip_refused=True)) == 999
    found = validate(path)
    assert (found.rows, found.refused) == (999, 1)
    assert "line 500 refused" in str(found)


def test_a_line_without_end_is_not_read_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("art_core.sft.lines.LONGEST", 1 << 10)
    found = report(tmp_path, f"{row('x' * 3000)}\n{ROW}\n")
    assert [number for number, _ in found.reasons] == [1]
    assert "longer than" in found.reasons[0][1]
    assert found.rows == 1


def test_unknown_keys_are_warned_of_once(tmp_path: Path) -> None:
    lines = [row("a", split="x"), row("b", split="y"), row("c").replace('"yo"', '"yo"')]
    lines.append(lines[2].replace('"content": "c"', '"content": "d", "train": false'))
    found = report(tmp_path, "\n".join(lines))
    assert found.rows == 4
    assert found.warnings == {
        'unknown key "split" of the row': (2, 1),
        'unknown key "train" in a message': (1, 4),
    }
    assert 'ignored: unknown key "split" of the row (2 rows, first in line 1)' in str(found)


# --- order


def contents(trajectories: Any) -> list[str]:
    return [t.messages()[1]["content"] for t in trajectories]


def test_every_row_once_an_epoch_each_in_another_order(tmp_path: Path) -> None:
    path = written(tmp_path, "\n".join(row(str(i)) for i in range(20)))
    told = contents(art.iterate_file(path, epochs=3))
    epochs = [told[:20], told[20:40], told[40:]]
    assert all(sorted(e, key=int) == [str(i) for i in range(20)] for e in epochs)
    assert len({tuple(e) for e in epochs}) == 3
    assert contents(art.iterate_file(path, epochs=3)) == told
    assert contents(art.iterate_file(path, epochs=3, seed=7)) != told
    assert contents(art.iterate_file(path, epochs=3, initial_skip=33)) == told[33:]
    assert contents(art.iterate_file(path, epochs=3, initial_skip=60)) == []


def test_the_window_bounds_how_far_a_row_moves_forward(tmp_path: Path) -> None:
    path = written(tmp_path, "\n".join(row(str(i)) for i in range(50)))
    assert contents(art.iterate_file(path, shuffle_buffer_size=1)) == [str(i) for i in range(50)]
    told = [int(c) for c in contents(art.iterate_file(path, shuffle_buffer_size=5))]
    assert sorted(told) == list(range(50))
    assert told != sorted(told)
    assert all(value < place + 5 for place, value in enumerate(told))


@pytest.mark.parametrize(
    "options", [{"epochs": 0}, {"shuffle_buffer_size": 0}, {"initial_skip": -1}, {"epochs": 1.5}]
)
def test_numbers_out_of_range(tmp_path: Path, options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        art.iterate_file(written(tmp_path, ROW), **options)
