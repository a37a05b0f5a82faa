"""Text as it comes: the joined pieces are the same for every cut."""

from __future__ import annotations

import random

import pytest

from art_core.engine.detokenize import StopStrings, StreamDecoder, overlap
from art_core.engine.tokenizer import ByteTokenizer

TOKENIZER = ByteTokenizer()


def test_half_characters_wait() -> None:
    decoder = StreamDecoder(TOKENIZER)
    a, b, c, d = "😀".encode()
    assert [decoder.push([i]) for i in (a, b, c, d)] == ["", "", "", "😀"]
    assert decoder.flush() == ""


def test_a_character_that_never_ends_is_a_replacement_character() -> None:
    decoder = StreamDecoder(TOKENIZER)
    assert decoder.push([0x61, 0xF0, 0x9F]) == "a"
    assert decoder.flush() == "�"


def test_special_tokens_are_no_text() -> None:
    assert StreamDecoder(TOKENIZER).push(TOKENIZER.encode("a<|im_end|>b")) == "ab"


@pytest.mark.parametrize("seed", range(20))
def test_random_bytes_read_the_same_in_every_cut(seed: int) -> None:
    """The right text is Python's own decoding of all bytes at once."""
    rng = random.Random(seed)
    data = bytes(rng.choice([0x61, 0xC3, 0xA9, 0xF0, 0x9F, 0x98, 0x80, 0xFF]) for _ in range(40))
    decoder, text, at = StreamDecoder(TOKENIZER), "", 0
    while at < len(data):
        size = rng.randint(1, 5)
        text += decoder.push(data[at : at + size])
        at += size
    assert text + decoder.flush() == data.decode("utf-8", "replace")


@pytest.mark.parametrize(
    ("stops", "text", "before", "matched"),
    [
        ((), "abc", "abc", None),
        (("b",), "abc", "a", "b"),
        (("bcd", "c"), "abcd", "ab", "c"),
        (("cd", "bcd"), "abcd", "a", "bcd"),
        (("b", "bc"), "abcd", "a", "b"),
        (("xyz",), "axyxyz!", "axy", "xyz"),
        (("xyz",), "axyxy", "axyxy", None),
        (("\n\n",), "a\n \n\nb", "a\n ", "\n\n"),
        (("é",), "caf\u00e9s", "caf", "é"),
    ],
)
def test_the_stop_string_that_is_complete_first_ends_the_text(
    stops: tuple[str, ...], text: str, before: str, matched: str | None
) -> None:
    """Whole, and letter by letter. Of two that are complete at one place the longer counts."""
    for portions in ([text], list(text)):
        found = StopStrings(stops)
        assert "".join(map(found.push, portions)) + found.flush() == before
        assert found.matched == matched


def test_nothing_that_may_begin_a_stop_string_is_given_out() -> None:
    stops = StopStrings(["STOP"])
    assert [stops.push(c) for c in "aSTaSTOP"] == ["a", "", "", "STa", "", "", "", ""]
    assert stops.push("more") == ""


@pytest.mark.parametrize(
    ("text", "size"), [("abc", 0), ("ab<", 1), ("a<to", 3), ("<tool>", 0), ("<<", 1), ("", 0)]
)
def test_overlap_with_the_beginning_of_a_mark(text: str, size: int) -> None:
    assert overlap(text, "<tool>") == size
