"""Calls told as conversations: who goes on from whom, each sampled choice once.

Cases are those collected from public bug reports; their numbers name where an input comes from.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from art_core.calls import ModelCall, Origin
from art_core.histories import chains
from art_core.trajectories import Trajectory, choice_key
from art_core.types import Choice

SYSTEM = {"role": "system", "content": "s"}
USER = {"role": "user", "content": "q"}


def says(content: str) -> dict[str, Any]:
    return {"role": "assistant", "content": content}


def looks(query: str, call_id: str | None = "c1") -> dict[str, Any]:
    function = {"name": "look", "arguments": f'{{"q": "{query}"}}'}
    tool_call = {"id": call_id, "type": "function", "function": function}
    return {"role": "assistant", "content": "", "tool_calls": [tool_call]}


def result(content: str, call_id: str | None = "c1") -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": call_id, "content": content}


def made(
    name: str,
    namespace: str,
    messages: Sequence[dict[str, Any]],
    message: dict[str, Any],
    sampled: Sequence[int] = (1,),
    prompt: Sequence[int] | None = None,
    **fields: Any,
) -> ModelCall:
    """A call of node "agent"; without `prompt`, the server told no prompt ids."""
    node = namespace.rpartition("|")[2].partition(":")[0]
    return ModelCall(
        record_id=name,
        model="policy",
        step=1,
        request={"messages": list(messages)},
        message=message,
        finish_reason="stop",
        prompt_ids=None if prompt is None else list(prompt),  # type: ignore[arg-type]  # converted
        sampled_ids=list(sampled),  # type: ignore[arg-type]  # converted
        logprobs=[-0.1] * len(sampled),  # type: ignore[arg-type]  # converted
        origin=Origin(node=node, namespace=namespace),
        started=0.0,
        ended=1.0,
        **fields,
    )


def names(calls: Sequence[ModelCall]) -> list[list[str]]:
    return [[call.record_id for call in chain] for chain in chains(calls)]


def told(calls: Sequence[ModelCall]) -> Trajectory:
    trajectory = Trajectory(calls=list(calls))
    trajectory.tell_histories()
    return trajectory


def choices(trajectory: Trajectory) -> list[tuple[str, int]]:
    """Keys of all choices in all histories, in order."""
    parts = [trajectory.messages_and_choices]
    parts += [history.messages_and_choices for history in trajectory.additional_histories]
    return [choice_key(item) for part in parts for item in part if isinstance(item, Choice)]


def test_a_trimmed_history_that_starts_with_a_tool_result() -> None:
    """Case 021: 2 histories of 2 and 1 calls, 5 tokens; "so far" is trained once."""
    so_far = says("so far")
    calls = [
        made("1", "agent:1", [SYSTEM, USER], looks("x"), [1, 2]),
        made("2", "agent:2", [SYSTEM, USER, looks("x"), result("r")], so_far, [3]),
        made(
            "3",
            "agent:3",
            [SYSTEM, result("r"), so_far, {"role": "user", "content": "more"}],
            says("end"),
            [4, 5],
        ),
    ]
    trajectory = told(calls)
    assert names(calls) == [["1", "2"], ["3"]]
    assert choices(trajectory) == [("1", 0), ("2", 0), ("3", 0)]
    assert trajectory.completion_tokens == 5
    (cut,) = trajectory.additional_histories
    assert [m["role"] for m in cut.messages_and_choices[:4] if isinstance(m, dict)] == [
        "system",
        "tool",
        "assistant",
        "user",
    ]


def test_equal_answers_to_equal_prompts() -> None:
    """Case 024: 3 samples, 3 histories, 5 tokens; no merge, no chain."""
    calls = [
        made("a", "vote:a", [USER], says("yes"), [5, 6]),
        made("b", "vote:b", [USER], says("yes"), [5, 6]),
        made("c", "vote:c", [USER], says("no"), [7]),
    ]
    trajectory = told(calls)
    assert names(calls) == [["a"], ["b"], ["c"]]
    assert sorted(choices(trajectory)) == [("a", 0), ("b", 0), ("c", 0)]
    assert trajectory.completion_tokens == 5


def test_subgraphs_with_the_same_node_name() -> None:
    """Case 025: main history calls 1 and 4, the other 2 and 3."""
    boss = {"role": "system", "content": "boss"}
    helper = [{"role": "system", "content": "helper"}, {"role": "user", "content": "do x"}]
    again = {"role": "user", "content": "again"}
    calls = [
        made("1", "agent:1", [boss, USER], looks("x")),
        made("2", "tools:2|agent:3", helper, says("h1")),
        made("3", "tools:2|agent:4", [*helper, says("h1"), again], says("h2")),
        made("4", "agent:5", [boss, USER, looks("x"), result("h2")], says("done")),
    ]
    assert names(calls) == [["1", "4"], ["2", "3"]]
    assert sorted(choices(told(calls))) == [("1", 0), ("2", 0), ("3", 0), ("4", 0)]


def test_constant_tool_call_ids() -> None:
    """Case 028: 1 history, results ra and rb in order, 3 tokens."""
    first = [SYSTEM, USER, looks("a", "call_0"), result("ra", "call_0")]
    second = [*first, looks("b", "call_0"), result("rb", "call_0")]
    calls = [
        made("1", "agent:1", [SYSTEM, USER], looks("a", "call_0"), [1]),
        made("2", "agent:2", first, looks("b", "call_0"), [2]),
        made("3", "agent:3", second, says("ok"), [3]),
    ]
    trajectory = told(calls)
    assert names(calls) == [["1", "2", "3"]]
    results = [m["content"] for m in trajectory.messages() if m["role"] == "tool"]
    assert results == ["ra", "rb"]
    assert trajectory.completion_tokens == 3


@pytest.mark.parametrize("with_ids", [True, False])
def test_parallel_subgraphs_that_say_the_same_go_on_in_their_own(with_ids: bool) -> None:
    """Twins, each with its own next turn, asked in the other order."""
    more = [USER, says("yes"), {"role": "user", "content": "sure?"}]
    first, second = ([9], [9, 1, 8]) if with_ids else (None, None)
    calls = [
        made("a1", "left:1|agent:2", [USER], says("yes"), [1], first),
        made("b1", "right:3|agent:4", [USER], says("yes"), [1], first),
        made("b2", "right:3|agent:5", more, says("b"), [2], second),
        made("a2", "left:1|agent:6", more, says("a"), [3], second),
    ]
    assert names(calls) == [["a1", "a2"], ["b1", "b2"]]


def test_a_retry_that_samples_the_same_text_is_where_the_run_goes_on() -> None:
    """The first try's answer was thrown away: a history of its own."""
    calls = [
        made("try 1", "agent:1", [USER], says("x")),
        made("try 2", "agent:1", [USER], says("x")),
        made("next", "agent:2", [USER, says("x"), USER], says("y")),
    ]
    calls[1] = replace(calls[1], started=2.0, ended=3.0)
    assert names(calls) == [["try 2", "next"], ["try 1"]]


