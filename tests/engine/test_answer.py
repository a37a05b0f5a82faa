"""One choice, from the engine's deltas to the message."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from art_core.engine.answer import Answer, Piece
from art_core.engine.base import Delta, FinishReason
from art_core.engine.tokenizer import ByteTokenizer
from art_core.errors import EngineError

TOKENIZER = ByteTokenizer()
TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}]
CALL = '<tool_call>\n{"name": "add", "arguments": {"a":1}}\n</tool_call>'


def read(
    text: str,
    *,
    end: FinishReason = "stop",
    portion: int = 1000,
    stop: tuple[str, ...] = (),
    min_tokens: int = 0,
    tools: Sequence[dict[str, Any]] = TOOLS,
    tool_limit: int | None = None,
) -> tuple[Answer, list[Piece]]:
    ids = TOKENIZER.encode(text) + ([257] if end == "stop" else [])
    answer = Answer(
        TOKENIZER,
        call_id_prefix="c",
        stop=stop,
        min_tokens=min_tokens,
        tools=tools,
        tool_limit=tool_limit,
    )
    pieces = []
    for start in range(0, len(ids), portion):
        part = ids[start : start + portion]
        is_last = start + portion >= len(ids)
        pieces.append(answer.take(Delta(part, [-0.5] * len(part), end if is_last else None)))
        if answer.finish_reason is not None:
            break
    return answer, pieces


@pytest.mark.parametrize("portion", [1, 2, 7, 1000])
@pytest.mark.parametrize(
    ("text", "end", "stop", "content", "calls", "finish", "used"),
    [
        ("hé", "stop", (), "hé", 0, "stop", 4),
        ("hé", "length", (), "hé", 0, "length", 3),
        ("", "stop", (), "", 0, "stop", 1),
        (f"Yes.\n{CALL}", "stop", (), "Yes.", 1, "tool_calls", len(CALL) + 6),
        (f"{CALL}\n{CALL}", "stop", (), None, 2, "tool_calls", 2 * len(CALL) + 2),
        (CALL, "length", (), None, 1, "length", len(CALL)),
        (CALL[:-3], "stop", (), CALL[:-3], 0, "stop", len(CALL) - 2),
        (f"{CALL}\n{CALL[:20]}", "stop", (), CALL[:20], 1, "tool_calls", len(CALL) + 22),
        ("one two three", "stop", ("two",), "one ", 0, "stop", 7),
        (f"{CALL} END x", "stop", ("END",), None, 1, "tool_calls", len(CALL) + 4),
        ("a EN", "stop", ("END",), "a EN", 0, "stop", 5),
    ],
)
def test_answers(
    text: str,
    end: FinishReason,
    stop: tuple[str, ...],
    content: str | None,
    calls: int,
    finish: str,
    used: int,
    portion: int,
) -> None:
    """`used` is the number of ids that belong to the answer: bytes, plus one for the end."""
    answer, pieces = read(text, end=end, stop=stop, portion=portion)
    assert answer.message["content"] == content
    assert len(answer.message.get("tool_calls", ())) == calls
    assert answer.finish_reason == finish
    assert len(answer.ids) == len(answer.logprobs) == used
    assert "".join(piece.text for piece in pieces) == (content or "")
    assert [i for piece in pieces for i in piece.ids] == answer.ids
    assert sum(len(piece.calls) for piece in pieces) == calls
    assert [p.finish_reason for p in pieces if p.finish_reason] == [finish]


def test_arguments_and_ids_of_calls() -> None:
    answer, pieces = read(f"{CALL}{CALL}")
    expected = [
        {
            "id": f"c_{i}",
            "type": "function",
            "function": {"name": "add", "arguments": '{"a":1}'},
        }
        for i in range(2)
    ]
    assert answer.message["tool_calls"] == expected
    assert pieces[0].calls == [{"index": i, **call} for i, call in enumerate(expected)]


def test_at_the_limit_of_calls_the_answer_ends() -> None:
    answer, _ = read(f"{CALL}\n{CALL}", tool_limit=1)
    assert len(answer.message["tool_calls"]) == 1
    assert len(answer.ids) == len(CALL)
    assert answer.finish_reason == "tool_calls"


def test_without_tools_a_call_is_text() -> None:
    answer, _ = read(CALL, tools=())
    assert answer.message == {"role": "assistant", "content": CALL}
    assert answer.finish_reason == "stop"


def test_a_stop_string_before_min_tokens_does_not_count() -> None:
    """ "a." are two tokens and the first stop is the second of them; the next is the fourth."""
    answer, _ = read("a.b.c", stop=(".",), min_tokens=3)
    assert answer.message["content"] == "a.b"
    assert len(answer.ids) == 4


def test_an_engine_that_cancels_or_counts_wrong_is_an_error() -> None:
    answer = Answer(TOKENIZER, call_id_prefix="c")
    with pytest.raises(EngineError, match="cancelled"):
        answer.take(Delta([97], [-0.1], "cancelled"))
    assert answer.ids == [97]
    for logprobs in ([], [float("nan")], [float("-inf")]):
        with pytest.raises(EngineError, match="finite logprob"):
            answer.take(Delta([97], logprobs))
