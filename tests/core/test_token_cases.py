"""Field cases 029, 031, 033 and 035: what is trained of calls, as sequences of ids and flags.

Each case goes the whole way, from calls over the groups to rows, and the sequences are read off the
rows. Templates, ids and expected values are the cases'.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias

import pytest

from art_core.batch.forest import Row, plant
from art_core.batch.rendered import render_missing_prompts
from art_core.batch.select import select
from art_core.calls import ModelCall
from art_core.config import TrainConfig
from art_core.errors import NoTrainableTokens
from art_core.trajectories import Trajectory, TrajectoryGroup
from tests.core.greedy_bytes import (
    ITEMS,
    NO_OLD_THOUGHTS,
    TOJSON,
    WITH_BOS,
    GreedyBytes,
)
from tests.core.sample import make_call
from tests.core.samples import ancestors

Sequence_: TypeAlias = list[tuple[str, int, int]]
"""(text, number of ids, 1 if they are trained) of each stretch."""


def asked(
    messages: list[dict[str, Any]],
    content: str,
    sampled: list[int] | None,
    prompt: list[int] | None,
    logprobs: list[float] | None = None,
) -> ModelCall:
    known = [] if sampled is None else [-0.1 - i / 100 for i in range(len(sampled))]
    return make_call(
        record_id=f"{content}-{len(messages)}",
        request={"messages": messages},
        message={"role": "assistant", "content": content},
        prompt_ids=prompt,
        sampled_ids=sampled,
        logprobs=logprobs or known,
    )


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def rows_of(calls: Sequence[ModelCall], tokenizer: GreedyBytes) -> list[Row]:
    """The rows of a step on a trajectory of these calls; the other one of its group is left out."""
    other = make_call(record_id="other")
    group = TrajectoryGroup(
        [Trajectory(calls=list(calls), reward=1.0), Trajectory(calls=[other], reward=0.0)]
    )
    render_missing_prompts(group, tokenizer, model="agent")
    selection = select([group], model="agent", step=2, config=TrainConfig())
    return plant([s for s in selection.samples if s.trajectory == 0], 1000)


def sequences(rows: Sequence[Row], tokenizer: GreedyBytes) -> list[Sequence_]:
    """Each path of the rows with the token sampled at its end, shortest first."""
    return sorted(
        (found for row in rows for found in _sequences(row, tokenizer)),
        key=lambda found: sum(n for _, n, _ in found),
    )


def _sequences(row: Row, tokenizer: GreedyBytes) -> list[Sequence_]:
    paths = ancestors(row)
    inner = {p for path in paths for p in path[:-1]}
    entries = set(zip(row.entries.position.tolist(), row.entries.target.tolist(), strict=True))
    ends = [p for p in range(len(row)) if p not in inner]
    return [
        _stretches(
            [*row.ids[paths[end]].tolist(), target],
            [0, *(
                int((p, int(row.ids[after])) in entries)
                for p, after in zip(paths[end], paths[end][1:], strict=False)
            ), 1],
            tokenizer,
        )
        for end in ends
        for p, target in entries
        if p == end
    ]  # fmt: skip


def _stretches(ids: list[int], flags: list[int], tokenizer: GreedyBytes) -> Sequence_:
    starts = [i for i, flag in enumerate(flags) if i == 0 or flag != flags[i - 1]]
    ends = [*starts[1:], len(ids)]
    return [
        (tokenizer.decode(ids[a:b]), b - a, flags[a]) for a, b in zip(starts, ends, strict=True)
    ]


def test_029_two_user_turns_under_a_template_that_drops_old_thoughts() -> None:
    """Two sequences, each answer trained once, with its own thinking; they share 21 ids."""
    tokenizer = GreedyBytes(NO_OLD_THOUGHTS)
    first = "<|s|>user\nq1<|e|>\n<|s|>assistant\n"
    second = first + "X<|e|>\n<|s|>user\nq2<|e|>\n<|s|>assistant\n"
    thought = {"role": "assistant", "content": "<think>a</think>X"}
    calls = [
        asked([user("q1")], thought["content"], [259, 97, 260, 88, 257], tokenizer.encode(first)),
        asked(
            [user("q1"), thought, user("q2")],
            "<think>b</think>Y",
            [259, 98, 260, 89, 257],
            tokenizer.encode(second),
        ),
    ]
    rows = rows_of(calls, tokenizer)
    assert sequences(rows, tokenizer) == [
        [(first, 21, 0), ("<think>a</think>X<|e|>", 5, 1)],
        [(second, 45, 0), ("<think>b</think>Y<|e|>", 5, 1)],
    ]
    assert [len(row) for row in rows] == [26 + 50 - 2 - 21]  # two last ids predict nothing


def test_029_one_user_turn_with_a_tool() -> None:
    """The template keeps the thinking here: one sequence, 15 of its 56 ids trained."""
    tokenizer = GreedyBytes(NO_OLD_THOUGHTS)
    first = "<|s|>user\nq<|e|>\n<|s|>assistant\n"
    between = "\n<|s|>tool\nr<|e|>\n<|s|>assistant\n"
    thought = {"role": "assistant", "content": "<think>c</think>call"}
    tool = {"role": "tool", "tool_call_id": "c1", "content": "r"}
    said, end = [259, 99, 260, 99, 97, 108, 108, 257], [259, 100, 260, 101, 110, 100, 257]
    calls = [
        asked([user("q")], "<think>c</think>call", said, tokenizer.encode(first)),
        asked(
            [user("q"), thought, tool],
            "<think>d</think>end",
            end,
            [*tokenizer.encode(first), *said, *tokenizer.encode(between)],
        ),
    ]
    rows = rows_of(calls, tokenizer)
    assert sequences(rows, tokenizer) == [
        [
            (first, 20, 0),
            ("<think>c</think>call<|e|>", 8, 1),
            (between, 21, 0),
            ("<think>d</think>end<|e|>", 7, 1),
        ]
    ]
    assert [len(row) for row in rows] == [55]


HISTORY: list[dict[str, Any]] = [
    user("q"),
    {
        "role": "assistant",
        "content": "",
        "tool_calls": [
            {
                "id": "c1",
                "type": "function",
                "function": {"name": "look", "arguments": '{"city": "Oslo"}'},
            }
        ],
    },
    {"role": "tool", "tool_call_id": "c1", "content": "r"},
]


@pytest.mark.parametrize(
    ("template", "shown", "size"),
    [
        (TOJSON, '<call>{"name": "look", "arguments": {"city": "Oslo"}}</call>', 91),
        (ITEMS, "<call:look><city>Oslo</city></call>", 71),
    ],
)
def test_031_arguments_are_a_mapping_to_the_template(template: str, shown: str, size: int) -> None:
    """They are a JSON string on the wire; the stored message stays as it came."""
    tokenizer = GreedyBytes(template)
    call = asked(HISTORY, "ok", [111, 107, 257], None)
    before, after = "<|s|>user\nq<|e|>\n<|s|>assistant\n", "<|e|>\n<|s|>tool\nr<|e|>\n"
    prompt = before + shown + after + "<|s|>assistant\n"
    assert sequences(rows_of([call], tokenizer), tokenizer) == [
        [(prompt, size, 0), ("ok<|e|>", 3, 1)]
    ]
    assert HISTORY[1]["tool_calls"][0]["function"]["arguments"] == '{"city": "Oslo"}'


def test_033_a_template_that_begins_with_bos_gives_one() -> None:
    """In the history beside the main one too."""
    tokenizer = GreedyBytes(WITH_BOS)
    calls = [
        asked([user("hi")], "yo", [121, 111, 257], None),
        asked([user("sub")], "ya", [121, 97, 257], None),
    ]
    found = sequences(rows_of(calls, tokenizer), tokenizer)
    assert found == [
        [("<|bos|><|s|>user\nhi<|e|>\n<|s|>assistant\n", 22, 0), ("yo<|e|>", 3, 1)],
        [("<|bos|><|s|>user\nsub<|e|>\n<|s|>assistant\n", 23, 0), ("ya<|e|>", 3, 1)],
    ]


ABC = [
    256,
    117,
    115,
    101,
    114,
    10,
    113,
    257,
    10,
    256,
    97,
    115,
    115,
    105,
    115,
    116,
    97,
    110,
    116,
    10,
]
LOGPROBS = [-0.1, -0.2, -0.3, -0.4]


def test_035_the_ids_that_were_sampled_are_trained() -> None:
    """Encoding "abc" would give one token, 266, for four logprobs."""
    tokenizer = GreedyBytes(more=["ab", "abc"])
    assert tokenizer.encode("abc") == [266]
    (row,) = rows_of([asked([user("q")], "abc", [97, 98, 99, 257], ABC, LOGPROBS)], tokenizer)
    assert row.entries.target.tolist() == [97, 98, 99, 257]
    assert row.entries.logprob.tolist() == pytest.approx(LOGPROBS)


def test_035_without_sampled_ids_a_call_is_not_trained() -> None:
    """Nor encoded again, whatever else is known of it."""
    tokenizer = GreedyBytes(more=["ab", "abc"])
    call = asked([user("q")], "abc", None, ABC, LOGPROBS)
    trajectory = Trajectory(calls=[call], reward=1.0)
    assert render_missing_prompts([trajectory], tokenizer, model="agent") == 0
    assert dict(trajectory.completeness.left_out) == {"no ids": 1}
    with pytest.raises(NoTrainableTokens, match=r"sampled tokens are known.* left out: 1 no ids"):
        rows_of([call], tokenizer)