def test_two_calls_that_go_on_from_one_share_it_as_context() -> None:
    """Fan-out after a turn: its choice is in the first's history only."""
    start = [USER, says("x")]
    calls = [
        made("root", "plan:1", [USER], says("x")),
        made("left", "work:2", [*start, {"role": "user", "content": "l"}], says("1")),
        made("right", "work:3", [*start, {"role": "user", "content": "r"}], says("2")),
    ]
    trajectory = told(calls)
    assert names(calls) == [["root", "left"], ["right"]]
    assert sorted(choices(trajectory)) == [("left", 0), ("right", 0), ("root", 0)]
    (other,) = trajectory.additional_histories
    assert other.messages_and_choices[1] == says("x")


@pytest.mark.parametrize(
    "history",
    [
        [{"role": "user", "content": "what was said before, in short"}],  # summarised
        [USER, {"role": "user", "content": "again"}],  # the answer was removed
        [says("x"), USER, {"role": "user", "content": "again"}],  # put in another order
    ],
    ids=["summarised", "removed", "re-ordered"],
)
def test_a_history_that_was_changed_begins_a_new_one(history: list[dict[str, Any]]) -> None:
    calls = [
        made("1", "agent:1", [USER], says("x")),
        made("2", "agent:2", history, says("y")),
    ]
    assert sorted(names(calls)) == [["1"], ["2"]]


def test_tool_results_in_another_order_go_on_all_the_same() -> None:
    """Both calls of a turn are answered, the second first; ids of calls may be missing."""
    two = looks("a", None)
    two["tool_calls"] = [*two["tool_calls"], looks("b", None)["tool_calls"][0]]
    calls = [
        made("1", "agent:1", [USER], two),
        made("2", "agent:2", [USER, two, result("rb", None), result("ra", None)], says("ok")),
    ]
    assert names(calls) == [["1", "2"]]


def test_messages_count_as_the_same_however_they_are_spelled() -> None:
    """Libraries dump arguments again, drop null content, and put text into parts."""
    sampled = looks("x")
    sampled["tool_calls"][0]["function"]["arguments"] = '{"q":   "x"}'
    read = {**looks("x"), "content": None}
    parts = {"role": "user", "content": [{"type": "text", "text": "q"}]}
    calls = [
        made("1", "agent:1", [USER], sampled),
        made("2", "agent:2", [parts, read, result("r")], says("ok")),
    ]
    assert names(calls) == [["1", "2"]]


def test_ids_decide_where_there_are_ids() -> None:
    """The messages go on, the ids do not: what was sampled was rendered another way."""
    grown = [USER, says("x"), USER]
    drifted = [
        made("1", "agent:1", [USER], says("x"), [1], [9]),
        made("2", "agent:2", grown, says("y"), [2], [9, 7, 8]),
    ]
    joined = [drifted[0], made("2", "agent:2", grown, says("y"), [2], [9, 1, 8])]
    assert names(joined) == [["1", "2"]]
    assert names(drifted) == [["2"], ["1"]]  # the one that read more is the main one


def test_calls_of_other_models_are_context_in_the_conversation_they_belong_to() -> None:
    other = made("h", "other:2", [USER, says("x"), USER], says("hosted"), left_out="other model")
    judge = made("j", "judge:4", [says("rate it")], says("5"), left_out="other model")
    last = [*other.messages, says("hosted"), USER]
    calls = [
        made("1", "agent:1", [USER], says("x")),
        other,
        made("3", "agent:3", last, says("z")),
        judge,
    ]
    trajectory = told(calls)
    assert choices(trajectory) == [("1", 0), ("3", 0)]
    assert trajectory.messages_and_choices[3] == says("hosted")
    assert trajectory.additional_histories == []


def test_a_rollout_of_other_models_is_told_by_its_main_conversation() -> None:
    trajectory = told([made("h", "agent:1", [USER], says("x"), left_out="other model")])
    assert trajectory.messages() == [USER, says("x")]
    assert trajectory.chosen_records() is None


def test_failed_calls_and_siblings_are_no_turns() -> None:
    calls = [
        made("1", "agent:1", [USER], says("x"), error="cut", left_out="broken answer"),
        made("2", "agent:1", [USER], says("y"), left_out="several answers"),
        made("3", "agent:1", [USER], says("z")),
    ]
    assert names(calls) == [["3"]]
    assert told([]).messages_and_choices == []
