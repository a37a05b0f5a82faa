"""JSON from and to bytes has the outcome of `json`, whatever the text."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest

from art_core.json_bytes import read_json, write_json

TEXTS = [
    b'{"a": [1, -0.0, 1e-7, 0.1, 123456789012345678901234567890], "a": null}',
    b'["\\ud800", "\\ud83d\\ude00", "\xc3\xa9", "\\u2028"]',
    b"\xef\xbb\xbf[1]",
    b" [true, Infinity, -Infinity] ",
    b"[1e400]",
]


@pytest.mark.parametrize("text", TEXTS)
def test_reads_as_json_does(text: bytes) -> None:
    assert repr(read_json(text)) == repr(json.loads(text))


@pytest.mark.parametrize("text", [b"", b"[1] x", b'["\xff"]', b"{'a': 1}", b"[1,]"])
def test_refuses_what_json_refuses(text: bytes) -> None:
    for read in (json.loads, read_json):
        with pytest.raises((json.JSONDecodeError, UnicodeDecodeError)):
            read(text)


def test_reads_not_a_number() -> None:
    (value,) = read_json(b"[NaN]")
    assert math.isnan(value)


@pytest.mark.parametrize(
    "value",
    [
        {"a": [1, 1.0, -0.0, 1e-7, 10**30, None, True, 'é\u2028\x7f"\\']},
        [math.inf, -math.inf, 0.1, 5e-324, 1.7976931348623157e308],
        ["\ud800"],
        {},
    ],
)
def test_what_was_written_is_read_again(value: Any) -> None:
    written = write_json(value)
    assert repr(json.loads(written)) == repr(value)
    assert b": " not in written
