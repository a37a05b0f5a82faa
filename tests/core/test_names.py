"""The rule for names, on every file system (case 079)."""

from __future__ import annotations

import pytest

from art_core.errors import ConfigError
from art_core.names import check_name, same_folder


@pytest.mark.parametrize(
    "name",
    [
        "agent-001",
        "Agent-001",
        "qwen2.5-7b",
        "with blank",
        "caf\u00e9",
        "\u00e9" * 64,  # 128 bytes
        "a" * 128,
        "\U0001f916",
        "stra\u00dfe",
        "console",
        "-dash",
    ],
)
def test_good_names_stay_as_they_are(name: str) -> None:
    assert check_name("model", name) == name


@pytest.mark.parametrize(
    ("name", "rule"),
    [
        ("", "is empty"),
        (".", "dot"),
        ("..", "dot"),
        (".hidden", "dot"),
        ("name.", "dot"),
        ("name ", "blank"),
        (" name", "blank"),
        ("agent/v2", "'/'"),
        ("agent\\v2", r"'\\\\'"),
        ("agent:v1", "':'"),
        ("agent@3", "'@'"),
        ('a<b>|"?*', "'<'"),
        ("con", "Windows device"),
        ("NUL.txt", "Windows device"),
        ("Lpt1 .log", "Windows device"),
        ("COM\u00b9", "Windows device"),
        ("cafe\u0301", "NFC"),
        ("\u00e9" * 65, "130 bytes"),
        ("a" * 129, "129 bytes"),
        ("a\nb", r"U\+000A"),
        ("a\x00b", r"U\+0000"),
        ("a\u200bb", r"U\+200B"),
        ("a\u202eb", r"U\+202E"),
        ("a\u00a0b", r"U\+00A0"),
        ("a\ud83d", r"U\+D83D"),
    ],
)
def test_bad_names_are_refused_with_the_rule(name: str, rule: str) -> None:
    with pytest.raises(ConfigError, match=rule):
        check_name("model", name)


def test_what_is_no_text_is_no_name() -> None:
    with pytest.raises(ConfigError, match="is a int, not text"):
        check_name("model", 7)  # type: ignore[arg-type]  # the fault under test


@pytest.mark.parametrize(
    ("left", "right", "same"),
    [
        ("agent", "Agent", True),
        ("stra\u00dfe", "STRASSE", True),
        ("caf\u00e9", "CAFE\u0301", True),
        ("cafe", "caf\u00e9", False),
        ("a", "b", False),
    ],
)
def test_names_that_some_file_system_takes_for_one(left: str, right: str, same: bool) -> None:
    assert same_folder(left, right) is same
