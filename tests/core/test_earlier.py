"""Which earlier calls a call has read, looked up and compared one by one: the same."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from art_core.calls import ModelCall
from art_core.earlier import Earlier
from art_core.prefixes import Prefixes
from art_core.said import same_message


def call(
    number: int,
    messages: Sequence[dict[str, Any]],
    message: dict[str, Any],
    prompt: list[int] | None,
    sampled: list[int] | None,
) -> ModelCall:
    return ModelCall(
        record_id=f"c{number}",
        model="agent",
        step=0,
        request={"messages": list(messages)},
        message=message,
        finish_reason="stop",
        prompt_ids=None if prompt is None else np.array(prompt),
        sampled_ids=None if sampled is None else np.array(sampled),
    )


def some_calls(seed: int) -> list[ModelCall]:
    """Conversations that go on, fork, repeat, are cut, lose their ids or are spelled otherwise."""
    dice = random.Random(seed)
    threads: list[tuple[list[dict[str, Any]], list[int]]] = [
        ([{"role": "user", "content": "q"}], [1, 2])
    ]
    calls = []
    for number in range(dice.randint(1, 25)):
        messages, prompt = dice.choice(threads)
        text, sampled = dice.choice("ab"), [dice.randint(5, 6)] * dice.randint(1, 2)
        content = dice.choice([text, f" {text}\n", [{"type": "text", "text": text}]])
        answer = {"role": "assistant", "content": content}
        kept = dice.random()
        ids = prompt if kept > 0.2 else None
        calls.append(call(number, messages, answer, ids, sampled if kept > 0.3 else None))
        longer = [*messages, {"role": "assistant", "content": text}]
        if dice.random() < 0.7:
            longer.append({"role": "user", "content": dice.choice("xy")})
        threads.append((longer, [*prompt, *sampled, *dice.choice([[], [9]])]))
        if dice.random() < 0.2:
            threads.append((longer[-2:], [dice.randint(1, 3)]))
    return calls


def read(later: ModelCall, before: ModelCall) -> bool:
    """The definition, in plain words: by ids, or by messages where either lacks ids."""
    if later.prompt_ids is None or before.prompt_ids is None or before.sampled_ids is None:
        start = [*before.messages, before.message]
        there = later.messages[: len(start)]
        return len(there) == len(start) and all(map(same_message, there, start))
    whole: list[int] = [*before.prompt_ids.tolist(), *before.sampled_ids.tolist()]
    start_of_later: list[int] = later.prompt_ids.tolist()[: len(whole)]
    return start_of_later == whole


@pytest.mark.parametrize("seed", range(100))
def test_what_is_looked_up_is_what_comparing_all_finds(seed: int) -> None:
    calls = some_calls(seed)
    earlier = Earlier(calls)
    for number, later in enumerate(calls):
        before = [c for c in calls[:number] if read(later, c)]
        most = max((len(c.messages) for c in before), default=0)
        wanted = [c.record_id for c in before if len(c.messages) == most]
        assert [c.record_id for c in earlier.longest_read(later)] == wanted
        earlier.add(later)


def test_prefixes_are_told_by_content_and_length() -> None:
    """Zeros count too: [0] is no beginning of [], and [0, 0] none of [0]."""
    kept = Prefixes(6)
    for place, sequence in enumerate([[], [0], [0, 0], [0, 7], [7, 0], [0, 7, 2**31 - 1]]):
        kept.add(place, np.array(sequence, np.int32))
    found = {
        name: kept.of(np.array(sequence, np.int32)).tolist()
        for name, sequence in {
            "none": [],
            "zero": [0],
            "long": [0, 7, 2**31 - 1, 5],
            "other": [7, 0, 1],
        }.items()
    }
    assert found == {"none": [0], "zero": [0, 1], "long": [0, 1, 3, 5], "other": [0, 4]}
