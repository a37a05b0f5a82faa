"""Texts for regular expressions, as schemas of tools have them."""

from __future__ import annotations

import re

import pytest

from art_langgraph.rehearsal.bounded_search import first_match, is_simple
from art_langgraph.rehearsal.pattern_text import text_matching


@pytest.mark.parametrize(
    ("pattern", "text"),
    [
        (r"^[A-Z]{3}-\d{4}$", "AAA-0000"),
        (r"^\+?[1-9]\d{1,14}$", "10"),
        (r"^(GET|POST)$", "GET"),
        (r"^(?:[0-9a-f]{2}:){5}[0-9a-f]{2}$", "aa:aa:aa:aa:aa:aa"),
        (r"^#[0-9a-fA-F]{6}$", "#aaaaaa"),
        (r"^\S+@\S+\.\w{2,}$", "a@a.aa"),
        (r"^(?<year>\d{4})-(?P<month>\d\d)$", "0000-00"),
        (r"^[^\s,]+$", "a"),
        (r"^[]a]\]$", "a]"),
        (r"^[\]\-x]$", "x"),
        (r"\.(csv|json)$", ".csv"),
        (r"^a{0,2}b*?c$", "c"),
        (r"^\x41\u0042\/\t$", "AB/\t"),
        (r"^.{3}\b$", "aaa"),
        (r"^a||b$", "a"),
        (r"", ""),
    ],
)
def test_a_text_is_as_short_as_it_may_be(pattern: str, text: str) -> None:
    assert re.search(pattern.replace("(?<", "(?P<"), text)
    assert text_matching(pattern) == text


@pytest.mark.parametrize("pattern", ["(?!)", "[", "(", "\\", r"^(a)\1$(?<=b)", r"\p{L}{", "a{1"])
def test_what_is_beyond_it_is_none_or_fits(pattern: str) -> None:
    text = text_matching(pattern)
    assert text is None or re.search(pattern, text)


def test_a_given_text_is_taken_first_and_lengths_count() -> None:
    assert text_matching(r"^\w+$", ["not this", "that"]) == "that"
    assert text_matching(r"^\w+$", ["that"], longest=3) == "a"
    assert text_matching(r"^\w+$", ["that"], shortest=5) == "a" * 8
    assert text_matching(r"^\w{3}$", shortest=4) is None


@pytest.mark.parametrize("pattern", [r"a{99999999999}", r"\d{900000000}", r"((\w{900}){900}){900}"])
def test_a_pattern_that_wants_too_much_is_not_solved(pattern: str) -> None:
    """The first is an OverflowError of `re`, the others would fill the memory."""
    assert text_matching(pattern) is None


@pytest.mark.parametrize(
    "pattern",
    [r"^(a+)+$", r"^(a|a){40}b$", r"(?=.*\d)^(\w+\s?)*$", r"^(\w*)(\w*)(\w*)(\w*)(\w*)!(?!)"],
)
def test_a_pattern_that_would_take_for_ever_ends(pattern: str) -> None:
    """Python's own matching of these takes 2 ** 40 steps and more on such words."""
    words = ["a" * 40 + "!", "a" * 2000, "aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa-"]
    text = text_matching(pattern, words)
    assert text is None or re.search(pattern, text)


@pytest.mark.parametrize(
    ("pattern", "simple"),
    [
        (r"^\d{5}$", True),
        (r"^ord-\d{3}-[a-z]{2}$", True),
        (r"^(ab|cd)-\d+$", True),
        (r"[)*+]+", True),
        (r"[]a*]{2}", True),
        (r"\(\*\)\+x*", True),
        (r"^(?:a|b)$", True),
        (r"\d+\.\d+", False),
        (r"(a+)+", False),
        (r"(a|a){30}", False),
        (r"(\w)\1", False),
        (r"(?P<x>\w)(?P=x)", False),
    ],
)
def test_what_is_searched_for_in_a_process_of_its_own(pattern: str, simple: bool) -> None:
    assert is_simple(pattern) is simple


def test_a_process_of_its_own_finds_the_same() -> None:
    assert first_match(r"\d+\.\d+", ["no", "a 1.5", "2.5"]) == "a 1.5"
    assert first_match(r"\d+\.\d+", ["no"]) is None
    with pytest.raises(re.error):
        first_match("(", ["no"])
